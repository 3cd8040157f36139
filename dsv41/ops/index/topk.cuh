// The k best of rows of scores that lie in device memory.
#pragma once
#include <cstdint>

namespace topk_rows {

constexpr int kTile = 2048;  // scores that a block looks at in one step: eight a thread
constexpr int kMost = 512;   // entries a row
constexpr int kSlack = 256;  // more of them in a list that is merged later
constexpr int kRoom = kMost + kSlack;
constexpr int kCap = 4096;

struct Rows {
  static constexpr int kExtra = 0;
  const int* lens;
  int width;
  __device__ int length(int u) const { return lens[u] < 0 ? 0 : lens[u] < width ? lens[u] : width; }
  __device__ int operator()(int u) const {
    int n = length(u);
    return n > 0 ? (n + kTile - 1) / kTile : 1;
  }
};

constexpr int kDepth = 4;     // tiles in flight
struct Shared {
  float ring[kDepth][kTile];
  uint64_t list[kCap];
  choose::Work work;
  choose::Share share;
  int sums[2 * choose::kWarps], count[3];
};

// A row's scores on their way through shared memory. A thread reads only what it copied itself.
struct Stream {
  const float* row;
  int length, end;  // of the row, in scores; of the block's share, in tiles
  bool aligned;

  __device__ __forceinline__ void fetch(Shared& s, int tile, int tid) const {
    for (int half = 0; half < 2; ++half) {
      const int at = tile * kTile + half * 1024 + 4 * tid;
      if (aligned && tile < end && at + 4 <= length)
        hopper::copy_16(&s.ring[tile % kDepth][half * 1024 + 4 * tid], row + at, true);
    }
    hopper::copy_commit();
  }
  // Four scores; -inf beyond the end of the row.
  __device__ __forceinline__ void take(Shared& s, int tile, int half, int tid, float* out) const {
    const int at = tile * kTile + half * 1024 + 4 * tid;
    if (aligned && at + 4 <= length) {
      const float4 x = *reinterpret_cast<const float4*>(&s.ring[tile % kDepth][half * 1024 + 4 * tid]);
      out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
    } else {
      for (int i = 0; i < 4; ++i) out[i] = at + i < length ? row[at + i] : __uint_as_float(0xFF800000u);
    }
  }
};

template <int BYTES>
__device__ void scan(const void* scores_, const void* lens, void* ids_, void* scratch, int rows, int width,
                     int64_t stride, int k, int grid, void* memory) {
  static_assert(sizeof(Shared) <= BYTES);
  const float* scores = static_cast<const float*>(scores_);
  uint64_t* lists = static_cast<uint64_t*>(scratch);
  int* counts = reinterpret_cast<int*>(lists + static_cast<int64_t>(2 * grid) * kRoom);
  Shared& s = *static_cast<Shared*>(memory);
  const int tid = threadIdx.x, lane = tid % 32, block = blockIdx.x;
  const Rows units{static_cast<const int*>(lens), width};
  choose::find_share(units, rows, block, grid, 1, s.sums, &s.share, tid, choose::kThreads);
  const choose::Share share = s.share;
  if (share.unit < 0) return;
  int left = share.each, round = 0;
  for (int unit = share.unit; left > 0 && unit < rows; ++unit) {
    const int offset = unit == share.unit ? share.offset : 0;
    const int tiles = unit == share.unit ? share.tiles : units(unit), length = units.length(unit);
    const int end = offset + left < tiles ? offset + left : tiles;
    const float* row = scores + unit * stride;
    const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
    uint64_t bar = choose::kNothing;
    int base = 0;
    choose::sync();
    if (tid < 3) s.count[tid] = 0;
    choose::sync();
    const Stream stream{row, length, end, aligned};
    for (int ahead = 0; ahead < kDepth - 1; ++ahead) stream.fetch(s, offset + ahead, tid);
    for (int tile = offset; tile < end; ++tile, ++round) {
      stream.fetch(s, tile + kDepth - 1, tid);
      hopper::copy_wait<kDepth - 1>();
      float x[8];
      for (int half = 0; half < 2; ++half) stream.take(s, tile, half, tid, x + 4 * half);
      uint64_t keys[8];
      uint32_t pass = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t order = choose::ordered(x[i]);
        keys[i] = choose::key_of(order, tile * kTile + i / 4 * 1024 + 4 * tid + i % 4);
        pass |= static_cast<uint32_t>(choose::passes(order, keys[i], bar)) << i;
      }
      choose::append_all(s.list, base, &s.count[round % 3], pass, keys, lane);
      choose::sync();
      base += s.count[round % 3];
      if (tid == 0) s.count[(round + 2) % 3] = 0;
      if (base > kCap - kTile && tile + 1 < end) base = choose::cut<kCap / 256>(s.list, base, k, 128, s.work, tid), bar = s.work.bar;
    }
    const bool whole = offset == 0 && end == tiles;
    if (base > k + (whole ? 0 : kSlack))
      base = choose::cut<kCap / 256>(s.list, base, k, whole ? 0 : kSlack, s.work, tid);
    if (whole) {
      choose::sync();
      choose::write_sorted<>(s.list, base, k, static_cast<int*>(ids_) + static_cast<int64_t>(unit) * k, s.work, tid);
    } else {
      choose::sync();
      const int list = 2 * block + (offset == 0 ? 1 : 0);
      for (int i = tid; i < base; i += choose::kThreads) lists[static_cast<int64_t>(list) * kRoom + i] = s.list[i];
      if (tid == 0) counts[list] = base;
    }
    left -= end - offset;
  }
}

struct MergeShared {
  uint64_t list[choose::kMergeCap];
  choose::Work work;
  choose::Share share;
  int sums[2 * choose::kWarps], count[3];
};

template <int BYTES>
__device__ void merge(const void* lens, void* ids, void* scratch, int rows, int width, int k, int grid, void* memory) {
  static_assert(sizeof(MergeShared) <= BYTES);
  const uint64_t* lists = static_cast<const uint64_t*>(scratch);
  const int* counts = reinterpret_cast<const int*>(lists + static_cast<int64_t>(2 * grid) * kRoom);
  MergeShared& s = *static_cast<MergeShared*>(memory);
  const int tid = threadIdx.x, block = blockIdx.x;
  const Rows units{static_cast<const int*>(lens), width};
  choose::find_share(units, rows, block, grid, 1, s.sums, &s.share, tid, choose::kMergeThreads);
  cudaGridDependencySynchronize();  // the scan has ended
  const choose::Merge found = choose::find_merge(s.share, block);
  if (found.unit < 0) return;
  const int count = choose::merge_lists(lists, counts, kRoom, found.first, found.last, 0, 1, kRoom, k, s.list, s.count,
                                        s.work, tid);
  int* out = static_cast<int*>(ids) + static_cast<int64_t>(found.unit) * k;
  choose::write_sorted<choose::kMergeThreads>(s.list, count, k, out, s.work, tid);
}

}  // namespace topk_rows
