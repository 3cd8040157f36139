// Expert choice, a warp a token; after quantize.cuh.
#pragma once

namespace route {

using quantize::at;

constexpr int LOWEST = -2147483647 - 1;

// sqrt(log(1 + e^x)) to a unit or two, without a branch: log(1 + e^x) is max(x, 0) + log(1 + t) with t = e^-|x|, from
// about 17 on x itself; log(1 + t) / t on [0, 1] is a polynomial.
__device__ __forceinline__ float affinity(float x) {
  constexpr float TERMS[10] = {1.0f,           -4.999989271e-01f, 3.332971036e-01f,  -2.495161593e-01f, 1.966327429e-01f,
                               -1.526966691e-01f, 1.054362357e-01f, -5.637361482e-02f, 1.954252832e-02f, -3.176057013e-03f};
  const float t = expf(-fabsf(x));
  float p = TERMS[9];
#pragma unroll
  for (int i = 8; i >= 0; --i) p = __fmaf_rn(p, t, TERMS[i]);
  const float v = __fmaf_rn(p, t, fmaxf(x, 0.0f)), inverse = rsqrtf(v), root = __fmul_rn(v, inverse);
  return v > 0 && v < INFINITY ? __fmaf_rn(__fmaf_rn(-root, root, v), 0.5f * inverse, root) : v;
}

// An integer that orders like the scores; a NaN comes first, as in a stable sort.
__device__ __forceinline__ int order(float score) {
  const int bits = __float_as_int(score);
  return score != score ? 0x7FFFFFFF : max(bits < 0 ? bits ^ 0x7FFFFFFF : bits, LOWEST + 1);
}

// Four warps a block. A lane has the experts 128 i + 4 lane + {0..3}, its best one and that one's place ready.
template <int EXPERTS, int TOP_K, bool UNIT>
__device__ __forceinline__ void topk(int64_t logits, int64_t stride, int64_t bias, int64_t image_bias, int64_t image, float temperature,
                                     float scale, void* ids, int64_t ids_stride, int64_t weights, int64_t weights_stride, int count) {
  static_assert(EXPERTS % 4 == 0 && TOP_K <= 32);
  constexpr int PIECES = (EXPERTS + 127) / 128;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;
  if (row >= count) return;
  const int lane = threadIdx.x % 32;
  const int64_t from = logits + row * stride * 4, beta = image && *at<const uint8_t>(image, row) ? image_bias : bias;
  float4 x[PIECES], b[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int piece = min(i * 32 + lane, EXPERTS / 4 - 1);
    x[i] = *at<const float4>(from, piece), b[i] = __ldg(at<const float4>(beta, piece));
  }
  const auto value = [&](float v) { return affinity(UNIT ? v : __fdiv_rn(v, temperature)); };
  int key[PIECES][4];
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const bool there = i * 32 + lane < EXPERTS / 4;
    key[i][0] = there ? order(value(x[i].x) + b[i].x) : LOWEST;
    key[i][1] = there ? order(value(x[i].y) + b[i].y) : LOWEST;
    key[i][2] = there ? order(value(x[i].z) + b[i].z) : LOWEST;
    key[i][3] = there ? order(value(x[i].w) + b[i].w) : LOWEST;
  }
  int chosen = 0;
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) {
    int best = LOWEST, place = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (key[i][j] > best) best = key[i][j], place = i * 128 + j;
    place += lane * 4;
    const int top = __reduce_max_sync(~0u, best);
    const int first = __reduce_min_sync(~0u, best == top ? place : EXPERTS);  // ties to the lower id
    if (lane == k) chosen = first;
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (first == i * 128 + lane * 4 + j) key[i][j] = LOWEST;
  }
  // The weights again from the chosen logits: a few lanes' work instead of a value an expert.
  const bool mine = lane < TOP_K;
  const float share = value(*at<const float>(from, mine ? chosen : 0));
  float total = mine ? share : 0.0f;
#pragma unroll
  for (int d = 16; d; d /= 2) total += __shfl_xor_sync(~0u, total, d);
  if (mine) {
    static_cast<int*>(ids)[row * ids_stride + lane] = chosen;
    *at<float>(weights, row * weights_stride + lane) = __fdiv_rn(share, total + 1e-20f) * scale;
  }
}

}  // namespace route
