// The best k of a stream of scored entries, exactly: a list in shared memory that takes what beats its bar and,
// when nearly full, is cut to its best. An entry is one 64-bit key, score above index, and keys are distinct, so
// neither the order of arrival nor the places of the cuts change what is left.
#pragma once
#include <cstdint>

namespace choose {

constexpr int kThreads = 256;       // threads that share a list
constexpr int kMergeThreads = 512;  // threads that merge lists
constexpr int kMergeCap = 8192;     // keys that they have room for
constexpr int kBins = 1024;
constexpr int kFew = 64;            // undecided keys that are ranked
constexpr uint64_t kNothing = 0x007FFFFFFFFFFFFFull;  // the bar below every entry: -inf does not pass it

// What cutting needs beside the list.
struct Work {
  uint32_t low[16], high[16];
  uint32_t bins[kBins];  // from the top
  uint64_t few[kFew], bar;
  int warp_sum[16];
  int bin, above, inside, kept;
};

// Floats as integers of the same order; the two zeros are one.
__device__ __forceinline__ uint32_t ordered(float x) {
  uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
// Larger is better: the score, then the lower index.
__device__ __forceinline__ uint64_t key_of(uint32_t score, int index) {
  return static_cast<uint64_t>(score) << 32 | static_cast<uint32_t>(~index);
}
__device__ __forceinline__ int index_of(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }
// The score of a bar: what lies below it does not pass.
__device__ __forceinline__ float score_of(uint64_t bar) {
  const uint32_t order = static_cast<uint32_t>(bar >> 32);
  return __uint_as_float(order >> 31 ? order ^ 0x80000000u : ~order);
}
constexpr uint32_t kInfinity = 0xFF800000u;  // as such an integer
// NaN lies above +inf (or, with a sign, below -inf and so below the bar).
__device__ __forceinline__ bool passes(uint32_t score, uint64_t key, uint64_t bar) {
  return score <= kInfinity && key > bar;
}

// The threads that share a list meet: the whole block, or one of its teams of 128, which work side by side.
template <int THREADS = kThreads>
__device__ __forceinline__ void sync(int team = 0) {
  if constexpr (THREADS > 128) __syncthreads();
  else hopper::named_barrier(1 + team, THREADS);
}

// Adds the keys of the lanes that pass; `count` is a counter in shared memory, `base` what lies before.
__device__ __forceinline__ void append(uint64_t* list, int base, int* count, bool pass, uint64_t key, int lane) {
  uint32_t votes = __ballot_sync(0xFFFFFFFFu, pass);
  if (votes == 0) return;
  int first = 0;
  if (lane == 0) first = atomicAdd(count, __popc(votes));
  first = __shfl_sync(0xFFFFFFFFu, first, 0);
  if (pass) list[base + first + __popc(votes & ((1u << lane) - 1))] = key;
}
// Lanes add to the list of their own; those of `peers` share it, and `leader` is one of them.
__device__ __forceinline__ void append_to(uint64_t* list, int* count, bool pass, uint64_t key, uint32_t peers, int leader,
                                          int lane) {
  const uint32_t votes = __ballot_sync(0xFFFFFFFFu, pass) & peers;
  int first = 0;
  if (lane == leader && votes != 0) first = atomicAdd(count, __popc(votes));
  first = __shfl_sync(0xFFFFFFFFu, first, leader);
  if (pass) list[first + __popc(votes & ((1u << lane) - 1))] = key;
}

// Room for what each lane adds, one lane behind the other: where a lane's begins.
__device__ __forceinline__ int reserve(int base, int* count, int wanted, int lane) {
  int upto = wanted;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(0xFFFFFFFFu, upto, step);
    if (lane >= step) upto += other;
  }
  int first = 0;
  if (lane == 31) first = atomicAdd(count, upto);
  return base + __shfl_sync(0xFFFFFFFFu, first, 31) + upto - wanted;
}
// The same for N keys a lane, bit i of `pass` for key i.
template <int N>
__device__ __forceinline__ void append_all(uint64_t* list, int base, int* count, uint32_t pass, const uint64_t (&keys)[N],
                                           int lane) {
  if (!__any_sync(0xFFFFFFFFu, pass != 0)) return;
  int first = reserve(base, count, __popc(pass), lane);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (pass >> i & 1) list[first++] = keys[i];
}

// Cuts the list to its best k, up to `slack` more: whatever saves another pass. Returns how many are left; new
// keys have to beat `work.bar`. All threads, count > k.
//
// A pass counts the undecided keys in bins over their range, by their scores first and among equal scores by
// index. Those above the bin of the k-th are in, those below are out. Few undecided ones are ranked.
template <int PER, int THREADS = kThreads>
__device__ __noinline__ int cut(uint64_t* list, int count, int k, int slack, Work& work, int tid, int team = 0) {
  constexpr int OWN = kBins / THREADS;
  const int warp = tid / 32, lane = tid % 32;
#ifdef DSV41_EMULATE
  if (count > PER * THREADS) __trap();  // the list got more keys than it has room for
#endif
  uint64_t mine[PER];
  uint32_t open = 0, stays = 0;  // bit i: key i is undecided, is in
  uint32_t low = ~0u, high = 0, tie = 0;  // range of the undecided scores; of their indices once they tie
  bool ties = false;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int at = i * THREADS + tid;
    mine[i] = at < count ? list[at] : 0;
    const uint32_t score = static_cast<uint32_t>(mine[i] >> 32);
    if (at < count) open |= 1u << i, low = score < low ? score : low, high = score > high ? score : high;
  }
  low = __reduce_min_sync(0xFFFFFFFFu, low), high = __reduce_max_sync(0xFFFFFFFFu, high);
  if (lane == 0) work.low[warp] = low, work.high[warp] = high;
  if (tid == 0) work.kept = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) work.bins[i * THREADS + tid] = 0;
  sync<THREADS>(team);
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) {
    low = work.low[i] < low ? work.low[i] : low;
    high = work.high[i] > high ? work.high[i] : high;
  }
  int need = k, left = 0;
  while (true) {
    const int bits = 32 - __clz(static_cast<int>(high - low)), shift = bits > 10 ? bits - 10 : 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const uint32_t x = ties ? static_cast<uint32_t>(mine[i]) : static_cast<uint32_t>(mine[i] >> 32);
      if (open >> i & 1) atomicAdd(&work.bins[kBins - 1 - ((x - low) >> shift)], 1u);
    }
    sync<THREADS>(team);
    // Bins from the top, OWN a thread; they are zero again for the next pass.
    int own[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN / 2; ++i) {
      uint2& pair = *reinterpret_cast<uint2*>(&work.bins[OWN * tid + 2 * i]);
      sum += own[2 * i] = pair.x, sum += own[2 * i + 1] = pair.y, pair = make_uint2(0, 0);
    }
    int upto = sum;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane == 31) work.warp_sum[warp] = upto;
    sync<THREADS>(team);
    for (int i = 0; i < warp; ++i) upto += work.warp_sum[i];
    int before = upto - sum;
    if (before < need && need <= upto) {
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        if (before < need && need <= before + own[i])
          work.bin = kBins - 1 - (OWN * tid + i), work.above = before, work.inside = own[i];
        before += own[i];
      }
    }
    sync<THREADS>(team);
    const uint32_t bin = work.bin;
    const int above = work.above, inside = work.inside;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const uint32_t x = ties ? static_cast<uint32_t>(mine[i]) : static_cast<uint32_t>(mine[i] >> 32);
      const uint32_t at = (x - low) >> shift, bit = open & 1u << i;
      if (at > bin) stays |= bit;
      if (at != bin) open &= ~bit;
    }
    low += bin << shift, need -= above, left += above;
    if (left + inside <= k + slack) {
      stays |= open, left += inside;
      break;
    }
    if (inside <= kFew) {
      append_all(work.few, 0, &work.kept, open, mine, lane);
      sync<THREADS>(team);
      if (tid == 0) work.kept = 0;
      sync<THREADS>(team);
      const uint64_t one = tid < inside ? work.few[tid] : 0;
      int better = 0;
#pragma unroll 4
      for (int i = 0; i < (warp * 32 < inside ? inside : 0); ++i) better += work.few[i] > one;
      append(list, 0, &work.kept, tid < inside && better < need, one, lane);
      left += need;
      break;
    }
    if (shift > 0) {
      const uint32_t last = low + ((1u << shift) - 1);
      high = last < high ? last : high;
    } else {
      ties = true, tie = low, low = 0, high = ~0u;
    }
  }
  if (tid == 0) work.bar = (ties ? static_cast<uint64_t>(tie) << 32 | low : static_cast<uint64_t>(low) << 32) - 1;
  append_all(list, 0, &work.kept, stays, mine, lane);
  sync<THREADS>(team);
  return left;
}

