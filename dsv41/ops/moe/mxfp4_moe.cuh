// The device functions of mxfp4_moe: grouping, the two GEMMs' ends, and the sum over a token's experts.
#pragma once

namespace moe {

// First position of each expert and, per position, the assignment (token * top_k + column), in the order of
// assignments. Block e counts its own and all smaller ids in one pass, so blocks do not wait for each other.
// Blocks from `experts` on expand the MXFP8 rows to bf16 (exact).
__device__ __forceinline__ void group(const int* ids, int assignments, int experts, int* begins, int* order,
                                      int* shared) {
  constexpr int WARPS = 8;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, e = blockIdx.x;
  int each = ((assignments + WARPS - 1) / WARPS + 31) & ~31, first = warp * each;
  int last = min(first + each, assignments), below = 0, equal = 0;
#pragma unroll 8
  for (int i = first; i < last; i += 32) {
    int id = i + lane < last ? __ldg(ids + i + lane) : -1;
    below += __popc(__ballot_sync(0xFFFFFFFFu, id >= 0 && id < e));
    equal += __popc(__ballot_sync(0xFFFFFFFFu, id == e));
  }
  if (lane == 0) shared[warp] = equal, shared[WARPS + warp] = below;
  __syncthreads();
  int begin = 0, position = 0, count = 0;
  for (int w = 0; w < WARPS; ++w) {
    begin += shared[WARPS + w];
    if (w < warp) position += shared[w];
    count += shared[w];
  }
  if (threadIdx.x == 0) {
    begins[e] = begin;
    if (e == experts - 1) begins[experts] = begin + count;
  }
  position += begin;
#pragma unroll 8
  for (int i = first; i < last; i += 32) {
    int id = i + lane < last ? __ldg(ids + i + lane) : -1;
    unsigned mine = __ballot_sync(0xFFFFFFFFu, id == e);
    if (id == e) order[position + __popc(mine & ((1u << lane) - 1))] = i + lane;
    position += __popc(mine);
  }
}

// `chosen`: the ids of experts whose scales are folded, or of the others; -1 elsewhere. In a layer that has both, an
// expert's first code tells (see pack.py). CODES: of an expert.
template <int CODES>
__device__ __forceinline__ void choose(const int* ids, const uint8_t* w13_scale, int assignments, int experts,
                                       int folded, int* chosen) {
  constexpr int FIRST_MOVED = 224;  // of codes of folded experts
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= assignments) return;
  int id = __ldg(ids + i);
  if (id < 0 || id >= experts || (__ldg(w13_scale + static_cast<int64_t>(id) * CODES) >= FIRST_MOVED) != (folded != 0))
    id = -1;
  chosen[i] = id;
}

template <class Tokens>
constexpr bool HALF = Tokens::BYTES == 2 && Tokens::SCALES == 0 && Tokens::FOLDED;

__device__ __forceinline__ float power(uint32_t code) {  // 2^(code - 127)
  return __uint_as_float(code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23);
}

__device__ __forceinline__ uint32_t pair_f16(float low, float high) {
  __half2 pair = __floats2half2_rn(low, high);
  uint32_t out;
  memcpy(&out, &pair, 4);
  return out;
}

