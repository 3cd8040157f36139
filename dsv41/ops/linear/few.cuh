// Plain bf16 products of few tokens: their weights are a microsecond of reading, so many blocks read a little each.
#pragma once

namespace few {

template <typename T>
__device__ __forceinline__ T* at(int64_t base, int64_t offset) {
  return reinterpret_cast<T*>(base) + offset;
}

constexpr int WARPS = 8, FEATURES = 16, SHARE = 512, DEEP = SHARE / WARPS;  // k of a block and of a warp

// blockIdx.x: 16 features, .y: a share of k, .z: 8 TILES tokens. Operands go from memory to the tensor cores' registers:
// these number the k of 32 so that a lane's 16 bytes are what they want of it. Warps share k; their sums are added in order.
template <int TILES>
__device__ __forceinline__ void product(int64_t x, int64_t x_stride, int64_t w, int64_t w_stride, int tokens, int features, int k,
                                        void* sums, void* memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4;
  const int begin = blockIdx.y * SHARE + warp * DEEP, feature = blockIdx.x * FEATURES + group, first = blockIdx.z * (8 * TILES);
  float total[TILES][4] = {};
  if (begin < k) {
    uint4 a[DEEP / 32][2], b[DEEP / 32][TILES];
#pragma unroll
    for (int s = 0; s < DEEP / 32; ++s) {
      const int column = begin + 32 * s + lane % 4 * 8;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        a[s][r] = __ldg(at<const uint4>(w + (min(feature + 8 * r, features - 1) * w_stride + column) * 2, 0));
#pragma unroll
      for (int t = 0; t < TILES; ++t)
        b[s][t] = *at<const uint4>(x + (min(first + 8 * t + group, tokens - 1) * x_stride + column) * 2, 0);
    }
#pragma unroll
    for (int s = 0; s < DEEP / 32; ++s) {
      const uint32_t left[4] = {a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y};
      const uint32_t right[4] = {a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w};
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        hopper::mma_bf16(total[t], left, b[s][t].x, b[s][t].y);
        hopper::mma_bf16(total[t], right, b[s][t].z, b[s][t].w);
      }
    }
  }
  float4* const mine = static_cast<float4*>(memory);
#pragma unroll
  for (int t = 0; t < TILES; ++t)
    mine[(warp * TILES + t) * 32 + lane] = make_float4(total[t][0], total[t][1], total[t][2], total[t][3]);
  __syncthreads();
  for (int item = threadIdx.x; item < TILES * 32; item += 32 * WARPS) {
    float v[4] = {};
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      const float4 part = mine[i * TILES * 32 + item];
      v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first + item / 32 * 8 + item % 4 * 2 + i % 2, to = blockIdx.x * FEATURES + item % 32 / 4 + i / 2 * 8;
      if (token < tokens && to < features)
        static_cast<float*>(sums)[(static_cast<int64_t>(blockIdx.y) * tokens + token) * features + to] = v[i];
    }
  }
}

// The shares of k in order, rounded once; two features a thread.
template <bool BF16>
__device__ __forceinline__ void add(int64_t sums, int shares, int tokens, int features, void* out, int64_t out_stride) {
  const int pair = blockIdx.x * blockDim.x + threadIdx.x, token = pair / (features / 2), feature = pair % (features / 2) * 2;
  if (token >= tokens) return;
  float2 total = make_float2(0, 0);
#pragma unroll 10
  for (int s = 0; s < shares; ++s) {
    const float2 part = *at<const float2>(sums, ((static_cast<int64_t>(s) * tokens + token) * features + feature) / 2);
    total.x += part.x, total.y += part.y;
  }
  if constexpr (BF16)
    *reinterpret_cast<__nv_bfloat162*>(static_cast<uint16_t*>(out) + token * out_stride + feature) =
        __floats2bfloat162_rn(total.x, total.y);
  else
    *reinterpret_cast<float2*>(static_cast<float*>(out) + token * out_stride + feature) = total;
}

}  // namespace few
