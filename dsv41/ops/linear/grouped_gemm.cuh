// grouped_linear: bf16 tokens times E4M3 weights in the checkpoint's layout, one product a group.
//
// The weights are the A operand of wgmma and come from registers: E4M3 is exact in bf16. The tokens are the B
// operand, in shared memory. One thread runs the copy engine; two consumer groups multiply MB x 64 features
// each by TOKENS tokens. The order of a sum depends on K and the number of splits only.
#pragma once

namespace grouped {

using blocks::Ring;

// The bit placement below gives values times 2^-120; the multiplier leaves 2^-48 of that to the end of the sum, so
// that scales of 2^-69 to 2^55 are exact.
constexpr int LATER = 48;

template <int MB, int TOKENS>
struct Shape {
  static constexpr int FEATURES = 128 * MB, WEIGHTS = FEATURES * 128, STAGE = WEIGHTS + TOKENS * 256;
  static constexpr int FIT = (232448 - 256) / STAGE, STAGES = FIT < 12 ? FIT : 12;
  static constexpr int BYTES = STAGES * STAGE + 256;
  uint8_t* base;
  __device__ __forceinline__ uint8_t* weights(int stage) const { return base + stage * STAGE; }
  __device__ __forceinline__ uint8_t* tokens(int stage) const { return base + stage * STAGE + WEIGHTS; }
  __device__ __forceinline__ uint64_t* full(int stage) const {
    return reinterpret_cast<uint64_t*>(base + STAGES * STAGE) + stage;
  }
  __device__ __forceinline__ uint64_t* empty(int stage) const { return full(stage) + 12; }
};

struct Tile {
  int token, feature, group, split;
};

template <class S, int TOKENS>
__device__ __forceinline__ Tile tile_of(int work, int tokens, int rank, int splits) {
  int split = work % splits, tile = work / splits, features = rank / S::FEATURES;
  int rows = (tokens + TOKENS - 1) / TOKENS, of_group = tile / features % rows;
  return {of_group * TOKENS, tile % features * S::FEATURES, tile / (features * rows), split};
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

// x [tokens, groups, K] bf16, w [groups * rank, K], w_scale [groups * rank / 32, K / 32]. With splits > 1, `parts`
// [splits, tokens, groups * rank] gets the sums of each share of K, else `out` [tokens, groups * rank].
template <int MB, int TOKENS, class Map>
__device__ __forceinline__ void linear(const Map& x, const Map& w, const uint8_t* w_scale, int tokens, int groups,
                                       int rank, int K, int splits, void* out, float* parts, uint8_t* shared) {
  using S = Shape<MB, TOKENS>;
  S smem{shared};
  int role = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127, blocks_k = K / 128;
  int total = groups * (rank / S::FEATURES) * ((tokens + TOKENS - 1) / TOKENS) * splits;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::STAGES; ++i) {
      hopper::barrier_init(smem.full(i), 1);
      hopper::barrier_init(smem.empty(i), 8);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  Ring ring{0, 0};

  if (role == 0) {
    hopper::registers_shrink<40>();
    if (thread != 0) return;
    for (int work = blockIdx.x; work < total; work += gridDim.x) {
      Tile tile = tile_of<S, TOKENS>(work, tokens, rank, splits);
      int begin = tile.split * blocks_k / splits, end = (tile.split + 1) * blocks_k / splits;
      for (int k = begin; k < end; ++k) {
        uint64_t* full = smem.full(ring.stage);
        hopper::barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
        hopper::barrier_expect(full, S::STAGE);
        hopper::tile_copy(smem.weights(ring.stage), w, k * 128, tile.group * rank + tile.feature, full);
        for (int i = 0; i < 2; ++i)
          hopper::tile_copy(smem.tokens(ring.stage) + i * TOKENS * 128, x, 2 * (tile.group * K + k * 128) + i * 128,
                            tile.token, full);
        ring.template next<S::STAGES>();
      }
    }
    return;
  }

  hopper::registers_grow<232>();
  int warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3, half = role - 1;
  for (int work = blockIdx.x; work < total; work += gridDim.x) {
    Tile tile = tile_of<S, TOKENS>(work, tokens, rank, splits);
    int begin = tile.split * blocks_k / splits, end = (tile.split + 1) * blocks_k / splits;
    int feature = tile.group * rank + tile.feature + half * MB * 64 + warp * 16;  // of block m: + 64 * m
    int from[MB];
    uint32_t next[MB];
#pragma unroll
    for (int m = 0; m < MB; ++m) {
      from[m] = (feature + m * 64) / 32 * (K / 32) + begin * 4;
      next[m] = __ldg(reinterpret_cast<const uint32_t*>(w_scale + from[m]));
    }
    float acc[MB][TOKENS / 2] = {};
    uint32_t a[2][MB][4];
    int previous = -1;
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
      uint32_t codes[MB];
#pragma unroll
      for (int m = 0; m < MB; ++m) {
        codes[m] = next[m];
        if (k + 1 < end) next[m] = __ldg(reinterpret_cast<const uint32_t*>(w_scale + (from[m] += 4)));
      }
      hopper::barrier_wait(smem.full(ring.stage), ring.phase);
      uint64_t b = hopper::tile_descriptor(hopper::smem_address(smem.tokens(ring.stage)));
      const uint8_t* rows = smem.weights(ring.stage) + (half * MB * 64 + warp * 16 + g) * 128 + 2 * c;
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        hopper::wgmma_wait<1>();  // a[step & 1] is free again
        if (step == 1 && previous >= 0 && lane == 0) hopper::barrier_arrive(smem.empty(previous));
#pragma unroll
        for (int m = 0; m < MB; ++m) {
          const uint8_t* at = rows + m * 8192 + ((step ^ g) << 4);
          uint32_t field = (codes[m] >> 8 * (step >> 1) & 0xFF) + (120 - LATER), scale = field << 7 | field << 23;
          a[step & 1][m][0] = decode(*reinterpret_cast<const uint16_t*>(at), scale);
          a[step & 1][m][1] = decode(*reinterpret_cast<const uint16_t*>(at + 1024), scale);
          a[step & 1][m][2] = decode(*reinterpret_cast<const uint16_t*>(at + 8), scale);
          a[step & 1][m][3] = decode(*reinterpret_cast<const uint16_t*>(at + 1032), scale);
        }
        hopper::wgmma_fence();
#pragma unroll
        for (int m = 0; m < MB; ++m)
          hopper::wgmma_bf16_rs(acc[m], a[step & 1][m], b + ((step >> 2) * TOKENS * 128 + (step & 3) * 32) / 16, 1);
        hopper::wgmma_commit();
      }
      previous = ring.stage;
      ring.template next<S::STAGES>();
    }
    hopper::wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < MB; ++m) hopper::keep(acc[m]);
    if (previous >= 0 && lane == 0) hopper::barrier_arrive(smem.empty(previous));

    int all = groups * rank;
    const float back = __uint_as_float((127u + LATER) << 23);
#pragma unroll
    for (int m = 0; m < MB; ++m)
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = acc[m][4 * j + i] * back;
        if (splits > 1) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            int token = tile.token + 8 * j + 2 * c + (i & 1);
            if (token < tokens)
              parts[(static_cast<int64_t>(tile.split) * tokens + token) * all + feature + m * 64 + g + 8 * (i >> 1)] =
                  v[i];
          }
          continue;
        }
        uint32_t low = hopper::transpose_8x8(blocks::pair_bf16(v[0], v[1]));
        uint32_t high = hopper::transpose_8x8(blocks::pair_bf16(v[2], v[3]));
        int token = tile.token + 8 * j + g;
        if (token < tokens) {
          __nv_bfloat16* to = static_cast<__nv_bfloat16*>(out) + static_cast<int64_t>(token) * all + feature + m * 64;
          *reinterpret_cast<uint32_t*>(to + 2 * c) = low;
          *reinterpret_cast<uint32_t*>(to + 2 * c + 8) = high;
        }
      }
  }
}

}  // namespace grouped
