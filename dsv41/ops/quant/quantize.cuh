// Block quantisation of rows: eight values a thread, a block of 32 (16) values in four (two) neighbouring lanes.
// Bit-equal to the reference: integer arithmetic on scales, one rounding, a NaN keeps its sign and is left out
// of the maximum.
#pragma once

namespace quantize {

enum Format { MXFP8, MXFP4, NVFP4 };

template <bool BF16>
__device__ __forceinline__ void load_8(const void* x, int64_t element, float (&v)[8]) {
  if constexpr (BF16) {
    const uint4 w = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + element);
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  } else {
    const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(x) + element);
    const float4 a = p[0], b = p[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
}

// Rounds to bf16 and back.
__device__ __forceinline__ void round_8(float (&v)[8], uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    v[2 * i] = __uint_as_float(words[i] << 16);
    v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

template <int LANES>
__device__ __forceinline__ float block_max(const float (&v)[8], float floor) {
  float m = floor;
#pragma unroll
  for (int i = 0; i < 8; ++i) m = fmaxf(m, fabsf(v[i]));
#pragma unroll
  for (int x = 1; x < LANES; x *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
  return m;
}

// The code of the smallest power of two >= amax / 448 (SHIFT 8) or / 6 (SHIFT 2).
template <int SHIFT>
__device__ __forceinline__ int scale_code(float amax) {
  const int bits = __float_as_int(amax), mantissa = SHIFT == 8 ? 0x600000 : 0x400000;
  const int code = (bits >> 23) - SHIFT + ((bits & 0x7FFFFF) > mantissa);
  return min(max(code, 1), 254);
}

// 2^(127 - code)
__device__ __forceinline__ float undo_scale(int code) {
  return __int_as_float(code == 254 ? 0x00400000 : (254 - code) << 23);
}

// Four E4M3 bytes of v * factor; the sign is the input's, of a NaN too.
__device__ __forceinline__ uint32_t e4m3_4(const float* v, float factor) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0] * factor, v[1] * factor), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[2] * factor, v[3] * factor), __NV_SATFINITE, __NV_E4M3);
  const uint32_t s01 = __byte_perm(__float_as_uint(v[0]), __float_as_uint(v[1]), 0x73);
  const uint32_t s23 = __byte_perm(__float_as_uint(v[2]), __float_as_uint(v[3]), 0x73);
  return ((low | high << 16) & 0x7F7F7F7Fu) | (__byte_perm(s01, s23, 0x5410) & 0x80808080u);
}

// Code of |y| on the E2M1 grid, nearest even, saturating; a NaN gives 0. Adding 2^(e + 22) to a value of
// exponent e (at least 0) rounds it to steps of 2^(e - 1), which is the grid: the low bits count the steps.
__device__ __forceinline__ uint32_t e2m1(float y) {
  const float a = fminf(fabsf(y), 6.0f);
  const uint32_t binade = __float_as_uint(fmaxf(a, 1.0f)) & 0x7F800000u;
  const uint32_t magic = binade + (22u << 23);
  const uint32_t steps = __float_as_uint(a + __uint_as_float(magic)) - magic;
  const uint32_t code = steps + (binade >> 22) - 254;
  return y == y ? code : 0;
}

// Eight codes, signs of the inputs, the first value in the lowest nibble.
__device__ __forceinline__ uint32_t e2m1_8(const float (&y)[8], const float (&v)[8]) {
  uint32_t out = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t sign = __float_as_uint(v[i]) >> 31 << 3;
    out |= (e2m1(y[i]) | sign) << (4 * i);
  }
  return out;
}

__device__ __forceinline__ uint2 mxfp8_8(const float (&v)[8], float floor, int& code) {
  code = scale_code<8>(block_max<4>(v, floor));
  const float factor = undo_scale(code);
  return make_uint2(e4m3_4(v, factor), e4m3_4(v + 4, factor));
}

__device__ __forceinline__ uint32_t mxfp4_8(const float (&v)[8], float floor, int& code) {
  code = scale_code<2>(block_max<4>(v, floor));
  const float factor = undo_scale(code);
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = v[i] * factor;
  return e2m1_8(y, v);
}