// Sixteen E4M3 values times 2^(code - 127) as bf16, in the order of k of the weights' fragments: 4c + {0, 1} for
// c = 0..3, then 4c + {2, 3}.
__device__ __forceinline__ void expand(uint4 v, uint32_t code, uint4* out) {
  float scale = power(code);
  uint32_t words[4] = {v.x, v.y, v.z, v.w}, pairs[2][4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float f[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        __nv_fp8_storage_t byte = words[c] >> (16 * half + 8 * e) & 0xFF;
        f[e] = __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3))) * scale;
      }
      pairs[half][c] = gemm::pair_bf16(f[0], f[1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    out[half] = make_uint4(pairs[half][0], pairs[half][1], pairs[half][2], pairs[half][3]);
}

__device__ __forceinline__ float2 from_e4m3(uint32_t pair) {
  __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  __half2 half;
  memcpy(&half, &raw, 4);
  return __half22float2(half);
}
// Two values as sums of two E5M2, which has two bits of the mantissa's three: the upper ones, and the `lower`.
__device__ __forceinline__ uint32_t split(float2 f, uint32_t& lower) {
  float2 high = make_float2(__uint_as_float(__float_as_uint(f.x) & 0xFFE00000u),
                            __uint_as_float(__float_as_uint(f.y) & 0xFFE00000u));
  lower = __nv_cvt_float2_to_fp8x2(make_float2(f.x - high.x, f.y - high.y), __NV_SATFINITE, __NV_E5M2);
  return __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E5M2);
}
constexpr int SPLIT_SHIFT = 7;  // 448 * 2^7 is E5M2's largest: E4M3 values are moved there before they are split
constexpr float SPLIT_UNIT = 0.0078125f;  // 2^-7
__device__ __forceinline__ float power_of(int e) {  // 2^e, or 0
  return __uint_as_float(static_cast<uint32_t>(max(127 + e, 0)) << 23);
}
// Sixteen E4M3 values times 2^shift as f16, in expand's order of k.
__device__ __forceinline__ void expand_half(uint4 v, int shift, uint4* out) {
  float scale = power_of(shift);
  uint32_t words[4] = {v.x, v.y, v.z, v.w}, pairs[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float2 f = from_e4m3(words[i >> 1] >> 16 * (i & 1) & 0xFFFF);
    pairs[i & 1][i >> 1] = pair_f16(f.x * scale, f.y * scale);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    out[half] = make_uint4(pairs[half][0], pairs[half][1], pairs[half][2], pairs[half][3]);
}

// Sixteen values of an MXFP8 row for folded products: relative to the largest of the four scales of their 128, as
// E4M3 (values below its normal numbers are rounded) or as sums of two E5M2. `i` counts sixteens; the scale of a 128
// is multiplied by `unit`.
template <class Tokens>
__device__ __forceinline__ void fold_16(const uint8_t* values, const uint8_t* codes, int64_t i, float unit, void* out,
                                        float* out_scale) {
  constexpr bool SPLIT = Tokens::COLUMNS == 2;
  uint32_t four = __ldg(reinterpret_cast<const uint32_t*>(codes) + (i >> 3));
  int top = max(max(four & 0xFF, four >> 8 & 0xFF), max(four >> 16 & 0xFF, four >> 24));
  int shift = static_cast<int>(four >> 8 * (i >> 1 & 3) & 0xFF) - top + (SPLIT ? SPLIT_SHIFT : 0);
  float scale = power_of(shift);
  uint4 v = __ldg(reinterpret_cast<const uint4*>(values) + i);
  uint32_t words[4] = {v.x, v.y, v.z, v.w}, upper[4] = {}, lower[4] = {};
  if (!SPLIT && shift == 0) {
    upper[0] = v.x, upper[1] = v.y, upper[2] = v.z, upper[3] = v.w;
  } else {
#pragma unroll
    for (int e = 0; e < 16; e += 2) {
      float2 f = from_e4m3(words[e / 4] >> 8 * (e & 2) & 0xFFFF);
      f.x *= scale, f.y *= scale;
      uint32_t low = 0, high = SPLIT ? split(f, low) : __nv_cvt_float2_to_fp8x2(f, __NV_SATFINITE, __NV_E4M3);
      upper[e / 4] |= high << 8 * (e & 2), lower[e / 4] |= low << 8 * (e & 2);
    }
  }
  uint4* to = static_cast<uint4*>(out);
  int64_t at = SPLIT ? (i >> 3) * 16 + (i & 7) : i;
  to[at] = make_uint4(upper[0], upper[1], upper[2], upper[3]);
  if (SPLIT) to[at + 8] = make_uint4(lower[0], lower[1], lower[2], lower[3]);
  if ((i & 7) == 0) out_scale[i >> 3] = power(top) * (SPLIT ? unit * SPLIT_UNIT : unit);
}

// `rows`, `row_scales`: the rows as the products want them. Native products take the given values, with their scales
// as floats [tokens, HIDDEN / 32]; folded ones have scales [tokens, HIDDEN / 128], multiplied by `unit`. `counts`
// [experts + 1] become 0.
template <int HIDDEN, class Tokens>
__device__ __forceinline__ void prepare(const int* ids, const uint8_t* x, const uint8_t* x_scale, int tokens,
                                        int top_k, int experts, float unit, int* begins, int* order, int* counts,
                                        void* rows, float* row_scales, uint8_t* shared) {
  if (blockIdx.x < experts) {
    if (threadIdx.x == 0) {
      counts[blockIdx.x] = 0;
      if (blockIdx.x == 0) counts[experts] = 0;
    }
    group(ids, tokens * top_k, experts, begins, order, reinterpret_cast<int*>(shared));
    return;
  }
  if constexpr (HALF<Tokens>) {  // a warp a row, relative to the largest of its scales: 448 * 2^7 is in f16's range
    int warp = (blockIdx.x - experts) * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    for (int row = warp; row < tokens; row += (gridDim.x - experts) * (blockDim.x >> 5)) {
      const uint8_t* codes = x_scale + static_cast<int64_t>(row) * (HIDDEN / 32);
      int top = 0;
      for (int i = lane; i < HIDDEN / 32; i += 32) top = max(top, static_cast<int>(__ldg(codes + i)));
      top = __reduce_max_sync(0xFFFFFFFFu, top);
      if (lane == 0) row_scales[row] = power(top) * SPLIT_UNIT;
      int64_t first = static_cast<int64_t>(row) * (HIDDEN / 16);
#pragma unroll 5
      for (int i = lane; i < HIDDEN / 16; i += 32)
        expand_half(__ldg(reinterpret_cast<const uint4*>(x) + first + i), __ldg(codes + (i >> 1)) - top + SPLIT_SHIFT,
                    static_cast<uint4*>(rows) + 2 * (first + i));
    }
    return;
  }
  constexpr bool NATIVE = Tokens::SCALES == 16;
  int64_t pieces = static_cast<int64_t>(tokens) * (HIDDEN / (NATIVE ? 32 : 16));
  int64_t stride = static_cast<int64_t>(gridDim.x - experts) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x - experts) * blockDim.x + threadIdx.x; i < pieces; i += stride) {
    if constexpr (NATIVE)
      row_scales[i] = power(__ldg(x_scale + i));
    else if constexpr (Tokens::SCALES == 4)
      fold_16<Tokens>(x, x_scale, i, unit, rows, row_scales);
    else
      expand(__ldg(reinterpret_cast<const uint4*>(x) + i), __ldg(x_scale + (i >> 1)),
             static_cast<uint4*>(rows) + 2 * i);
  }
}

