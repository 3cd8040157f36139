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

// Within a group, up to eight tiles of tokens for each tile of features: those that run at once share both in the L2.
template <int TOKENS>
__device__ __forceinline__ Tile tile_of(int work, int tokens, int rank, int splits) {
  int split = work % splits, tile = work / splits, features = (rank + FEATURES - 1) / FEATURES;
  int rows = (tokens + TOKENS - 1) / TOKENS, group = tile / (features * rows), in_group = tile - group * features * rows;
  int band = in_group / (8 * features), in_band = in_group - band * 8 * features, height = min(8, rows - 8 * band);
  int feature = in_band / height;
  return {(8 * band + in_band - feature * height) * TOKENS, feature * FEATURES, group, split};
}

// Two bf16 of which `bits` has sign, exponent and mantissa of an E4M3 value in their places, times `scale`.
__device__ __forceinline__ uint32_t scaled(uint32_t bits, uint32_t scale) {
  __nv_bfloat162 a, b;
  memcpy(&a, &bits, 4);
  memcpy(&b, &scale, 4);
  a = __hmul2(a, b);
  memcpy(&bits, &a, 4);
  return bits;
}
// The even and the odd ones of four E4M3 bytes.
__device__ __forceinline__ uint32_t even(uint32_t w, uint32_t scale) { return scaled((w << 8 & 0x80008000u) | (w << 4 & 0x07F007F0u), scale); }
__device__ __forceinline__ uint32_t odd(uint32_t w, uint32_t scale) { return scaled((w & 0x80008000u) | (w >> 4 & 0x07F007F0u), scale); }