// v / scale, correctly rounded: the reciprocal of the scale is, so one step by the remainder is enough. Values far
// beyond the range, whose remainder would overflow, saturate either way.
__device__ __forceinline__ uint32_t nvfp4_8(const float (&v)[8], float floor, int& code) {
  const float amax = block_max<2>(v, floor);
  code = __nv_cvt_float_to_fp8(__fdiv_rn(amax, 6.0f), __NV_SATFINITE, __NV_E4M3);
  const float scale = __half2float(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3));
  const float inverse = __fdiv_rn(1.0f, scale);
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = fabsf(v[i]) > 65536.0f ? 65536.0f : v[i];  // the sign comes from v
    const float q = __fmul_rn(a, inverse);
    y[i] = scale == 0.0f ? q : __fmaf_rn(__fmaf_rn(-q, scale, a), inverse, q);
  }
  return e2m1_8(y, v);
}

// Addresses arrive as numbers: strided views are no arrays of the language around these functions.
template <typename T>
__device__ __forceinline__ T* at(int64_t base, int64_t offset) {
  return reinterpret_cast<T*>(base) + offset;
}

template <int FORMAT>
__device__ __forceinline__ void store(const float (&v)[8], float floor, bool valid, int row, int chunk, void* values,
                                      int64_t values_stride, int64_t scale, int64_t scale_stride) {
  int code;
  if constexpr (FORMAT == MXFP8) {
    const uint2 q = mxfp8_8(v, floor, code);
    if (valid) reinterpret_cast<uint2*>(static_cast<uint8_t*>(values) + row * values_stride)[chunk] = q;
  } else {
    const uint32_t q = FORMAT == MXFP4 ? mxfp4_8(v, floor, code) : nvfp4_8(v, floor, code);
    if (valid) reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(values) + row * values_stride)[chunk] = q;
  }
  constexpr int LANES = FORMAT == NVFP4 ? 2 : 4;
  if (valid && chunk % LANES == 0) *at<uint8_t>(scale, row * scale_stride + chunk / LANES) = static_cast<uint8_t>(code);
}

// rows x K values to one of the formats; UNROLL chunks of eight values a thread. Strides in elements.
template <int FORMAT, bool BF16, int K, int UNROLL>
__device__ __forceinline__ void rows(int64_t x, int64_t x_stride, int count, float floor, void* values,
                                     int64_t values_stride, int64_t scale, int64_t scale_stride) {
  constexpr uint32_t CHUNKS = K / 8;
  const uint32_t total = count * CHUNKS, first = blockIdx.x * (blockDim.x * UNROLL) + threadIdx.x;
  float v[UNROLL][8];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const uint32_t c = min(first + u * blockDim.x, total - 1);
    load_8<BF16>(reinterpret_cast<const void*>(x), c / CHUNKS * x_stride + c % CHUNKS * 8, v[u]);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const uint32_t c = first + u * blockDim.x;
    store<FORMAT>(v[u], floor, c < total, c / CHUNKS, c % CHUNKS, values, values_stride, scale, scale_stride);
  }
}

// silu(min(gate, limit)) * clamp(up) * weight, as the reference orders it; NaN passes through the clamps.
__device__ __forceinline__ float swiglu(float gate, float up, float weight, float limit) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  // The quick reciprocal (one unit) instead of a division, which alone takes as long as the memory does.
  const float silu = __fmul_rn(g, __fdividef(1.0f, __fadd_rn(1.0f, expf(-g))));
  return __fmul_rn(__fmul_rn(silu, u), weight);
}

template <int INTER, bool ROUND, int UNROLL>
__device__ __forceinline__ void swiglu_rows(int64_t x, int64_t x_stride, int count, int64_t weight, float limit, float floor,
                                            void* values, int64_t values_stride, int64_t scale, int64_t scale_stride) {
  constexpr uint32_t CHUNKS = INTER / 8;
  const uint32_t total = count * CHUNKS, first = blockIdx.x * (blockDim.x * UNROLL) + threadIdx.x;
  float gate[UNROLL][8], up[UNROLL][8];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const uint32_t c = min(first + u * blockDim.x, total - 1);
    const int64_t element = c / CHUNKS * x_stride + c % CHUNKS * 8;
    load_8<true>(reinterpret_cast<const void*>(x), element, gate[u]);
    load_8<true>(reinterpret_cast<const void*>(x), element + INTER, up[u]);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const uint32_t c = first + u * blockDim.x, row = min(c, total - 1) / CHUNKS;
    const float w = weight ? __ldg(at<const float>(weight, row)) : 1.0f;
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = swiglu(gate[u][i], up[u][i], w, limit);
    uint32_t words[4];
    if constexpr (ROUND) round_8(y, words);
    store<MXFP8>(y, floor, c < total, c / CHUNKS, c % CHUNKS, values, values_stride, scale, scale_stride);
  }
}

}  // namespace quantize