// Writes the indices of a list, ascending, then -1, into out[0, k). The list has room for half as many keys again.
// Indices are counted in bins over their range, put there in any order, and ranked within their bin.
template <int THREADS = kThreads>
__device__ __noinline__ void write_sorted(uint64_t* list, int count, int k, int* out, Work& work, int tid, int team = 0) {
  constexpr int OWN = kBins / THREADS;
  const int warp = tid / 32, lane = tid % 32;
  uint32_t* ids = reinterpret_cast<uint32_t*>(list + count);
  uint32_t low = ~0u, high = 0;
#pragma unroll 1
  for (int i = tid; i < count; i += THREADS) {
    const uint32_t id = index_of(list[i]);
    low = id < low ? id : low, high = id > high ? id : high;
  }
  low = __reduce_min_sync(0xFFFFFFFFu, low), high = __reduce_max_sync(0xFFFFFFFFu, high);
  if (lane == 0) work.low[warp] = low, work.high[warp] = high;
#pragma unroll
  for (int i = 0; i < OWN; ++i) work.bins[i * THREADS + tid] = 0;
  for (int i = count + tid; i < k; i += THREADS) out[i] = -1;
  sync<THREADS>(team);
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) {
    low = work.low[i] < low ? work.low[i] : low;
    high = work.high[i] > high ? work.high[i] : high;
  }
  const int bits = 32 - __clz(static_cast<int>(high - low)), shift = bits > 10 ? bits - 10 : 0;
