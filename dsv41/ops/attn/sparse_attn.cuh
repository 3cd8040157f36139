// Sparse attention over cache records: one block attends one query row (up to 64 heads) at a time.
//
// Three warp groups. The producer fetches the records of a tile of 64 keys, decodes them to bf16 (exact) and lays
// them out for the tensor cores. The first consumer makes the scores, the softmax and columns 0..255 of the
// output; the second takes the weights and makes columns 256..511. A decoded tile is key and value, handed over
// and given back in halves of 256 columns. Tiles without a key are skipped, but for the last of a row, which
// ends it.
namespace sparse_attn {
using namespace hopper;

struct Row {  // a tile as the consumers see it
  unsigned long long keys;
  int last, unused;
};

// An argument that is a pointer here and an address in TileLang: tensors may be views of any strides.
struct Address {
  const void* at;
  template <typename P>
  __device__ __forceinline__ Address(P address) : at((const void*)(address)) {}
  template <typename T>
  __device__ __forceinline__ T* as() const { return static_cast<T*>(const_cast<void*>(at)); }
};

struct Shared {
  alignas(1024) uint8_t q[TILE_BYTES];
  uint8_t kv[2][TILE_BYTES];
  uint8_t raw[4][16 * RAW_ROW];  // of each producer warp: its 16 records, or halves of them
  uint4 weights[4][128];
  float2 factors[128];
  Row rows[2][2];
  int spoiled[4];
  uint64_t full[2][2], empty[2][2], q_empty, sent, taken;
};
static_assert(sizeof(Shared) == 226304, "SHARED_BYTES of tilelang_cuda.py");

// ---- what a block does in which order --------------------------------------------------------------------
struct Work {
  int rows, heads, head_tiles, splits, window_tiles, tiles;
  __device__ __forceinline__ int items() const { return rows * head_tiles * splits; }
  __device__ __forceinline__ int row(int item) const { return item / (head_tiles * splits); }
  __device__ __forceinline__ int head(int item) const { return item / splits % head_tiles * HEADS; }
  __device__ __forceinline__ int first_tile(int item) const { return item % splits * tiles / splits; }
  __device__ __forceinline__ int end_tile(int item) const { return (item % splits + 1) * tiles / splits; }
};

__device__ __forceinline__ void warp_arrive(uint64_t* bar) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(bar);
}

// ---- producer --------------------------------------------------------------------------------------------
template <int WINDOW, int COMPRESSED>
struct Producer {
  const Work& work;
  const Records &window, &compressed;
  Shared& shared;
  int lane, warp;
  // The tile to fetch next.
  int item, tile, end, query;
  int low, high;  // its ids `lane` and `lane + 32`, not looked at before they are needed

  __device__ __forceinline__ void read_ids() {
    low = high = -1;
    const bool near = tile < work.window_tiles;
    const int at = (near ? tile : tile - work.window_tiles) * KEYS + lane;
    const int* ids = near ? window.ids : compressed.ids;
    ids += (near ? window.ids_stride : compressed.ids_stride) * query;
    const int count = near ? window.count : compressed.count;
    if (at < count) low = ids[at];
    if (at + 32 < count) high = ids[at + 32];
  }
  __device__ __forceinline__ void start(int first) {
    item = first;
    if (item >= work.items()) return;
    tile = work.first_tile(item), end = work.end_tile(item), query = work.row(item);
    read_ids();
  }
  __device__ __forceinline__ void advance() {
    if (++tile < end)
      read_ids();
    else
      start(item + gridDim.x);
  }
  __device__ __forceinline__ unsigned long long keys() {
    const uint32_t slots = tile < work.window_tiles ? window.slots : compressed.slots;
    if (static_cast<uint32_t>(low) >= slots) low = -1;
    if (static_cast<uint32_t>(high) >= slots) high = -1;
    return __ballot_sync(~0u, low >= 0) | static_cast<unsigned long long>(__ballot_sync(~0u, high >= 0)) << 32;
  }
  // The slot of this thread's row in group `group` (0 or 1) of its warp's 16 rows.
  __device__ __forceinline__ int slot(int group, int low, int high) const {
    return __shfl_sync(~0u, warp < 2 ? low : high, (warp & 1) * 16 + group * 8 + (lane & 7));
  }
  __device__ __forceinline__ int row(int group) const { return warp * 16 + group * 8 + (lane & 7); }

