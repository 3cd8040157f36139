// mHC of four streams; after quantize.cuh. A mixing weight is f32: three bf16 numbers hold its 24 bits, and a stream is
// bf16 as it is, so each product of the tensor cores is exact and only the sums round.
#pragma once

namespace mhc {

using quantize::at;

constexpr int CHUNK = 32, WIDTH = 32;  // columns of a tile, sums a token and part: as in api.py

// x = high + middle + low, each bf16; two numbers at a time.
__device__ __forceinline__ void split_pair(float a, float b, uint32_t (&parts)[3]) {
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    parts[p] = *reinterpret_cast<const uint32_t*>(&pair);
    a -= __uint_as_float(parts[p] << 16);
    b -= __uint_as_float(parts[p] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ void load_4(int64_t from, int64_t index, float* v) {
  const float4 m = __ldg(at<const float4>(from, index));
  v[0] = m.x, v[1] = m.y, v[2] = m.z, v[3] = m.w;
}

// One tile: 16 rows a warp, `inner` chunks of 32 columns of all streams from blockIdx.y * inner on. Writes the new
// streams and the collapsed rows (EXPAND), and for each row 24 products with the weights and the sum of squares.
//
// A thread has two rows and eight columns of a chunk: what the tensor cores want of it, when the columns are numbered
// so in both operands. It copies its own bytes ahead, so nothing but the weights is shared. Chunks are added in order,
// whether in one part or in several.
//
// Shared memory: STAGES chunks of 10 (8) pieces of 16 bytes a thread, then the split weights of a chunk:
// [stream][eight sums][part][lane] 16 bytes.
template <int HIDDEN, int WARPS, int STAGES, bool EXPAND>
__device__ __forceinline__ void streams(int64_t y, int64_t y_stride, int64_t x, int64_t x_stride, int64_t post,
                                        int64_t comb, int64_t pre, int64_t fn, void* out, int64_t out_stride,
                                        int64_t h, int64_t partial, int count, int inner, void* shared) {
  constexpr int THREADS = WARPS * 32, STAGE = (EXPAND ? 10 : 8) * THREADS * 16;
  constexpr int ITEMS = 4 * 24 * 8;  // float4 of weights a chunk
  static_assert(ITEMS % THREADS == 0);
  const int lane = threadIdx.x % 32, group = lane / 4, column = lane % 4 * 8;
  uint8_t* const own = static_cast<uint8_t*>(shared) + threadIdx.x * 16;
  uint8_t* const weights = static_cast<uint8_t*>(shared) + STAGES * STAGE;
  const int wanted[2] = {static_cast<int>(blockIdx.x) * WARPS * 16 + static_cast<int>(threadIdx.x) / 32 * 16 + group,
                         static_cast<int>(blockIdx.x) * WARPS * 16 + static_cast<int>(threadIdx.x) / 32 * 16 + group + 8};
  const int64_t row[2] = {min(wanted[0], count - 1), min(wanted[1], count - 1)};
  const int first = blockIdx.y * inner;

  const auto fetch = [&](int chunk, int stage) {
    uint8_t* to = own + stage * STAGE;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t from = x + (row[r] * x_stride + chunk * CHUNK + column) * 2;
#pragma unroll
      for (int s = 0; s < 4; ++s, to += THREADS * 16) hopper::copy_16_ahead(to, at<const uint8_t>(from, s * HIDDEN * 2));
      if constexpr (EXPAND) {
        hopper::copy_16_ahead(to, at<const uint16_t>(y, row[r] * y_stride + chunk * CHUNK + column));
        to += THREADS * 16;
      }
    }
  };
  float4 raw[ITEMS / THREADS];
  const auto fetch_weights = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < ITEMS / THREADS; ++i) {
      const int item = i * THREADS + threadIdx.x, slot = item / 8 % 24, stream = item / 192;
      const int output = slot < 16 ? slot + 8 : slot - 16;  // sums are in the order comb, pre, post
      raw[i] = __ldg(at<const float4>(fn, (output * 4 + stream) * (HIDDEN / 4) + chunk * (CHUNK / 4) + item % 8));
    }
  };

