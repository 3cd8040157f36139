// RMSNorm of rows, with and without quantisation of the result, and rotary embedding; after quantize.cuh.
#pragma once

namespace norm_rope {

using quantize::at;

// One row by WARPS warps, eight values (a chunk) a lane and turn; with one warp a row, a block takes four rows. SPREAD: by
// as many warps as there are turns, one each, and still the same sum.
template <int K, int WARPS, bool SPREAD = false>
struct Place {
  static constexpr int CHUNKS = K / 8, STEP = 32 * WARPS, ALL = (CHUNKS + STEP - 1) / STEP, TURNS = SPREAD ? 1 : ALL;
  static constexpr bool EVEN = CHUNKS % STEP == 0;  // every lane has a chunk in every turn
  int row, first;
  bool there;  // or the lane repeats another row
  __device__ __forceinline__ Place(int count, int skipped) {
    const int block = static_cast<int>(blockIdx.x) - skipped, wanted = WARPS == 1 ? block * 4 + threadIdx.x / 32 : block;
    row = min(wanted, count - 1), there = WARPS > 1 || wanted < count;
    first = WARPS == 1 ? threadIdx.x % 32 : threadIdx.x;
  }
  __device__ __forceinline__ int chunk(int turn) const {
    return EVEN ? first + turn * STEP : min(first + turn * STEP, CHUNKS - 1);
  }
  __device__ __forceinline__ bool valid(int turn) const { return there && inside(turn); }
  __device__ __forceinline__ bool inside(int turn) const { return EVEN || first + turn * STEP < CHUNKS; }
};

// Norms and quantises the row that its lanes hold. `out` is the rounded row or 0, `values` its MXFP8 or null. The order
// of the sum depends on K alone.
template <bool QUANTIZE, int K, int WARPS, bool SPREAD>
__device__ __forceinline__ void norm_row(const Place<K, WARPS, SPREAD>& place, const uint4 (&raw)[SPREAD ? 1 : Place<K, WARPS>::ALL],
                                         int64_t weight, float eps, int64_t out, int64_t out_stride, float floor,
                                         void* values, int64_t values_stride, int64_t scale, int64_t scale_stride,
                                         void* shared) {
  constexpr int TURNS = Place<K, WARPS, SPREAD>::TURNS, STEP = 32 * WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = place.row;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    float v[8], part = 0;
    quantize::load_8<true>(&raw[i], 0, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) part = __fmaf_rn(v[j], v[j], part);
    if (place.inside(i)) sum += part;
  }
  if constexpr (SPREAD) {
    float* const parts = static_cast<float*>(shared) + 32;
    parts[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
    if (threadIdx.x < STEP)
#pragma unroll
      for (int i = 0; i < place.ALL; ++i) sum += parts[i * STEP + threadIdx.x];
  }
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if constexpr (WARPS > 1) {
    float* sums = static_cast<float*>(shared);
    if (lane == 0 && (!SPREAD || warp < WARPS)) sums[warp] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[w];
  }
  const float size = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(K)), eps)));
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int chunk = place.chunk(i);
    const bool valid = place.valid(i);
    float v[8], w[8];
    quantize::load_8<true>(&raw[i], 0, v);
    quantize::load_8<true>(reinterpret_cast<const void*>(weight), chunk * 8, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(w[j], __fmul_rn(v[j], size));
    uint32_t words[4];
    quantize::round_8(v, words);
    if (valid && out) *at<uint4>(out + row * out_stride * 2, chunk) = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (QUANTIZE)
      quantize::store<quantize::MXFP8>(v, floor, valid, row, chunk, values, values_stride, scale, scale_stride);
  }
}

template <int K, int WARPS, bool QUANTIZE>
__device__ __forceinline__ void rms_norm(int64_t x, int64_t x_stride, int64_t weight, int count, float eps,
                                         int64_t out, int64_t out_stride, float floor, void* values,
                                         int64_t values_stride, int64_t scale, int64_t scale_stride, void* shared,
                                         int skipped = 0) {
  const Place<K, WARPS> place(count, skipped);
  uint4 raw[place.TURNS];
#pragma unroll
  for (int i = 0; i < place.TURNS; ++i) raw[i] = *at<const uint4>(x + place.row * x_stride * 2, place.chunk(i));
  norm_row<QUANTIZE>(place, raw, weight, eps, out, out_stride, floor, values, values_stride, scale,
                               scale_stride, shared);
}

// rows = tokens * heads; rotates the last PAIRS pairs of D values, four pairs a thread. IN_PLACE leaves the other
// values alone, otherwise they are copied.
template <int D, int PAIRS, bool IN_PLACE>
__device__ __forceinline__ void rope(int64_t x, int64_t x_token, int64_t x_head, int tokens, int heads, int64_t cos,
                                     int64_t cos_stride, int64_t sin, int64_t sin_stride, int inverse, void* out,
                                     int64_t out_token, int64_t out_head) {
  constexpr int FIRST = (D - 2 * PAIRS) / 8, BEGIN = IN_PLACE ? FIRST : 0;
  constexpr uint32_t CHUNKS = D / 8 - BEGIN;
  const uint32_t c = blockIdx.x * blockDim.x + threadIdx.x, row = c / CHUNKS;
  const uint32_t token = row / heads, head = row % heads;
  if (token >= static_cast<uint32_t>(tokens)) return;
  const int chunk = c % CHUNKS + BEGIN;
  uint4 raw = *at<const uint4>(x + (token * x_token + head * x_head) * 2, chunk);
  if (chunk >= FIRST) {
    const float4 cs = __ldg(at<const float4>(cos + token * cos_stride * 4, chunk - FIRST));
    const float4 sn = __ldg(at<const float4>(sin + token * sin_stride * 4, chunk - FIRST));
    const float cosine[4] = {cs.x, cs.y, cs.z, cs.w}, sine[4] = {sn.x, sn.y, sn.z, sn.w};
    float v[8];
    quantize::load_8<true>(&raw, 0, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = v[2 * i], b = v[2 * i + 1], s = inverse ? -sine[i] : sine[i];
      v[2 * i] = __fsub_rn(__fmul_rn(a, cosine[i]), __fmul_rn(b, s));
      v[2 * i + 1] = __fadd_rn(__fmul_rn(b, cosine[i]), __fmul_rn(a, s));
    }
    uint32_t words[4];
    quantize::round_8(v, words);
    raw = make_uint4(words[0], words[1], words[2], words[3]);
  }
  reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + token * out_token + head * out_head)[chunk] = raw;
}

}  // namespace norm_rope