  // Page and place of this thread's record of a group; no page where there is none.
  __device__ __forceinline__ const uint8_t* find(const Records& from, int id, uint32_t& at) const {
    const uint32_t index = id < 0 ? 0 : id, page = from.page(index);
    at = index - page * from.page_size;
    return id < 0 ? nullptr : from.pages + page * from.page_stride;
  }
  __device__ __forceinline__ uint8_t* raw(int group) const {
    return shared.raw[warp] + (group * 8 + (lane & 7)) * RAW_ROW;
  }
  // Copies a half (256 columns) of a group of records. NVFP4: both halves have their place in `raw`; MXFP8: one.
  template <int LAYOUT>
  __device__ __forceinline__ void fetch(const Records& from, const uint8_t* record, int half, int group) {
    const bool held = record != nullptr;
    const uint8_t* source = held ? record : from.pages;
    const int i = lane >> 3;
    if constexpr (LAYOUT == NVFP4) {
      uint8_t* to = raw(group) + half * 128;
#pragma unroll
      for (int k = 0; k < 8; k += 4) copy_16(to + (i + k) * 16, source + (held ? half * 128 + (i + k) * 16 : 0), held);
      if (i == 0) copy_16(raw(group) + 256 + half * 16, source + (held ? 256 + half * 16 : 0), held);
    } else if constexpr (LAYOUT == MXFP8) {
      uint8_t* to = raw(group);
#pragma unroll
      for (int k = 0; k < 16; k += 4) copy_16(to + (i + k) * 16, source + (held ? half * 256 + (i + k) * 16 : 0), held);
      if (i == 0) copy_16(to + 256, source + (held ? 512 : 0), held);
    }
  }

  __device__ __forceinline__ void copy_q(const uint8_t* q, long long q_row, long long q_head, int of) {
    const int thread = threadIdx.x & 127;
    const uint8_t* from = q + work.row(of) * q_row;
    const int head = work.head(of);
#pragma unroll 4
    for (int i = thread; i < HEADS * 64; i += 128) {
      const int row = i >> 6, piece = i & 63;
      const bool held = head + row < work.heads;
      copy_16(shared.q + (piece >> 3) * COLUMN_BYTES + swizzle_128(row, piece & 7),
              from + (held ? head + row : 0) * q_head + piece * 16, held);
    }
  }

  // A tile with keys, or the last of its item.
  struct Tile {
    unsigned long long keys;
    int item, low, high;
    bool last, near;
    // This thread's rows in each group, for layouts that are fetched ahead.
    const uint8_t *first, *second;
    __device__ __forceinline__ const uint8_t* record(int group) const { return group ? second : first; }
  };
  template <int LAYOUT>
  __device__ __forceinline__ const uint8_t* record(const Records& from, int group) const {
    uint32_t at;
    const uint8_t* page = find(from, slot(group, low, high), at);
    return page == nullptr ? nullptr : page + static_cast<size_t>(at) * (LAYOUT == NVFP4 ? 288 : 528);
  }
  // Moves to the next such tile and asks for the ids behind it; false when there is none.
  __device__ __forceinline__ bool next(Tile& found) {
    if (item >= work.items()) return false;
    found.keys = keys();
    while (found.keys == 0 && tile + 1 < end) {
      advance();
      found.keys = keys();
    }
    found.item = item, found.low = low, found.high = high;
    found.last = tile + 1 == end, found.near = tile < work.window_tiles;
    found.first = found.near ? record<WINDOW>(window, 0) : record<COMPRESSED>(compressed, 0);
    found.second = found.near ? record<WINDOW>(window, 1) : record<COMPRESSED>(compressed, 1);
    advance();
    return true;
  }