  float mix[2][16], given[2][4], taken[2][4];
  if constexpr (EXPAND) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < 4; ++s) load_4(comb, row[r] * 4 + s, &mix[r][4 * s]);
      load_4(post, row[r], given[r]);
      load_4(pre, row[r], taken[r]);
    }
  }
  float total[3][4] = {}, squares[2] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < inner) fetch(first + i, i);
    hopper::copy_commit();
  }
  fetch_weights(first);
  for (int c = 0; c < inner; ++c) {
    if (c + STAGES - 1 < inner) fetch(first + c + STAGES - 1, (c + STAGES - 1) % STAGES);
    hopper::copy_commit();
    __syncthreads();  // the weights of the last chunk have been read
#pragma unroll
    for (int i = 0; i < ITEMS / THREADS; ++i) {
      const int item = i * THREADS + threadIdx.x, slot = item / 8 % 24, stream = item / 192;
      uint32_t low[3], high[3];
      split_pair(raw[i].x, raw[i].y, low);
      split_pair(raw[i].z, raw[i].w, high);
      uint8_t* to = weights + (stream * 3 + slot / 8) * 3 * 512 + slot % 8 * 64 + item % 8 * 8;
#pragma unroll
      for (int p = 0; p < 3; ++p) *reinterpret_cast<uint2*>(to + p * 512) = make_uint2(low[p], high[p]);
    }
    if (c + 1 < inner) fetch_weights(first + c + 1);
    __syncthreads();
    hopper::copy_wait<STAGES - 1>();

    uint32_t a[4][8];  // of a stream: four words of the first row, four of the second
    float size[2] = {};
    const uint8_t* from = own + c % STAGES * STAGE;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < 4; ++s, from += THREADS * 16) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        a[s][4 * r] = v.x, a[s][4 * r + 1] = v.y, a[s][4 * r + 2] = v.z, a[s][4 * r + 3] = v.w;
      }
      if constexpr (EXPAND) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        from += THREADS * 16;
        const uint32_t new_words[4] = {v.x, v.y, v.z, v.w};
        uint32_t collapsed[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float y0 = __uint_as_float(new_words[w] << 16), y1 = __uint_as_float(new_words[w] & 0xFFFF0000u);
          float old0[4], old1[4], h0 = 0, h1 = 0;
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            old0[s] = __uint_as_float(a[s][4 * r + w] << 16);
            old1[s] = __uint_as_float(a[s][4 * r + w] & 0xFFFF0000u);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            float v0 = __fmul_rn(mix[r][k], old0[0]), v1 = __fmul_rn(mix[r][k], old1[0]);
#pragma unroll
            for (int s = 1; s < 4; ++s) {
              v0 = __fmaf_rn(mix[r][4 * s + k], old0[s], v0);
              v1 = __fmaf_rn(mix[r][4 * s + k], old1[s], v1);
            }
            const __nv_bfloat162 pair = __floats2bfloat162_rn(__fmaf_rn(given[r][k], y0, v0), __fmaf_rn(given[r][k], y1, v1));
            const uint32_t word = *reinterpret_cast<const uint32_t*>(&pair);
            a[k][4 * r + w] = word;
            h0 = __fmaf_rn(taken[r][k], __uint_as_float(word << 16), h0);
            h1 = __fmaf_rn(taken[r][k], __uint_as_float(word & 0xFFFF0000u), h1);
          }
          const __nv_bfloat162 pair = __floats2bfloat162_rn(h0, h1);
          collapsed[w] = *reinterpret_cast<const uint32_t*>(&pair);
        }
        if (wanted[r] < count) {
          const int64_t begin = (first + c) * CHUNK + column;
#pragma unroll
          for (int k = 0; k < 4; ++k)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + row[r] * out_stride + k * HIDDEN + begin) =
                make_uint4(a[k][4 * r], a[k][4 * r + 1], a[k][4 * r + 2], a[k][4 * r + 3]);
          *at<uint4>(h, (row[r] * HIDDEN + begin) / 8) = make_uint4(collapsed[0], collapsed[1], collapsed[2], collapsed[3]);
        }
      }
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float v0 = __uint_as_float(a[s][4 * r + w] << 16), v1 = __uint_as_float(a[s][4 * r + w] & 0xFFFF0000u);
          size[r] = __fmaf_rn(v1, v1, __fmaf_rn(v0, v0, size[r]));
        }
    }

    float products[3][4] = {};
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int p = 2; p >= 0; --p)  // the smallest first
#pragma unroll
        for (int n = 0; n < 3; ++n) {
          const uint4 b = *reinterpret_cast<const uint4*>(weights + ((s * 3 + n) * 3 + p) * 512 + lane * 16);
          const uint32_t left[4] = {a[s][0], a[s][4], a[s][1], a[s][5]};
          const uint32_t right[4] = {a[s][2], a[s][6], a[s][3], a[s][7]};
          hopper::mma_bf16(products[n], left, b.x, b.y);
          hopper::mma_bf16(products[n], right, b.z, b.w);
        }