// The inner activations, MXFP8 rows of INTER values, for the folded second product. Rows past the last position are
// moved too, and never read.
template <int INTER, class Tokens>
__device__ __forceinline__ void fold_inner(const uint8_t* values, const uint8_t* codes, int rows, float unit, void* out,
                                           float* out_scale) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < static_cast<int64_t>(rows) * (INTER / 16)) fold_16<Tokens>(values, codes, i, unit, out, out_scale);
}

// The code of the smallest power of two >= amax / 448.
__device__ __forceinline__ int scale_code(float amax) {
  uint32_t bits = __float_as_uint(amax);
  int code = static_cast<int>(bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000);
  return min(max(code, 1), 254);
}

// silu(min(gate, limit)) * clamp(up, +-limit) * weight. NaN stays.
__device__ __forceinline__ float swiglu(float gate, float up, float weight, float limit) {
  gate = hopper::min_or_nan(gate, limit);
  up = hopper::max_or_nan(hopper::min_or_nan(up, limit), -limit);
  return gate * hopper::reciprocal_quick(1.0f + hopper::exp2_quick(gate * -1.44269504f)) * up * weight;
}
__device__ __forceinline__ float2 rounded(float low, float high) {
  uint32_t v = gemm::pair_bf16(low, high);
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
}