  // Fetches what tile `then` can have when the bytes of a step of the tile before it are used up: all of `group`
  // after its second half; after the first only where two NVFP4 tiles share the places of their halves.
  template <int BEFORE>
  __device__ __forceinline__ void fetch_behind(const Tile& then, int half, int group) {
    if (then.near)
      fetch_set<BEFORE, WINDOW>(window, then, half, group);
    else
      fetch_set<BEFORE, COMPRESSED>(compressed, then, half, group);
  }
  template <int BEFORE, int LAYOUT>
  __device__ __forceinline__ void fetch_set(const Records& from, const Tile& then, int half, int group) {
    if (BEFORE == NVFP4 && LAYOUT == NVFP4) {
      fetch<LAYOUT>(from, then.record(group), half, group);
    } else if (half == 1) {
      fetch<LAYOUT>(from, then.record(group), 0, group);
      if (LAYOUT == NVFP4) fetch<LAYOUT>(from, then.record(group), 1, group);
    }
  }

  // Decodes a half of tile `now` in two steps, each a group of eight rows, and fetches behind it. `deep`: the bytes
  // of a step were asked for four steps ago, not two.
  template <int LAYOUT>
  __device__ __forceinline__ uint32_t decode_half(uint8_t* to, int half, const Records& from, const Tile& now,
                                                  bool more, const Tile& then, bool deep) {
    const int segment = lane >> 3;
    uint32_t bad = 0;
#pragma unroll 1  // what is executed once a tile is bound by instruction fetches: keep it short
    for (int group = 0; group < 2; ++group) {
      if constexpr (AHEAD<LAYOUT>) {
        if (LAYOUT == NVFP4 && (half == 1 || deep))
          copy_wait<3>();
        else
          copy_wait<1>();
        __syncwarp();
        const uint8_t* bytes = raw(group);
        if constexpr (LAYOUT == NVFP4) {
          uint32_t words[2][4], scales[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            read_16(words[e], bytes + half * 128 + (e * 4 + segment) * 16);
            scales[e] = *reinterpret_cast<const uint16_t*>(bytes + 256 + half * 16 + (e * 4 + segment) * 2);
          }
          if (!__any_sync(~0u, (large(scales[0]) | large(scales[1])) != 0)) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
              bad |= decode<LAYOUT, true>(to, row(group), e * 4 + segment, half, words[e], scales[e]);
          } else {
#pragma unroll
            for (int e = 0; e < 2; ++e)
              bad |= decode<LAYOUT, false>(to, row(group), e * 4 + segment, half, words[e], scales[e]);
          }
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            uint32_t words[8];
            read_16(words, bytes + (e * 4 + segment) * 32);
            read_16(words + 4, bytes + (e * 4 + segment) * 32 + 16);
            const uint32_t scale = bytes[256 + half * 8 + e * 4 + segment];
            bad |= decode<LAYOUT, false>(to, row(group), e * 4 + segment, half, words, scale);
          }
        }
        __syncwarp();
      } else {
        uint32_t at;
        const uint8_t* page = find(from, slot(group, now.low, now.high), at);
#pragma unroll 1
        for (int e = 0; e < 2; ++e) {
          uint32_t words[16], scale;
          read_direct<LAYOUT>(words, scale, from, page, at, half * 8 + e * 4 + segment);
          bad |= decode<LAYOUT, false>(to, row(group), e * 4 + segment, half, words, scale);
        }
      }
      if (LAYOUT == MXFP8 && half == 0)
        fetch<LAYOUT>(from, now.record(group), 1, group);
      else if (more)
        fetch_behind<LAYOUT>(then, half, group);
      copy_commit();
    }
    return bad;
  }

  __device__ __forceinline__ void run(const uint8_t* q, long long q_row, long long q_head) {
    lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    start(blockIdx.x);
    Tile now, then;
    bool more = next(now), deep = false;
    if (!more) return;
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      fetch_behind<BF16>(now, 1, group);
      copy_commit();
    }
    copy_q(q, q_row, q_head, now.item);
    int buffer = 0, turn = 0, current = -1, number = 0;  // `number` counts the items of this block
    while (more) {
      more = next(then);
      const bool first = now.item != current;
      current = now.item, number += first;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        barrier_wait(&shared.empty[buffer][half], turn ^ 1);
        uint8_t* to = shared.kv[buffer] + half * HALF_BYTES;
        const uint32_t bad = now.near ? decode_half<WINDOW>(to, half, window, now, more, then, deep)
                                      : decode_half<COMPRESSED>(to, half, compressed, now, more, then, deep);
        if (first && half == 0) {
          if (number > 1) {
            barrier_wait(&shared.q_empty, number & 1);
            copy_q(q, q_row, q_head, now.item);
          }
          copy_commit();
          copy_wait<0>();
        }
        if (__any_sync(~0u, bad != 0) && lane == 0) atomicExch(&shared.spoiled[number & 3], number);
        if (warp == 0 && lane == 0) shared.rows[buffer][half] = {now.keys, now.last, 0};
        fence_async();
        warp_arrive(&shared.full[buffer][half]);
      }
      buffer ^= 1, turn ^= buffer == 0;
      deep = (now.near ? WINDOW : COMPRESSED) == NVFP4;
      now = then;
    }
  }
};