#pragma unroll
    for (int n = 0; n < 3; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[n][i] += products[n][i];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      size[r] += __shfl_xor_sync(~0u, size[r], 1);
      size[r] += __shfl_xor_sync(~0u, size[r], 2);
      squares[r] += size[r];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (wanted[r] < count) {
      float* const to = at<float>(partial, (static_cast<int64_t>(blockIdx.y) * count + row[r]) * WIDTH);
#pragma unroll
      for (int n = 0; n < 3; ++n)
        *reinterpret_cast<float2*>(to + n * 8 + lane % 4 * 2) = make_float2(total[n][2 * r], total[n][2 * r + 1]);
      if (lane % 4 == 0) to[24] = squares[r];
    }
}

__device__ __forceinline__ float inverse(float x) { return __fdiv_rn(1.0f, x); }
// Sums over the four lanes that differ in the bits of `step` and `2 * step`; the same bits in each.
__device__ __forceinline__ float sum_4(float v, int step) {
  v += __shfl_xor_sync(~0u, v, step);
  return v + __shfl_xor_sync(~0u, v, 2 * step);
}

// Coefficients of the products of `groups` times `inner` parts; 16 lanes a token, one an entry of the matrix.
template <int HIDDEN, int GROUPS, int INNER>
__device__ __forceinline__ void coefficients(int64_t partial, int64_t base, int64_t scale, float norm_eps, float eps,
                                             int iters, void* pre, int64_t post, int64_t comb, int count) {
  const int wanted = (blockIdx.x * blockDim.x + threadIdx.x) / 16, entry = threadIdx.x % 16;
  const int64_t row = min(wanted, count - 1);
  float matrix[GROUPS] = {}, vectors[GROUPS] = {};
#pragma unroll 4
  for (int i = 0; i < INNER; ++i)
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {  // the loads of all groups are under way together
      const float* from = at<const float>(partial, ((g * INNER + i) * static_cast<int64_t>(count) + row) * WIDTH);
      matrix[g] += from[entry];
      vectors[g] += entry < 9 ? from[16 + entry] : 0.0f;
    }
  float m = 0, v = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) m += matrix[g], v += vectors[g];
  const float square = __shfl_sync(~0u, v, 8, 16);
  const float unit = inverse(__fsqrt_rn(square / (4 * HIDDEN) + norm_eps));
  const float* const bias = at<const float>(base, 0);
  const float* const factor = at<const float>(scale, 0);
  const float z = v * unit * factor[entry / 4 % 2] + bias[entry % 8];
  const float gate = inverse(1.0f + expf(-z));
  float c = m * unit * factor[2] + bias[8 + entry];
  float largest = fmaxf(c, __shfl_xor_sync(~0u, c, 1));  // drops a NaN, which spoils its row through the sum all the same
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  c = expf(c - largest);
  c = c * inverse(sum_4(c, 1)) + eps;
  c = c * inverse(sum_4(c, 4) + eps);
  for (int i = 1; i < iters; ++i) {
    c = c * inverse(sum_4(c, 1) + eps);
    c = c * inverse(sum_4(c, 4) + eps);
  }
  if (wanted < count) {
    if (entry < 4) static_cast<float*>(pre)[row * 4 + entry] = gate + eps;
    else if (entry < 8) *at<float>(post, row * 4 + entry - 4) = 2.0f * gate;
    *at<float>(comb, row * 16 + entry) = c;
  }
}

}  // namespace mhc
