// Split of a draft budget over the rows of a step and the layout that follows; after quantize.cuh. Integers only, so
// the bits are the reference's.
#pragma once

namespace split {

using quantize::at;

// Sums over a block whose shared memory has `2 * WARPS` places for them: calls in turn use the one half or the other,
// so that one barrier a call is enough.
template <int WARPS>
struct Block {
  int* places;
  int turn = 0;
  // The sum over all warps of what each warp's lanes agree on, and of the warps before this one.
  __device__ __forceinline__ int sum(int of_warp, int* before = nullptr) {
    int* const at = places + turn * WARPS;
    turn ^= 1;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) at[warp] = of_warp;
    __syncthreads();
    int all = 0, earlier = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const int v = at[w];
      all += v;
      if (w < warp) earlier += v;
    }
    if (before) *before = earlier;
    return all;
  }
  __device__ __forceinline__ int total(int v) {
#pragma unroll
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return sum(v);
  }
  // The sum of the threads before this one; `all` of every thread.
  __device__ __forceinline__ int before(int v, int& all) {
    int up = v, earlier;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, up, d);
      if (threadIdx.x % 32 >= d) up += other;
    }
    all = sum(__shfl_sync(~0u, up, 31), &earlier);
    return earlier + up - v;
  }
};

__device__ __forceinline__ float flush(float x) { return x < 1.17549435e-38f ? 0.0f : x; }

// How many of the `count` rising ends are at most `item`.
__device__ __forceinline__ int owner(const int* ends, int count, int item) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] <= item) low = middle + 1;
    else high = middle;
  }
  return low;
}

// A row a thread. Every block decides the split, in the same bits; the first writes it, each a part of the layout.
// Shared memory: (2 * THREADS + 2 * THREADS / 32) integers.
template <int BLOCK, int THREADS, typename Start>
__device__ __forceinline__ void ragged(int64_t confidence, int64_t stride, int64_t lo, int64_t hi, int64_t base, int64_t bonus,
                                       int64_t start, int64_t weights, int64_t budget, int64_t num_requests, int64_t rotation,
                                       void* lengths, int64_t cu_q, int64_t cu_logits, int64_t token_request_ids, int64_t positions,
                                       int64_t logits_ids, int64_t stats, int count, int max_tokens, int max_logits, void* memory) {
  int* const ends_q = static_cast<int*>(memory);
  int* const ends_logits = ends_q + THREADS;
  Block<THREADS / 32> block{ends_logits + THREADS};
  const int row = threadIdx.x, in = min(row, count - 1);
  const int requests = *at<const int>(num_requests, 0), turn = *at<const int>(rotation, 0);
  const int offered = *at<const int>(hi, in), least = *at<const int>(lo, in), own = *at<const int>(base, in);
  const bool live = row < count && row < requests, emits = live && *at<const int>(bonus, in) != 0;
  const float given = *at<const float>(weights, in), weight = given > 0 && given < INFINITY ? given : 0.0f;
  const int wish = *at<const int>(budget, 0);
  float c[BLOCK];
#pragma unroll
  for (int j = 0; j < BLOCK; ++j) c[j] = *at<const float>(confidence, in * stride + j);
  const int cap = emits ? min(max(offered, 0), BLOCK) : 0, floor = min(max(least, 0), cap);

  int key[BLOCK], mass[BLOCK], invalid = 0;  // a key is below 0 where there is no candidate
  float product = 1;
#pragma unroll
  for (int j = 0; j < BLOCK; ++j) {
    const bool bad = !(fabsf(c[j]) < INFINITY);
    product = flush(__fmul_rn(product, bad ? 0.0f : fminf(fmaxf(c[j], 0.0f), 1.0f)));
    invalid += bad && j < cap;
    key[j] = j >= floor && j < cap ? __float_as_int(flush(__fmul_rn(weight, product))) : -1;
    mass[j] = static_cast<int>(product * 16777216.0f);
  }
  const int floors = block.total(floor), candidates = block.total(cap - floor);
  const int wanted = static_cast<int>(min(max(static_cast<int64_t>(wish) - floors, static_cast<int64_t>(0)), static_cast<int64_t>(candidates)));
  // The wanted-th largest key, bit by bit.
  int last = 0;
#pragma unroll 1
  for (int bit = 1 << 30; bit; bit /= 2) {
    const int larger = last | bit;
    int found = 0;
#pragma unroll
    for (int j = 0; j < BLOCK; ++j) found += __popc(__ballot_sync(~0u, key[j] >= larger));
    if (block.sum(found) >= wanted) last = larger;
  }
  // All that are larger, and of those that are equal the first: rows from the rotation on, a row's drafts in order.
  int drafts = floor, ties = 0;
#pragma unroll
  for (int j = 0; j < BLOCK; ++j) drafts += key[j] > last, ties += key[j] == last;
  int all_ties;
  const int earlier = block.before(ties, all_ties);
  const int cycle = max(requests, 1), start_row = ((-turn) % cycle + cycle) % cycle;
  if (row == start_row) ends_q[0] = earlier;
  __syncthreads();
  const int first_ties = start_row < THREADS ? ends_q[0] : all_ties;
  const int mine = row >= start_row ? earlier - first_ties : earlier - first_ties + all_ties;
  const int left = wanted - block.total(drafts - floor);
  drafts += min(max(left - mine, 0), ties);

  const int tokens = live ? max(max(own, 0), static_cast<int>(emits)) + drafts : 0, rows = emits + drafts;
  int all_tokens, all_rows;
  const int begin = block.before(tokens, all_tokens), begin_logits = block.before(rows, all_rows);
  ends_q[row] = begin + tokens;
  ends_logits[row] = begin_logits + rows;
  if (blockIdx.x == 0) {
    if (row < count) {
      static_cast<int*>(lengths)[row] = drafts;
      at<int>(cu_q, 1)[row] = begin + tokens;
      at<int>(cu_logits, 1)[row] = begin_logits + rows;
    }
    int low = 0, high = 0;  // of the mass, 12 bits each: sums stay below 2^31
#pragma unroll
    for (int j = 0; j < BLOCK; ++j)
      if (j < drafts) low += mass[j] & 4095, high += mass[j] >> 12;
    const int64_t all[5] = {all_tokens, all_rows, block.total(drafts), block.total(invalid),
                            static_cast<int64_t>(block.total(low)) + (static_cast<int64_t>(block.total(high)) << 12)};
    if (row == 0) {
      *at<int>(cu_q, 0) = *at<int>(cu_logits, 0) = 0;
#pragma unroll
      for (int i = 0; i < 5; ++i) at<int64_t>(stats, 0)[i] = all[i];
    }
  }
  __syncthreads();

  const int step = gridDim.x * THREADS, first = blockIdx.x * THREADS + threadIdx.x;
  for (int item = first; item < max_tokens; item += step) {
    const int of = owner(ends_q, count, item);
    const bool owned = of < count;
    at<int>(token_request_ids, 0)[item] = owned ? of : -1;
    at<int64_t>(positions, 0)[item] = owned ? static_cast<int64_t>(*at<const Start>(start, of)) + item - (of ? ends_q[of - 1] : 0) : 0;
  }
  for (int item = first; item < max_logits; item += step) {
    const int of = owner(ends_logits, count, item);
    at<int>(logits_ids, 0)[item] = of < count ? ends_q[of] - (ends_logits[of] - item) : -1;
  }
}

}  // namespace split