// ---- consumers -------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t pair(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}

// Adds weights (a thread's A fragments of four k steps) times this half of a tile's values to the output.
__device__ __forceinline__ void add_values(float (&out)[128], uint32_t (&weights)[4][4], uint32_t tile, bool first) {
  const uint64_t values = tile_descriptor(tile, COLUMN_BYTES, 1024);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_bf16_rs_t(out, weights[k], values + k * (2048 >> 4), k > 0 || !first);
  wgmma_commit();
  wgmma_wait<0>();
  keep(out);
}

__device__ __forceinline__ void scale_rows(float (&out)[128], float2 by) {
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i] *= i & 2 ? by.y : by.x;
}

struct Result {
  uint8_t* out;
  long long out_row, out_head;  // bytes
  float *partial, *partial_sums;
};

// This thread's part of the output: rows `row` and `row + 8` of the head tile, columns of one half.
__device__ __forceinline__ void write_out(float (&out)[128], float2 factor, const Work& work, const Result& result,
                                          int item, int half) {
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2), quad = lane & 3;
  const int head = work.head(item);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = head + row + 8 * r;
    const float by = r ? factor.y : factor.x;
    if (work.splits > 1) {
      if (at >= work.heads) continue;
      const size_t part = static_cast<size_t>(work.row(item) * work.splits + item % work.splits) * work.heads + at;
      float* to = result.partial + part * WIDTH + half * HALF + 2 * quad;
#pragma unroll
      for (int j = 0; j < 32; ++j)
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(out[4 * j + 2 * r], out[4 * j + 2 * r + 1]);
      continue;
    }
    uint8_t* to = result.out + work.row(item) * result.out_row + at * result.out_head + half * 512 + quad * 16;
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      // Four threads hold 16 bytes of four column groups in pieces of 4: each gathers one group.
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = pair(out[4 * (j + i) + 2 * r] * by, out[4 * (j + i) + 2 * r + 1] * by);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? a[i] : a[i + 1], 1);
        (lane & 1 ? a[i] : a[i + 1]) = other;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(~0u, lane & 2 ? a[i] : a[i + 2], 2);
        (lane & 2 ? a[i] : a[i + 2]) = other;
      }
      if (at < work.heads) *reinterpret_cast<uint4*>(to + 16 * j) = make_uint4(a[0], a[1], a[2], a[3]);
    }
  }
}

