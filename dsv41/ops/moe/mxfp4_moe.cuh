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
  for (int i = first; i < last; i += 32) {
    int id = i + lane < last ? __ldg(ids + i + lane) : -1;
    unsigned mine = __ballot_sync(0xFFFFFFFFu, id == e);
    if (id == e) order[position + __popc(mine & ((1u << lane) - 1))] = i + lane;
    position += __popc(mine);
  }
}

// Eight E4M3 values times 2^(code - 127) as bf16.
__device__ __forceinline__ uint4 expand(uint2 v, uint32_t code) {
  float scale = __uint_as_float(code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23);
  uint32_t words[2] = {v.x, v.y}, out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float f[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      __nv_fp8_storage_t byte = words[i >> 1] >> (16 * (i & 1) + 8 * j) & 0xFF;
      f[j] = __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3))) * scale;
    }
    out[i] = gemm::pair_bf16(f[0], f[1]);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

template <int HIDDEN>
__device__ __forceinline__ void prepare(const int* ids, const uint8_t* x, const uint8_t* x_scale, int tokens,
                                        int top_k, int experts, int* begins, int* order, void* expanded,
                                        uint8_t* shared) {
  if (blockIdx.x < experts) {
    group(ids, tokens * top_k, experts, begins, order, reinterpret_cast<int*>(shared));
    return;
  }
  int64_t pieces = static_cast<int64_t>(tokens) * (HIDDEN / 8);
  int64_t stride = static_cast<int64_t>(gridDim.x - experts) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x - experts) * blockDim.x + threadIdx.x; i < pieces; i += stride)
    static_cast<uint4*>(expanded)[i] =
        expand(__ldg(reinterpret_cast<const uint2*>(x) + i), __ldg(x_scale + (i >> 2)));
}

// The code of the smallest power of two >= amax / 448.
__device__ __forceinline__ int scale_code(float amax) {
  uint32_t bits = __float_as_uint(amax);
  int code = static_cast<int>(bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000);
  return min(max(code, 1), 254);
}

// silu(min(gate, limit)) * clamp(up, +-limit) * weight, rounded to bf16. Comparisons let NaN through.
__device__ __forceinline__ float swiglu(float gate, float up, float weight, float limit) {
  gate = __bfloat162float(__float2bfloat16_rn(gate));
  up = __bfloat162float(__float2bfloat16_rn(up));
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  float y = gate / (1.0f + expf(-gate)) * up * weight;
  return __bfloat162float(__float2bfloat16_rn(y));
}

// What MXFP8 with this scale carries of y.
__device__ __forceinline__ float carried(float y, float inverse, float scale) {
  float v = y * inverse;
  v = v > 448.0f ? 448.0f : v < -448.0f ? -448.0f : v;
  __nv_fp8_storage_t q = __nv_cvt_float_to_fp8(v, __NV_NOSAT, __NV_E4M3);
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(q, __NV_E4M3))) * scale;
}

// End of the first product: rows g and g + 8 of a warp's 16 are gate and up of one feature, a warp group holds
// the 32 features of one scale.
template <int INTER>
struct GateUp {
  const int* order;
  const float* weights;  // [assignments]
  float limit;
  __nv_bfloat16* out;    // [positions, INTER]

  template <int N>
  __device__ __forceinline__ void operator()(float (&acc)[N / 2], const gemm::Tile& tile, int block, int group,
                                             int thread, __nv_bfloat16* maxima) const {
    int warp = thread >> 5, lane = thread & 31, column = 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int n = 8 * j + column + i;
        float weight = n < tile.rows ? __ldg(weights + __ldg(order + tile.row + n)) : 0.0f;
        float y = swiglu(acc[4 * j + i], acc[4 * j + 2 + i], weight, limit);
        acc[4 * j + i] = y;
        float amax = fmaxf(fabsf(y), 0.0f);  // a NaN does not count
#pragma unroll
        for (int d = 4; d < 32; d *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, d));
        if (lane < 4) maxima[warp * N + n] = __float2bfloat16_rn(amax);
      }
    }
    hopper::named_barrier(2 + group, 128);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int n = 8 * j + column + i;
        float amax = 1e-4f;
#pragma unroll
        for (int w = 0; w < 4; ++w) amax = fmaxf(amax, __bfloat162float(maxima[w * N + n]));
        int code = scale_code(amax);
        v[i] = carried(acc[4 * j + i], __uint_as_float(static_cast<uint32_t>(254 - code) << 23),
                       __uint_as_float(static_cast<uint32_t>(code) << 23));
      }
      uint32_t pair = hopper::transpose_8x8(gemm::pair_bf16(v[0], v[1]));
      int n = 8 * j + (lane >> 2);
      if (n < tile.rows) {
        int feature = block * 32 + warp * 8 + column;
        *reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(tile.row + n) * INTER + feature) = pair;
      }
    }
    hopper::named_barrier(2 + group, 128);  // the maxima may be overwritten
  }
};

// End of the second product: one bf16 row an assignment.
template <int HIDDEN>
struct Down {
  const int* order;
  __nv_bfloat16* out;  // [assignments, HIDDEN]

  template <int N>
  __device__ __forceinline__ void operator()(float (&acc)[N / 2], const gemm::Tile& tile, int block, int, int thread,
                                             __nv_bfloat16*) const {
    int warp = thread >> 5, lane = thread & 31;
    int feature = block * 64 + warp * 16 + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      uint32_t low = hopper::transpose_8x8(gemm::pair_bf16(acc[4 * j], acc[4 * j + 1]));
      uint32_t high = hopper::transpose_8x8(gemm::pair_bf16(acc[4 * j + 2], acc[4 * j + 3]));
      int n = 8 * j + (lane >> 2);
      if (n < tile.rows) {
        __nv_bfloat16* row = out + static_cast<int64_t>(__ldg(order + tile.row + n)) * HIDDEN + feature;
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

template <int HIDDEN, int INTER, int MAX_ROWS, int M_BLOCKS, int K_GROUPS>
__device__ __forceinline__ void gate_up(const uint8_t* w, const uint8_t* w_scale, const void* x, const int* begins,
                                        const int* order, const float* weights, int experts, int top_k, float limit,
                                        void* out, uint8_t* shared) {
  gemm::run<HIDDEN, MAX_ROWS, M_BLOCKS, K_GROUPS, gemm::Mxfp4>(
      w, w_scale, x, begins, experts, 2 * INTER, shared, TokenOf{order, top_k},
      GateUp<INTER>{order, weights, limit, static_cast<__nv_bfloat16*>(out)});
}

template <int HIDDEN, int INTER, int MAX_ROWS, int M_BLOCKS, int K_GROUPS>
__device__ __forceinline__ void down(const uint8_t* w, const uint8_t* w_scale, const void* x, const int* begins,
                                     const int* order, int experts, void* out, uint8_t* shared) {
  gemm::run<INTER, MAX_ROWS, M_BLOCKS, K_GROUPS, gemm::Mxfp4>(w, w_scale, x, begins, experts, HIDDEN, shared, Same{},
                                          Down<HIDDEN>{order, static_cast<__nv_bfloat16*>(out)});
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