#pragma unroll 4
  for (int i = tid; i < count; i += THREADS) atomicAdd(&work.bins[(index_of(list[i]) - low) >> shift], 1u);
  sync<THREADS>(team);
  int own[OWN], sum = 0;
#pragma unroll
  for (int i = 0; i < OWN / 2; ++i) {
    const uint2 pair = *reinterpret_cast<const uint2*>(&work.bins[OWN * tid + 2 * i]);
    own[2 * i] = sum, sum += pair.x, own[2 * i + 1] = sum, sum += pair.y;
  }
  int upto = sum;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) work.warp_sum[warp] = upto;
  sync<THREADS>(team);
  for (int i = 0; i < warp; ++i) upto += work.warp_sum[i];
#pragma unroll
  for (int i = 0; i < OWN / 2; ++i)  // where a bin begins
    *reinterpret_cast<uint2*>(&work.bins[OWN * tid + 2 * i]) = make_uint2(upto - sum + own[2 * i], upto - sum + own[2 * i + 1]);
  sync<THREADS>(team);
#pragma unroll 4
  for (int i = tid; i < count; i += THREADS) {
    const uint32_t id = index_of(list[i]);
    ids[atomicAdd(&work.bins[(id - low) >> shift], 1u)] = id;
  }
  sync<THREADS>(team);
#pragma unroll 1
  for (int i = tid; i < count; i += THREADS) {
    const uint32_t id = ids[i], bin = (id - low) >> shift, end = work.bins[bin];
    uint32_t rank = bin == 0 ? 0 : work.bins[bin - 1];  // now where it ends
    for (uint32_t j = rank; j < end; ++j) rank += ids[j] < id;
    out[rank] = static_cast<int>(id);
  }
  sync<THREADS>(team);
}

// How the units of a call (rows, or groups of rows) are shared out: every block gets `each` of the tiles, one
// unit behind the other, so that one long request keeps all blocks busy. What a unit costs beside its tiles counts
// as `kExtra` tiles behind them. A block has at most two units that it shares with others, the one that it begins in
// and the one that it ends in: list 2 * block and 2 * block + 1.
struct Share {
  int each;    // tiles a block
  int unit;    // the unit that the block's first tile lies in; -1: the block has no work
  int offset;  // that tile within the unit; it may lie behind the unit's tiles
  int tiles;   // tiles of the unit
};