// Scores, softmax, columns 0..255. Weights are rounded to bf16 relative to the running maximum (`top`,
// its log2), so that a key that outweighs the others is not rounded at all.
__device__ __forceinline__ void consume_scores(const Work& work, Shared& shared, const Result& result,
                                               const float* sink, float* lse, float scale) {
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, row = (thread >> 5) * 16 + (lane >> 2);
  const uint64_t q = tile_descriptor(smem_address(shared.q));
  const float scale_2 = scale * 1.44269504088896340736f;
  float out[128];
  int buffer = 0, turn = 0, sent_turn = 0, number = 0;
  for (int item = blockIdx.x; item < work.items(); item += gridDim.x) {
    ++number;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    bool first = true, last;
    do {
      const uint64_t tile = tile_descriptor(smem_address(shared.kv[buffer]));
      float s[32];
      barrier_wait(&shared.full[buffer][0], turn);
      const unsigned long long keys = shared.rows[buffer][0].keys;
      last = shared.rows[buffer][0].last;
      wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half) barrier_wait(&shared.full[buffer][1], turn);
#pragma unroll
        for (int k = half * 16; k < half * 16 + 16; ++k) {
          const uint32_t at = ((k >> 2) * COLUMN_BYTES + (k & 3) * 32) >> 4;  // descriptors count in 16 bytes
          wgmma_bf16_ss(s, q + at, tile + at, k > 0);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      keep(s);
      if (last) warp_arrive(&shared.q_empty);
      // Softmax: element i is key 8 * (i / 4) + 2 * (lane % 4) + i % 2 of row (i & 2 ? row + 8 : row).
      float new_top[2] = {-INFINITY, -INFINITY};
      if (keys != ~0ull) {
        const unsigned long long mine = keys >> 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (!(mine >> (8 * (i >> 2) + (i & 1)) & 1)) s[i] = -INFINITY;
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) new_top[i >> 1 & 1] = fmaxf(new_top[i >> 1 & 1], s[i]);
      float2 rescale;
      float base[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        new_top[r] = fmaxf(new_top[r], __shfl_xor_sync(~0u, new_top[r], 1));
        new_top[r] = fmaxf(new_top[r], __shfl_xor_sync(~0u, new_top[r], 2));
        new_top[r] = fmaxf(top[r], new_top[r] * scale_2);
        base[r] = new_top[r] == -INFINITY ? 0.f : new_top[r];
      }
      rescale.x = exp2f(top[0] - base[0]), rescale.y = exp2f(top[1] - base[1]);
      top[0] = new_top[0], top[1] = new_top[1];
      float added[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        s[i] = exp2f(fmaf(s[i], scale_2, -base[i >> 1 & 1]));
        added[i >> 1 & 1] += s[i];
      }
      sum[0] = sum[0] * rescale.x + added[0], sum[1] = sum[1] * rescale.y + added[1];
      uint32_t weights[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[k][i] = pair(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
      barrier_wait(&shared.taken, sent_turn ^ 1);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        shared.weights[k][thread] = make_uint4(weights[k][0], weights[k][1], weights[k][2], weights[k][3]);
      shared.factors[thread] = rescale;
      warp_arrive(&shared.sent);
      sent_turn ^= 1;
      if (!first && __any_sync(~0u, rescale.x != 1 || rescale.y != 1)) scale_rows(out, rescale);
      add_values(out, weights, smem_address(shared.kv[buffer]), first);
      warp_arrive(&shared.empty[buffer][0]);
      buffer ^= 1, turn ^= buffer == 0;
      first = false;
    } while (!last);

    const bool spoiled = shared.spoiled[number & 3] == number;
    const int head = work.head(item) + row;
    float2 factor = make_float2(1.f, 1.f);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      if (spoiled) sum[r] = NAN;
      const int at = head + 8 * r;
      const bool mine = at < work.heads && (lane & 3) == 0;
      if (work.splits > 1) {
        if (mine) {
          const size_t part = static_cast<size_t>(work.row(item) * work.splits + item % work.splits) * work.heads + at;
          result.partial_sums[2 * part] = top[r], result.partial_sums[2 * part + 1] = sum[r];
        }
        continue;
      }
      const float base = top[r] == -INFINITY ? 0.f : top[r];
      float total = sum[r];
      if (sink != nullptr && at < work.heads) total += exp2f(sink[at] * 1.44269504088896340736f - base);
      (r ? factor.y : factor.x) = total == 0 ? 0.f : 1 / total;
      if (mine && lse != nullptr)
        lse[static_cast<size_t>(work.row(item)) * work.heads + at] = logf(sum[r]) + base * 0.69314718055994530942f;
    }
    barrier_wait(&shared.taken, sent_turn ^ 1);
    shared.factors[thread] = factor;
    warp_arrive(&shared.sent);
    sent_turn ^= 1;
    write_out(out, factor, work, result, item, 0);
  }
}

// Columns 256..511.
__device__ __forceinline__ void consume_values(const Work& work, Shared& shared, const Result& result) {
  const int thread = threadIdx.x & 127;
  float out[128];
  int buffer = 0, turn = 0, sent_turn = 0;
  for (int item = blockIdx.x; item < work.items(); item += gridDim.x) {
    bool first = true, last;
    do {
      const uint32_t tile = smem_address(shared.kv[buffer]) + HALF_BYTES;
      barrier_wait(&shared.full[buffer][1], turn);
      last = shared.rows[buffer][1].last;
      barrier_wait(&shared.sent, sent_turn);
      uint32_t weights[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 v = shared.weights[k][thread];
        weights[k][0] = v.x, weights[k][1] = v.y, weights[k][2] = v.z, weights[k][3] = v.w;
      }
      const float2 rescale = shared.factors[thread];
      warp_arrive(&shared.taken);
      sent_turn ^= 1;
      if (!first && __any_sync(~0u, rescale.x != 1 || rescale.y != 1)) scale_rows(out, rescale);
      add_values(out, weights, tile, first);
      warp_arrive(&shared.empty[buffer][1]);
      buffer ^= 1, turn ^= buffer == 0;
      first = false;
    } while (!last);
    barrier_wait(&shared.sent, sent_turn);
    const float2 factor = shared.factors[thread];
    warp_arrive(&shared.taken);
    sent_turn ^= 1;
    write_out(out, factor, work, result, item, 1);
  }
}

// Strides in elements of their tensors, page strides in bytes. `sink` and `lse` may be null. With splits > 1 the
// results are parts: [rows, splits, heads, 512] f32 sums, then (log2 of the maximum, sum) pairs.
template <int WINDOW, int COMPRESSED>
__device__ __forceinline__ void attend(Address q, long long q_row, long long q_head, int rows, int heads,
                                       Address window, long long window_stride, int window_page, int window_slots,
                                       Address window_ids, long long window_ids_stride, int window_count,
                                       Address compressed, long long compressed_stride, int compressed_page,
                                       int compressed_slots, Address compressed_ids,
                                       long long compressed_ids_stride, int compressed_count, Address sink,
                                       float scale, int splits, Address out, long long out_row, long long out_head,
                                       Address lse, Address scratch, void* shared_memory) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  if (threadIdx.x == 0) {
    for (int b = 0; b < 2; ++b) {
      for (int half = 0; half < 2; ++half) barrier_init(&shared.full[b][half], 4), barrier_init(&shared.empty[b][half], 4);
    }
    barrier_init(&shared.q_empty, 4), barrier_init(&shared.sent, 4), barrier_init(&shared.taken, 4);
    for (int i = 0; i < 4; ++i) shared.spoiled[i] = 0;
    fence_barrier_init();
  }
  __syncthreads();
  const Records near = {window.as<const uint8_t>(), window_stride, static_cast<uint32_t>(window_page),
                        static_cast<uint32_t>(window_slots), window_ids.as<const int>(), window_ids_stride,
                        window_count, shift_of(window_page)};
  const Records far = {compressed.as<const uint8_t>(), compressed_stride,
                       static_cast<uint32_t>(compressed_page), static_cast<uint32_t>(compressed_slots),
                       compressed_ids.as<const int>(), compressed_ids_stride, compressed_count,
                       shift_of(compressed_page)};
  Work work;
  work.rows = rows, work.heads = heads, work.head_tiles = (heads + HEADS - 1) / HEADS, work.splits = splits;
  work.window_tiles = (window_count + KEYS - 1) / KEYS;
  work.tiles = work.window_tiles + (compressed_count + KEYS - 1) / KEYS;
  if (work.tiles == 0) work.tiles = 1;
  Result result;
  result.out = out.as<uint8_t>(), result.out_row = out_row * 2, result.out_head = out_head * 2;
  result.partial = scratch.as<float>();
  result.partial_sums = result.partial + static_cast<size_t>(rows) * splits * heads * WIDTH;
  const int group = threadIdx.x >> 7;
  // The three counts add up to what 384 threads are launched with, 3 x 168; more would wait for ever.
  if (group == 0) {
    registers_grow<208>();
    consume_scores(work, shared, result, sink.as<const float>(), lse.as<float>(), scale);
  } else if (group == 1) {
    registers_grow<176>();
    consume_values(work, shared, result);
  } else {
    registers_shrink<120>();
    Producer<WINDOW, COMPRESSED> producer{work, near, far, shared};
    producer.run(q.as<const uint8_t>(), q_row * 2, q_head * 2);
  }
}

