// Index queries: RoPE, rounding and MXFP4 in one pass. After quantize.cuh.
#pragma once

namespace index_query {

constexpr float kFloor = 7.052966104933725e-38f;  // 6 * 2^-126

// Eight values a thread; RoPE on the last PAIRS pairs of each head.
template <int DIM, int PAIRS>
__device__ __forceinline__ void prepare(const void* x, int64_t x_token, int64_t x_head, const void* cos_, const void* sin_,
                                      int64_t cos_stride, int64_t sin_stride, int tokens, int heads, void* values,
                                      void* scale) {
  constexpr int CHUNKS = DIM / 8, FIRST = CHUNKS - PAIRS / 4;
  const int64_t total = static_cast<int64_t>(tokens) * heads * CHUNKS;
  const int64_t wanted = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t c = wanted < total ? wanted : total - 1, row = c / CHUNKS;
  const int token = static_cast<int>(row / heads), head = static_cast<int>(row % heads), chunk = static_cast<int>(c % CHUNKS);
  float v[8];
  uint32_t words[4];
  quantize::load_8<true>(x, token * x_token + head * x_head + chunk * 8, v);
  if (chunk >= FIRST) {
    const float* cos = static_cast<const float*>(cos_) + token * cos_stride + (chunk - FIRST) * 4;
    const float* sin = static_cast<const float*>(sin_) + token * sin_stride + (chunk - FIRST) * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float a = v[2 * j], b = v[2 * j + 1];
      v[2 * j] = __fsub_rn(__fmul_rn(a, cos[j]), __fmul_rn(b, sin[j]));
      v[2 * j + 1] = __fadd_rn(__fmul_rn(b, cos[j]), __fmul_rn(a, sin[j]));
    }
    quantize::round_8(v, words);
  }
  int code;
  const uint32_t q = quantize::mxfp4_8(v, kFloor, code);
  if (wanted >= total) return;
  static_cast<uint32_t*>(values)[c] = q;
  if (chunk % 4 == 0) static_cast<uint8_t*>(scale)[c / 4] = static_cast<uint8_t>(code);
}

}  // namespace index_query