constexpr int kWarps = 20;  // of a block, at most
// All threads of the block take part, `threads` of them. `sums`: room for 2 * kWarps.
template <class Tiles>
__device__ void find_share(const Tiles& tiles_of, int units, int block, int blocks, int least, int* sums,
                           Share* share, int tid, int threads) {
  constexpr int EXTRA = Tiles::kExtra;
  const int warp = tid / 32, lane = tid % 32, warps = threads / 32;
  int total = 0, kept = 0, most = 0;
  for (int u = tid; u < units; u += threads) {
    total += kept = tiles_of(u) + EXTRA;
    most = kept > most ? kept : most;
  }
  for (int step = 16; step > 0; step /= 2) {
    total += __shfl_xor_sync(0xFFFFFFFFu, total, step);
    const int other = __shfl_xor_sync(0xFFFFFFFFu, most, step);
    most = other > most ? other : most;
  }
  if (lane == 0) sums[warp] = total, sums[kWarps + warp] = most;
  if (tid == 0) share->unit = -1;
  __syncthreads();
  total = 0;
  for (int i = 0; i < warps; ++i) {
    total += sums[i];
    most = sums[kWarps + i] > most ? sums[kWarps + i] : most;
  }
  int each = (total + blocks - 1) / blocks;
  least = most < least + EXTRA ? most : least + EXTRA;  // many small units are not put together
  each = each < least ? least : each;
  const int first = block * each;
  int running = 0;
  for (int start = 0; start < units && running <= first && first < total; start += threads) {
    int u = start + tid, mine = units <= threads ? kept : u < units ? tiles_of(u) + EXTRA : 0, upto = mine;
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(0xFFFFFFFFu, upto, step);
      if (lane >= step) upto += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    upto += running;
    for (int i = 0; i < warps; ++i) {
      if (i < warp) upto += sums[i];
      running += sums[i];
    }
    if (upto - mine <= first && first < upto) share->unit = u, share->offset = first - (upto - mine), share->tiles = mine - EXTRA;
  }
  if (tid == 0) share->each = each;
  __syncthreads();
}

// The two halves of a merge: which lists belong together, and their best. Block `block` looks at the boundary
// between the blocks `block - 1` and `block`; it merges the unit there if no earlier boundary cuts it.
struct Merge {
  int unit;         // -1: nothing to do
  int first, last;  // blocks that have a part of it
};

__device__ __forceinline__ Merge find_merge(const Share& share, int block) {
  Merge merge = {-1, 0, 0};
  if (share.unit < 0 || share.offset == 0 || share.offset > share.each || share.offset >= share.tiles) return merge;
  merge.unit = share.unit, merge.first = block - 1;
  merge.last = block + (share.tiles - share.offset - 1) / share.each;
  return merge;
}

// Lists of `width` keys each in device memory to the best k of all of them. `kept` has room for kMergeCap keys.
// All kMergeThreads.
inline __device__ int merge_lists(const uint64_t* lists, const int* counts, int stride, int first, int last, int member,
                                  int members, int width, int k, uint64_t* kept, int* counters, Work& work, int tid) {
  constexpr int AT_ONCE = 8, THREADS = kMergeThreads;  // keys a thread has in flight
  const int lane = tid % 32, pieces = (last - first + 1) * width;
  uint64_t bar = kNothing;
  int base = 0, round = 0;
  if (tid < 3) counters[tid] = 0;
  sync<THREADS>();
  for (int start = 0; start < pieces; start += AT_ONCE * THREADS, ++round) {
    uint64_t keys[AT_ONCE];
    int counted[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int at = start + i * THREADS + tid, block = first + at / width, entry = at % width;
      const int list = (2 * block + (block == first ? 1 : 0)) * members + member;
      // Both at once: what lies behind the end of a list is read and dropped.
      if (at < pieces) counted[i] = counts[list], keys[i] = lists[static_cast<int64_t>(list) * stride + entry];
      else counted[i] = 0, keys[i] = 0;
    }
    int* count = &counters[round % 3];
    uint32_t pass = 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int entry = (start + i * THREADS + tid) % width;
      pass |= static_cast<uint32_t>(entry < counted[i] && keys[i] > bar) << i;
    }
    append_all(kept, base, count, pass, keys, lane);
    sync<THREADS>();
    base += *count;
    if (tid == 0) counters[(round + 2) % 3] = 0;
    if (base > kMergeCap - AT_ONCE * THREADS && start + AT_ONCE * THREADS < pieces)
      base = cut<kMergeCap / THREADS, THREADS>(kept, base, k, kMergeCap / 16, work, tid), bar = work.bar;
  }
  if (base > k) base = cut<kMergeCap / THREADS, THREADS>(kept, base, k, 0, work, tid);
  sync<THREADS>();
  return base;
}

}  // namespace choose