// ---- combination of parts: a block of 128 threads makes one head of one row ------------------------------
__device__ __forceinline__ void combine(Address scratch, int rows, int heads, int splits, Address sink,
                                        Address out, long long out_row, long long out_head, Address lse) {
  const int row = blockIdx.x / heads, head = blockIdx.x % heads;
  const float* partial = scratch.as<const float>();
  const float* sums = partial + static_cast<size_t>(rows) * splits * heads * WIDTH;
  const size_t part = static_cast<size_t>(row) * splits * heads + head;
  float top = -INFINITY;
  for (int s = 0; s < splits; ++s) top = fmaxf(top, sums[2 * (part + static_cast<size_t>(s) * heads)]);
  const float base = top == -INFINITY ? 0.f : top;
  float4 value = make_float4(0, 0, 0, 0);
  float sum = 0;
  for (int s = 0; s < splits; ++s) {
    const size_t at = part + static_cast<size_t>(s) * heads;
    const float weight = exp2f(sums[2 * at] - base);
    const float4 v = *reinterpret_cast<const float4*>(partial + at * WIDTH + threadIdx.x * 4);
    sum += weight * sums[2 * at + 1];
    value.x += weight * v.x, value.y += weight * v.y, value.z += weight * v.z, value.w += weight * v.w;
  }
  float total = sum;
  if (sink.at != nullptr) total += exp2f(sink.as<const float>()[head] * 1.44269504088896340736f - base);
  const float factor = total == 0 ? 0.f : 1 / total;
  uint2 packed;
  packed.x = pair(value.x * factor, value.y * factor), packed.y = pair(value.z * factor, value.w * factor);
  *reinterpret_cast<uint2*>(out.as<uint8_t>() + 2 * (row * out_row + head * out_head) + threadIdx.x * 8) = packed;
  if (lse.at != nullptr && threadIdx.x == 0)
    lse.as<float>()[static_cast<size_t>(row) * heads + head] = logf(sum) + base * 0.69314718055994530942f;
}

}  // namespace sparse_attn
