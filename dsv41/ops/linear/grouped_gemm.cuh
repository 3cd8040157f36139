// grouped_linear: bf16 tokens times E4M3 weights in the checkpoint's layout, one product a group. With one group it is
// block_linear for many tokens.
//
// The weights are the A operand of wgmma and come from registers: E4M3 is exact in bf16. The tokens are the B
// operand, in shared memory. One thread runs the copy engine; two consumer groups multiply 64 features each by
// TOKENS tokens. Weights arrive in blocks of 128 k, tokens in blocks of 64: a block of many tokens is large, and what
// is freed early is on its way early. The order of a sum depends on K and the number of splits only.
#pragma once

namespace grouped {

using blocks::Ring;

// The bit placement below gives values times 2^-120; the multiplier leaves 2^-48 of that to the end of the sum, so
// that scales of 2^-69 to 2^55 are exact.
constexpr int LATER = 48, FEATURES = 128;

// Two rings: STAGES blocks of weights and BLOCKS of tokens. A barrier tells that a block is full, one that it is empty.
template <int TOKENS, int STAGES>
struct Shared {
  static constexpr int WEIGHT_BYTES = FEATURES * 128, TOKEN_BYTES = TOKENS * 128;
  static constexpr int FIT = (232448 - 512 - STAGES * WEIGHT_BYTES) / TOKEN_BYTES, BLOCKS = FIT < 12 ? FIT : 12;
  uint8_t* base;
  __device__ __forceinline__ uint8_t* weights(int i) const { return base + i * WEIGHT_BYTES; }
  __device__ __forceinline__ uint8_t* tokens(int i) const { return weights(STAGES) + i * TOKEN_BYTES; }
  __device__ __forceinline__ uint64_t* full(int i) const { return reinterpret_cast<uint64_t*>(tokens(BLOCKS)) + i; }
  __device__ __forceinline__ uint64_t* empty(int i) const { return full(12 + i); }
  __device__ __forceinline__ uint64_t* full_weights(int i) const { return full(24 + i); }
  __device__ __forceinline__ uint64_t* empty_weights(int i) const { return full(32 + i); }
};

struct Tile {
  int token, feature, group, split;
};

template <int TOKENS>
__device__ __forceinline__ Tile tile_of(int work, int tokens, int rank, int splits) {
  int split = work % splits, tile = work / splits, features = (rank + FEATURES - 1) / FEATURES;
  int rows = (tokens + TOKENS - 1) / TOKENS, of_group = tile / features % rows;
  return {of_group * TOKENS, tile % features * FEATURES, tile / (features * rows), split};
}

// Two E4M3 bytes to two bf16, times `scale`.
__device__ __forceinline__ uint32_t decode(uint32_t two, uint32_t scale) {
  uint32_t t = __byte_perm(two, 0, 0x1404), bits = (t & 0x80008000u) | (t >> 4 & 0x07F007F0u);
  __nv_bfloat162 a, b;
  memcpy(&a, &bits, 4);
  memcpy(&b, &scale, 4);
  a = __hmul2(a, b);
  memcpy(&bits, &a, 4);
  return bits;
}

// x [tokens, groups, K] bf16, w [groups * rank, K], w_scale [groups * rank / 32, K / 32]; rank a multiple of FEATURES,
// or of 32 with one group. With splits > 1, `parts`
// [splits, tokens, groups * rank] gets the sums of each share of K, else `out` [tokens, groups * rank].
template <int TOKENS, int STAGES, class Map>
__device__ __forceinline__ void linear(const Map& x, const Map& w, const uint8_t* w_scale, int tokens, int groups,
                                       int rank, int K, int splits, void* out, float* parts, uint8_t* shared) {
  using S = Shared<TOKENS, STAGES>;
  S smem{shared};
  int role = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127, blocks_k = K / 128;
  int total = groups * ((rank + FEATURES - 1) / FEATURES) * ((tokens + TOKENS - 1) / TOKENS) * splits;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::BLOCKS; ++i) hopper::barrier_init(smem.full(i), 1), hopper::barrier_init(smem.empty(i), 8);
    for (int i = 0; i < STAGES; ++i)
      hopper::barrier_init(smem.full_weights(i), 1), hopper::barrier_init(smem.empty_weights(i), 8);
    hopper::fence_barrier_init();
  }
  __syncthreads();
  Ring ring{0, 0}, weights{0, 0};

  if (role == 0) {
    hopper::registers_shrink<40>();
    if (thread != 0) return;
    for (int work = blockIdx.x; work < total; work += gridDim.x) {
      Tile tile = tile_of<TOKENS>(work, tokens, rank, splits);
      int begin = tile.split * blocks_k / splits, end = (tile.split + 1) * blocks_k / splits;
      for (int k = begin; k < end; ++k) {
        hopper::barrier_wait(smem.empty_weights(weights.stage), weights.phase ^ 1);
        hopper::barrier_expect(smem.full_weights(weights.stage), S::WEIGHT_BYTES);
        hopper::tile_copy(smem.weights(weights.stage), w, k * 128, tile.group * rank + tile.feature,
                          smem.full_weights(weights.stage));
        weights.template next<STAGES>();
        for (int half = 0; half < 2; ++half) {
          hopper::barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
          hopper::barrier_expect(smem.full(ring.stage), S::TOKEN_BYTES);
          hopper::tile_copy(smem.tokens(ring.stage), x, 2 * (tile.group * K + k * 128 + half * 64), tile.token,
                            smem.full(ring.stage));
          ring.template next<S::BLOCKS>();
        }
      }
    }
    return;
  }

  hopper::registers_grow<232>();
  int warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3, half = role - 1;
  for (int work = blockIdx.x; work < total; work += gridDim.x) {
    Tile tile = tile_of<TOKENS>(work, tokens, rank, splits);
    int begin = tile.split * blocks_k / splits, end = (tile.split + 1) * blocks_k / splits;
    int feature = tile.group * rank + tile.feature + half * 64 + warp * 16;
    int from = min(feature, groups * rank - 1) / 32 * (K / 32) + begin * 4;
    uint32_t next = __ldg(reinterpret_cast<const uint32_t*>(w_scale + from));
    float acc[TOKENS / 2] = {};
    uint32_t a[2][4];
    int previous = -1;  // the block of tokens before this one
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
      uint32_t codes = next;
      if (k + 1 < end) next = __ldg(reinterpret_cast<const uint32_t*>(w_scale + (from += 4)));
      hopper::barrier_wait(smem.full_weights(weights.stage), weights.phase);
      const uint8_t* rows = smem.weights(weights.stage) + (half * 64 + warp * 16 + g) * 128 + 2 * c;
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const uint8_t* at = rows + ((step ^ g) << 4);
        uint32_t field = (codes >> 8 * (step >> 1) & 0xFF) + (120 - LATER), scale = field << 7 | field << 23;
        uint32_t raw[4] = {*reinterpret_cast<const uint16_t*>(at), *reinterpret_cast<const uint16_t*>(at + 1024),
                           *reinterpret_cast<const uint16_t*>(at + 8), *reinterpret_cast<const uint16_t*>(at + 1032)};
        hopper::wgmma_wait<1>();  // a[step & 1] is free again
        if ((step & 3) == 1 && previous >= 0 && lane == 0) hopper::barrier_arrive(smem.empty(previous));
#pragma unroll
        for (int i = 0; i < 4; ++i) a[step & 1][i] = decode(raw[i], scale);
        if ((step & 3) == 0) hopper::barrier_wait(smem.full(ring.stage), ring.phase);
        uint64_t b = hopper::tile_descriptor(hopper::smem_address(smem.tokens(ring.stage)));
        hopper::wgmma_fence();
        hopper::wgmma_bf16_rs(acc, a[step & 1], b + (step & 3) * 32 / 16, 1);
        hopper::wgmma_commit();
        if ((step & 3) == 3) {
          previous = ring.stage;
          ring.template next<S::BLOCKS>();
        }
      }
      if (lane == 0) hopper::barrier_arrive(smem.empty_weights(weights.stage));
      weights.template next<STAGES>();
    }
    hopper::wgmma_wait<0>();
    hopper::keep(acc);
    if (previous >= 0 && lane == 0) hopper::barrier_arrive(smem.empty(previous));

    int all = groups * rank;
    const float back = __uint_as_float((127u + LATER) << 23);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j += 2) {
      uint32_t words[4];  // of tokens j and j + 1: the warp's features 0 to 7, and 8 to 15
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float low = acc[4 * j + 2 * pair] * back, high = acc[4 * j + 2 * pair + 1] * back;
        if (splits > 1) {
          int token = tile.token + 8 * (j + (pair >> 1)) + 2 * c, at = feature + g + 8 * (pair & 1);
          float* to = parts + (static_cast<int64_t>(tile.split) * tokens + token) * all + at;
          if (token < tokens && feature < all) to[0] = low;
          if (token + 1 < tokens && feature < all) to[all] = high;
        } else {
          words[pair] = hopper::transpose_8x8(blocks::pair_bf16(low, high));
        }
      }
      if (splits > 1) continue;
      uint4 row = blocks::transpose_quad(words, lane);  // 8 features of a token
      int token = tile.token + 8 * (j + (c >> 1)) + g;
      if (token < tokens && feature < all)
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(out) + static_cast<int64_t>(token) * all + feature +
                                  8 * (c & 1)) = row;
    }
  }
}

}  // namespace grouped