// x [tokens, groups, K] bf16, EXPANDED: in the order of `expand`; w [groups * rank, K], w_scale [groups * rank / 32, K / 32]; rank a multiple of FEATURES,
// or of 32 with one group. With splits > 1, `parts`
// [splits, tokens, groups * rank] gets the sums of each share of K, else `out` [tokens, groups * rank].
template <int TOKENS, int STAGES, bool EXPANDED, class Map>
__device__ __forceinline__ void linear(const Map& x, const Map& w, const uint8_t* w_scale, int tokens, int groups,
                                       int rank, int K, int splits, const Map& out, float* parts, uint8_t* shared) {
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
    if (splits == 1 && thread >= 32 && thread < 96) {
      // Results leave through the last two blocks of tokens of their tile, one a group; its warp here gives it back.
      int group = (thread >> 5) - 1, done = group - 2;
      for (int work = blockIdx.x; work < total; work += gridDim.x) {
        Tile tile = tile_of<TOKENS>(work, tokens, rank, splits);
        done += 2 * blocks_k;
        hopper::named_barrier(2 + group, 160);
        if (thread & 31) continue;
        hopper::tile_store(out, smem.tokens(done % S::BLOCKS), 2 * (tile.group * rank + tile.feature + group * 64), tile.token);
        hopper::bulk_store_commit();
        hopper::bulk_store_wait_read<0>();
        for (int i = 0; i < 4; ++i) hopper::barrier_arrive(smem.empty(done % S::BLOCKS));  // for the group's four warps
      }
      return;
    }
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
  int from;  // where the scales of the next block of weights are
  uint32_t next;
  auto first_scales = [&](int work) {
    Tile tile = tile_of<TOKENS>(work, tokens, rank, splits);
    int feature = tile.group * rank + tile.feature + half * 64 + warp * 16;
    from = min(feature, groups * rank - 1) / 32 * (K / 32) + tile.split * blocks_k / splits * 4;
    next = __ldg(reinterpret_cast<const uint32_t*>(w_scale + from));
  };
  if (blockIdx.x < total) first_scales(blockIdx.x);
  for (int work = blockIdx.x; work < total; work += gridDim.x) {
    Tile tile = tile_of<TOKENS>(work, tokens, rank, splits);
    int begin = tile.split * blocks_k / splits, end = (tile.split + 1) * blocks_k / splits;
    int feature = tile.group * rank + tile.feature + half * 64 + warp * 16;
    float acc[TOKENS / 2] = {};
    // A step multiplies 16 k. Rows of `expand` have the k of a block in an order in which those of a thread's weights lie
    // together: four steps are one load, and one scale is for all. Else a step has the thread's k 2 c, 2 c + 1 and those 8 on.
    constexpr int STEPS = EXPANDED ? 4 : 1, WORDS = EXPANDED ? 4 : 2;  // of a fetch; words of a row
    uint32_t raw[2][2][WORDS], a[2][4];
    auto fetch = [&](int step) {  // on their way while those before are decoded
      if (step == 0) hopper::barrier_wait(smem.full_weights(weights.stage), weights.phase);
      const uint8_t* at = smem.weights(weights.stage) + (half * 64 + warp * 16 + g) * 128;
#pragma unroll
      for (int row = 0; row < 2; ++row)
        if constexpr (EXPANDED) {
          uint4 four = *reinterpret_cast<const uint4*>(at + row * 1024 + (((2 * c + step / 4) ^ g) << 4));
          uint32_t* to = raw[step / 4 & 1][row];
          to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        } else {
          for (int i = 0; i < 2; ++i)
            raw[step & 1][row][i] = *reinterpret_cast<const uint16_t*>(at + row * 1024 + ((step ^ g) << 4) + 2 * c + 8 * i);
        }
    };
    int previous = -1, held = -1;  // the block of tokens before this one, and the one before the last
    fetch(0);
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
      uint32_t codes = next;
      if (k + 1 < end) next = __ldg(reinterpret_cast<const uint32_t*>(w_scale + (from += 4)));
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        if (step % STEPS == 0 && step + STEPS < 8) fetch(step + STEPS);
        uint32_t field = (codes >> 8 * (EXPANDED ? c : step >> 1) & 0xFF) + (120 - LATER), scale = field << 7 | field << 23;
        hopper::wgmma_wait<1>();  // a[step & 1] is free again
        if (step == 5 && k + 1 == end) held = previous;
        else if ((step & 3) == 1 && previous >= 0 && lane == 0) hopper::barrier_arrive(smem.empty(previous));
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const uint32_t* w = raw[step / STEPS & 1][row];
          if constexpr (EXPANDED) {
            a[step & 1][row] = even(w[step & 3], scale), a[step & 1][row + 2] = odd(w[step & 3], scale);
          } else {
            for (int i = 0; i < 2; ++i) a[step & 1][row + 2 * i] = odd(__byte_perm(w[i], 0, 0x1404), scale);
          }
        }
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
      if (k + 1 < end) fetch(0);
    }
    hopper::wgmma_wait<0>();
    hopper::keep(acc);
    if (work + static_cast<int>(gridDim.x) < total) first_scales(work + gridDim.x);  // arrive while this tile is stored
    const float back = __uint_as_float((127u + LATER) << 23);
    if (splits > 1) {
      if (lane == 0) hopper::barrier_arrive(smem.empty(held)), hopper::barrier_arrive(smem.empty(previous));
      int all = groups * rank;
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) {
        int token = tile.token + i / 4 * 8 + 2 * c + (i & 1), at = feature + g + 8 * (i >> 1 & 1);
        if (token < tokens && feature < all)
          parts[(static_cast<int64_t>(tile.split) * tokens + token) * all + at] = acc[i] * back;
      }
      continue;
    }
    hopper::named_barrier(1, 256);  // both groups have multiplied the two blocks
    if (lane == 0) hopper::barrier_arrive(smem.empty(half == 0 ? previous : held));
    uint8_t* rows = smem.tokens(half == 0 ? held : previous) + 4 * c;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // the warp's features 0 to 7, and 8 to 15, of token g
        uint32_t pair = blocks::pair_bf16(acc[4 * j + 2 * i] * back, acc[4 * j + 2 * i + 1] * back);
        *reinterpret_cast<uint32_t*>(rows + hopper::swizzle_128(8 * j + g, 2 * warp + i)) = hopper::transpose_8x8(pair);
      }
    hopper::fence_async();
    hopper::named_barrier(2 + half, 160);
  }
}

}  // namespace grouped