// Of up to eight pairs of values a lane, the largest magnitudes over the eight lanes with the same lane % 4: of pair j in
// the lanes 4 * j and on. Every exchange halves the pairs, so eight take seven exchanges. A NaN does not count.
__device__ __forceinline__ uint32_t largest(const uint32_t* pairs, int count, int lane) {
  uint32_t v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = i < count ? pairs[i] & 0x7FFF7FFFu : 0;
#pragma unroll
  for (int half = 4; half; half /= 2) {
    bool upper = lane & 4 * half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      if (i >= count) break;
      uint32_t mine = upper ? v[i + half] : v[i], other = upper ? v[i] : v[i + half];
      other = __shfl_xor_sync(0xFFFFFFFFu, other, 4 * half);
      v[i] = gemm::bits(__hmax2(gemm::as_bf16(mine), gemm::as_bf16(other)));
    }
  }
  return v[0];
}

// End of the first product: rows g and g + 8 of a warp's 16 are gate and up of one feature, a warp group holds
// the 32 features of one scale.
template <int INTER, class Tokens>
struct GateUp {
  static constexpr bool E4M3 = Tokens::SCALES > 0;
  const int* order;
  const float* weights;  // [assignments]
  float limit;
  void* out;     // [positions, INTER]: what MXFP8 carries, in bf16 or f16 and the order of k of the weights; or E4M3
  void* scales;  // [positions, INTER / 32], for E4M3: floats, or codes for a product that folds them; of f16: a row
  const float* row_scales;  // of f16 rows: one a token
  int top_k;
  float unit;

