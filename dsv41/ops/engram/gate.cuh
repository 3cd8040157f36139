// Engram's gate on Hopper; after quantize.cuh.
#pragma once

namespace engram {

using quantize::at;

template <int HIDDEN, int STREAMS>
struct Gate {
  static constexpr int THREADS = HIDDEN / 8, WARPS = THREADS / 32, SUMS = 3 * STREAMS;
  static constexpr int STAGE = (2 * STREAMS + 1) * HIDDEN * 2;  // streams, keys, value of a token; two of them
  // The sums of the warps for each, and the barriers.
  static constexpr int PARTIAL = 2 * STAGE, BARRIERS = (PARTIAL + 2 * WARPS * SUMS * 4 + 15) / 16 * 16;
};

// Comparisons let a NaN pass, where a maximum would not.
__device__ __forceinline__ float gated(float u) {
  const float size = fabsf(u), steep = __fsqrt_rn(size < 1e-6f ? 1e-6f : size);
  return __fdiv_rn(1.0f, 1.0f + expf(__float_as_int(u) < 0 ? steep : -steep));
}

// Tokens blockIdx.x, + gridDim.x, ...; a thread has eight columns of all streams, its weights stay in registers. The copy
// engine brings the next token while this one is worked on.
template <int HIDDEN, int STREAMS>
__device__ __forceinline__ void gate(int64_t x, int64_t x_token, int64_t x_stream, int64_t kv, int64_t kv_token,
                                     int64_t q_weight, int64_t q_stride, int64_t k_weight, int64_t k_stride,
                                     int64_t dead, float eps, void* out, int64_t out_token, int64_t out_stream,
                                     int count, void* shared) {
  using G = Gate<HIDDEN, STREAMS>;
  uint8_t* const stages = static_cast<uint8_t*>(shared);
  float* const partial = reinterpret_cast<float*>(stages + G::PARTIAL);
  uint64_t* const full = reinterpret_cast<uint64_t*>(stages + G::BARRIERS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = threadIdx.x * 8;
  if (threadIdx.x == 0) {
    hopper::barrier_init(full, 1);
    hopper::barrier_init(full + 1, 1);
    hopper::fence_barrier_init();
  }
  __syncthreads();
  const auto fetch = [&](int64_t token, int stage) {
    uint8_t* to = stages + stage * G::STAGE;
    hopper::barrier_expect(full + stage, G::STAGE);
#pragma unroll
    for (int s = 0; s < STREAMS; ++s)
      hopper::bulk_copy(to + s * HIDDEN * 2, at<const uint16_t>(x, token * x_token + s * x_stream), HIDDEN * 2, full + stage);
    hopper::bulk_copy(to + STREAMS * HIDDEN * 2, at<const uint16_t>(kv, token * kv_token), (STREAMS + 1) * HIDDEN * 2,
                      full + stage);
  };
  const int step = gridDim.x;
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; ++i)
      if (static_cast<int>(blockIdx.x) + i * step < count) fetch(blockIdx.x + i * step, i);
  float weight[STREAMS][8];
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) {
    float q[8], k[8];
    quantize::load_8<true>(at<const uint16_t>(q_weight, s * q_stride), column, q);
    quantize::load_8<true>(at<const uint16_t>(k_weight, s * k_stride), column, k);
#pragma unroll
    for (int i = 0; i < 8; ++i) weight[s][i] = q[i] * k[i];
  }
  const float root = __fsqrt_rn(static_cast<float>(HIDDEN));
  int turn = 0;
  for (int token = blockIdx.x; token < count; token += step, ++turn) {
    const int stage = turn & 1;
    const uint8_t* const from = stages + stage * G::STAGE;
    hopper::barrier_wait(full + stage, turn >> 1 & 1);
    uint4 stored[STREAMS];
    float sums[G::SUMS], value[8];
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
      float v[8], key[8], a = 0, b = 0, c = 0;
      stored[s] = *reinterpret_cast<const uint4*>(from + (s * HIDDEN + column) * 2);
      quantize::load_8<true>(&stored[s], 0, v);
      quantize::load_8<true>(from + (STREAMS + s) * HIDDEN * 2, column, key);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        a = __fmaf_rn(v[i], v[i], a);
        b = __fmaf_rn(key[i], key[i], b);
        c = __fmaf_rn(v[i] * weight[s][i], key[i], c);
      }
      sums[3 * s] = a, sums[3 * s + 1] = b, sums[3 * s + 2] = c;
    }
    quantize::load_8<true>(from + 2 * STREAMS * HIDDEN * 2, column, value);
#pragma unroll
    for (int d = 16; d; d /= 2)
#pragma unroll
      for (int i = 0; i < G::SUMS; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], d);
    float* const shares = partial + stage * G::WARPS * G::SUMS;
#pragma unroll
    for (int i = 0; i < G::SUMS; ++i)
      if (lane == i) shares[warp * G::SUMS + i] = sums[i];
    __syncthreads();  // all have read the stage, and written their shares
    if (threadIdx.x == 0 && token + 2 * step < count) fetch(token + 2 * step, stage);
    float sum = 0;
    if (lane < G::SUMS)
      for (int w = 0; w < G::WARPS; ++w) sum += shares[w * G::SUMS + lane];
    const bool closed = dead && *at<const uint8_t>(dead, token);
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
      const float mean_x = __shfl_sync(~0u, sum, 3 * s) / HIDDEN, mean_key = __shfl_sync(~0u, sum, 3 * s + 1) / HIDDEN;
      const float units = __fdiv_rn(1.0f, __fsqrt_rn(mean_x + eps)) * __fdiv_rn(1.0f, __fsqrt_rn(mean_key + eps));
      const float opened = gated(__fdiv_rn(__shfl_sync(~0u, sum, 3 * s + 2) * units, root));
      if (!closed) {
        float v[8];
        quantize::load_8<true>(&stored[s], 0, v);
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __fmaf_rn(opened, value[i], v[i]);
        quantize::round_8(v, words);
        stored[s] = make_uint4(words[0], words[1], words[2], words[3]);
      }
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + token * out_token + s * out_stream + column) = stored[s];
    }
  }
}

}  // namespace engram