  // The routing weight of a position, and the scale of its sums.
  __device__ __forceinline__ int2 note(int position) const {
    int assignment = __ldg(order + position);
    return make_int2(__float_as_int(__ldg(weights + assignment)),
                     HALF<Tokens> ? __float_as_int(__ldg(row_scales + assignment / top_k) * unit) : 0);
  }
  // The code of what an f16 row is multiplied with: at most 2^7, which loses nothing (no value of MXFP8 is finer than
  // 2^-31 with scales of at least 1e-4 / 448), and less where the clamp and the weight let values grow beyond 2^8.
  __device__ __forceinline__ uint32_t shrink(float weight) const {
    return min(268 - (__float_as_uint(limit * limit * fabsf(weight)) >> 23), 134u);
  }
  template <int N>
  __device__ __forceinline__ void operator()(float (&acc)[N / 2], const gemm::Tile& tile, int block, int group,
                                             int thread, const int2* notes, __nv_bfloat16* maxima) const {
    int warp = thread >> 5, lane = thread & 31, column = 2 * (lane & 3);
    uint32_t y[N / 8];  // in bf16, two tokens a word
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      int4 two = *reinterpret_cast<const int4*>(notes + 8 * j + column);  // the tokens of columns n and n + 1
      float first = __int_as_float(two.x), second = __int_as_float(two.z);
      if (HALF<Tokens>) {
        float low = __int_as_float(two.y), high = __int_as_float(two.w);
        acc[4 * j] *= low, acc[4 * j + 1] *= high, acc[4 * j + 2] *= low, acc[4 * j + 3] *= high;
      }
      float2 gate = rounded(acc[4 * j], acc[4 * j + 1]), up = rounded(acc[4 * j + 2], acc[4 * j + 3]);
      y[j] = gemm::pair_bf16(swiglu(gate.x, up.x, first, limit), swiglu(gate.y, up.y, second, limit));
    }
    // A token's slot: the maxima of the four warps, then what its values are multiplied with on the way to E4M3 and,
    // from there, to what the second product takes.
#pragma unroll
    for (int j = 0; j < N / 8; j += 8) {
      uint32_t amax = largest(y + j, N / 8 - j, lane);
      int n = 8 * j + 2 * lane;
      if (n < N) {
        maxima[4 * n + warp] = __low2bfloat16(gemm::as_bf16(amax));
        maxima[4 * n + 4 + warp] = __high2bfloat16(gemm::as_bf16(amax));
      }
    }
    hopper::named_barrier(2 + group, 128);
    float2* factors = reinterpret_cast<float2*>(maxima);
    for (int n = thread; n < N; n += 128) {
      uint2 four = reinterpret_cast<const uint2*>(maxima)[n];
      __nv_bfloat162 pair = __hmax2(gemm::as_bf16(four.x), gemm::as_bf16(four.y));
      int code = scale_code(fmaxf(1e-4f, fmaxf(__low2float(pair), __high2float(pair))));
      float scale = __int_as_float(code << 23);
      if (E4M3 && n < tile.rows) {
        int64_t at = static_cast<int64_t>(tile.row + n) * (INTER / 32) + block;
        if (Tokens::SCALES == 16)
          static_cast<float*>(scales)[at] = scale;
        else
          static_cast<uint8_t*>(scales)[at] = static_cast<uint8_t>(code);
      }
      if (HALF<Tokens> && n < tile.rows) {
        uint32_t shrunk = shrink(__int_as_float(notes[n].x));
        scale *= __uint_as_float(shrunk << 23);
        if (block == 0) static_cast<float*>(scales)[tile.row + n] = __uint_as_float((254 - shrunk) << 23);
      }
      factors[n] = make_float2(__int_as_float((254 - code) << 23), scale);
    }
    hopper::named_barrier(2 + group, 128);
    constexpr int BYTES = E4M3 ? 1 : 2;  // of a value
    int feature = warp * 8 + column;     // of the block's 32
    if (!E4M3) feature = (feature & 16) + 4 * (feature & 2) + (feature >> 1 & 6);  // 4c + 2h goes to 8h + 2c
    int own = lane >> 2;  // after the transposition
    uint8_t* to = static_cast<uint8_t*>(out) +
                  (static_cast<int64_t>(tile.row + own) * INTER + block * 32 + feature) * BYTES;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float4 by = *reinterpret_cast<const float4*>(factors + 8 * j + column);
      float2 v = make_float2(__uint_as_float(y[j] << 16) * by.x, __uint_as_float(y[j] & 0xFFFF0000u) * by.z);
      uint32_t q = __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, __NV_E4M3), pair;
      if (E4M3) {
        pair = (q & 0xFF) | (q & 0xFF00) << 8;
      } else {
        float2 f = from_e4m3(q);
        pair = HALF<Tokens> ? pair_f16(f.x * by.y, f.y * by.w) : gemm::pair_bf16(f.x * by.y, f.y * by.w);
      }
      pair = hopper::transpose_8x8(pair);
      if (8 * j + own >= tile.rows) continue;
      if (E4M3)
        *reinterpret_cast<uint16_t*>(to + 8 * j * INTER * BYTES) = static_cast<uint16_t>(pair | pair >> 8);
      else
        *reinterpret_cast<uint32_t*>(to + 8 * j * INTER * BYTES) = pair;
    }
    hopper::named_barrier(2 + group, 128);  // the slots may be overwritten
  }
};

// End of the second product: one bf16 row an assignment.
template <int HIDDEN, class Tokens>
struct Down {
  const int* order;
  __nv_bfloat16* out;  // [assignments, HIDDEN]
  const float* row_scales;  // of f16 rows: one a position
  float unit;

  // The assignment of a position, and the scale of its sums.
  __device__ __forceinline__ int2 note(int position) const {
    return make_int2(__ldg(order + position),
                     HALF<Tokens> ? __float_as_int(__ldg(row_scales + position) * unit) : 0);
  }
  template <int N>
  __device__ __forceinline__ void operator()(float (&acc)[N / 2], const gemm::Tile& tile, int block, int, int thread,
                                             const int2* notes, __nv_bfloat16*) const {
    int warp = thread >> 5, lane = thread & 31;
    int feature = block * 64 + warp * 16 + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      if (HALF<Tokens>) {
        const int2* pair = notes + 8 * j + 2 * (lane & 3);
        float first = __int_as_float(pair[0].y), second = __int_as_float(pair[1].y);
        acc[4 * j] *= first, acc[4 * j + 1] *= second, acc[4 * j + 2] *= first, acc[4 * j + 3] *= second;
      }
      uint32_t low = hopper::transpose_8x8(gemm::pair_bf16(acc[4 * j], acc[4 * j + 1]));
      uint32_t high = hopper::transpose_8x8(gemm::pair_bf16(acc[4 * j + 2], acc[4 * j + 3]));
      int n = 8 * j + (lane >> 2);
      if (n < tile.rows) {
        __nv_bfloat16* row = out + static_cast<int64_t>(notes[n].x) * HIDDEN + feature;
        *reinterpret_cast<uint32_t*>(row) = low;
        *reinterpret_cast<uint32_t*>(row + 8) = high;
      }
    }
  }
};

struct TokenOf {
  const int* order;
  int top_k;
  __device__ __forceinline__ int operator()(int position) const { return __ldg(order + position) / top_k; }
};
struct Same {
  __device__ __forceinline__ int operator()(int position) const { return position; }
};

// `x_scale` and `out_scale`: of E4M3 values; bf16 ones have none. `base`: see gemm::run; `unit`: what f16 rows' sums
// are multiplied with.
template <int HIDDEN, int INTER, int MAX_ROWS, int K_GROUPS, class Tokens>
__device__ __forceinline__ void gate_up(const uint8_t* w, const uint8_t* w_scale, const void* x, const float* x_scale,
                                        const int* begins, const int* order, const float* weights, int experts,
                                        int top_k, int base, float unit, float limit, void* out, void* out_scale,
                                        uint8_t* shared) {
  gemm::run<HIDDEN, MAX_ROWS, K_GROUPS, gemm::Mxfp4, Tokens>(
      w, w_scale, x, x_scale, begins, experts, 2 * INTER, base, shared, TokenOf{order, top_k},
      GateUp<INTER, Tokens>{order, weights, limit, out, out_scale, x_scale, top_k, unit});
}

template <int HIDDEN, int INTER, int MAX_ROWS, int K_GROUPS, class Tokens>
__device__ __forceinline__ void down(const uint8_t* w, const uint8_t* w_scale, const void* x, const float* x_scale,
                                     const int* begins, const int* order, int experts, int base, float unit, void* out,
                                     uint8_t* shared) {
  gemm::run<INTER, MAX_ROWS, K_GROUPS, gemm::Mxfp4, Tokens>(
      w, w_scale, x, x_scale, begins, experts, HIDDEN, base, shared, Same{},
      Down<HIDDEN, Tokens>{order, static_cast<__nv_bfloat16*>(out), x_scale, unit});
}

// out = sum of a token's rows in top-k order, plus `extra`; a row of 8 values a thread.
template <int HIDDEN, int TOP_K, bool WITH_EXTRA>
__device__ __forceinline__ void combine(const int* ids, const void* parts, const void* extra, int tokens, int experts,
                                        void* out) {
  constexpr int PIECES = HIDDEN / 8;
  int64_t pieces = static_cast<int64_t>(tokens) * PIECES, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pieces; i += stride) {
    int64_t token = i / PIECES, piece = i - token * PIECES;
    float sum[8] = {};
    uint4 rows[TOP_K + 1];
    bool there[TOP_K + 1];
#pragma unroll
    for (int k = 0; k <= TOP_K; ++k) {
      int id = k < TOP_K ? __ldg(ids + token * TOP_K + k) : 0;
      there[k] = k < TOP_K ? id >= 0 && id < experts : WITH_EXTRA;
      if (there[k])
        rows[k] = k < TOP_K ? static_cast<const uint4*>(parts)[(token * TOP_K + k) * PIECES + piece]
                            : static_cast<const uint4*>(extra)[i];
    }
#pragma unroll
    for (int k = 0; k <= TOP_K; ++k) {
      if (!there[k]) continue;
      uint32_t words[4] = {rows[k].x, rows[k].y, rows[k].z, rows[k].w};
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += __uint_as_float(words[j >> 1] >> (16 * (j & 1)) << 16);
    }
    static_cast<uint4*>(out)[i] = make_uint4(gemm::pair_bf16(sum[0], sum[1]), gemm::pair_bf16(sum[2], sum[3]),
                                             gemm::pair_bf16(sum[4], sum[5]), gemm::pair_bf16(sum[6], sum[7]));
  }
}

}  // namespace moe
