// mHC of four streams; after quantize.cuh and norm_rope.cuh. A mixing weight is f32: three bf16 numbers hold its 24
// bits, and a stream is bf16 as it is, so each product of the tensor cores is exact and only the sums round.
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

// Two neighbouring columns: the new streams from the old ones and the sub-layer's output, and their collapse.
__device__ __forceinline__ uint32_t expand_pair(const float (&comb)[16], const float (&post)[4], const float (&pre)[4],
                                                uint32_t y, uint32_t (&x)[4]) {
  const float y0 = __uint_as_float(y << 16), y1 = __uint_as_float(y & 0xFFFF0000u);
  float old0[4], old1[4], h0 = 0, h1 = 0;
#pragma unroll
  for (int s = 0; s < 4; ++s) old0[s] = __uint_as_float(x[s] << 16), old1[s] = __uint_as_float(x[s] & 0xFFFF0000u);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float v0 = __fmul_rn(comb[k], old0[0]), v1 = __fmul_rn(comb[k], old1[0]);
#pragma unroll
    for (int s = 1; s < 4; ++s) v0 = __fmaf_rn(comb[4 * s + k], old0[s], v0), v1 = __fmaf_rn(comb[4 * s + k], old1[s], v1);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(__fmaf_rn(post[k], y0, v0), __fmaf_rn(post[k], y1, v1));
    x[k] = *reinterpret_cast<const uint32_t*>(&pair);
    h0 = __fmaf_rn(pre[k], __uint_as_float(x[k] << 16), h0);
    h1 = __fmaf_rn(pre[k], __uint_as_float(x[k] & 0xFFFF0000u), h1);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(h0, h1);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Of a block: GROUPS warp groups of 64 rows, and one that splits the weights; INNER chunks of 32 columns of all
// streams. Sums of SUB chunks are added up, those to the result.
template <int GROUPS, int INNER, bool EXPAND>
struct Tile {
  static constexpr int WARPS = 4 * GROUPS, PIECES = EXPAND ? 5 : 4;
  static constexpr int STAGES = INNER > 2 ? 2 : 1, BUFFERS = INNER > 1 ? 2 : 1;
  static constexpr int STAGE = 16 * PIECES * 128;  // two chunks of a warp's rows: [stream or y][row] 128 bytes
  static constexpr int TENSOR = 72 * 128, WEIGHTS = 2 * TENSOR;  // a chunk of two streams: [part][sum] 128 bytes
  static constexpr int DATA = BUFFERS * WEIGHTS, BARRIERS = DATA + STAGES * WARPS * STAGE;
  static constexpr int BYTES = BARRIERS + 16 * BUFFERS;
};

// The warp group that keeps the split weights of a chunk ahead. The tensor cores number the columns of a chunk so
// that a thread's eight neighbours are what they want of it: k = 16 t + 8 h + 2 q + i is column 8 q + 4 t + 2 h + i.
template <int HIDDEN, class T, int INNER>
__device__ __forceinline__ void split_weights(int64_t fn, int first, uint8_t* shared, uint64_t* full, uint64_t* empty) {
  constexpr int COUNT = 4 * 24 * 8 / 128;  // float4 of weights a thread and chunk
  float4 raw[COUNT];
  const auto fetch = [&](int chunk) {
    const int thread = hopper::opaque(threadIdx.x % 128);  // or addresses of all items would hold registers
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int item = i * 128 + thread, slot = item / 8 % 24, stream = item / 192;
      const int output = slot < 16 ? slot + 8 : slot - 16;  // sums are in the order comb, pre, post
      raw[i] = __ldg(at<const float4>(fn, (output * 4 + stream) * (HIDDEN / 4) + chunk * (CHUNK / 4) + item % 8));
    }
  };
  fetch(first);
#pragma unroll 1
  for (int c = 0; c < INNER; ++c) {
    const int buffer = c % T::BUFFERS;
    if (c >= T::BUFFERS) hopper::barrier_wait(empty + buffer, (c / T::BUFFERS - 1) & 1);
    const int thread = hopper::opaque(threadIdx.x % 128);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int item = i * 128 + thread, slot = item / 8 % 24, stream = item / 192, t = item % 2, q = item / 2 % 4;
      uint32_t left[3], right[3];
      split_pair(raw[i].x, raw[i].y, left);
      split_pair(raw[i].z, raw[i].w, right);
      uint8_t* const to = shared + buffer * T::WEIGHTS + stream / 2 * T::TENSOR + 4 * q;
      const int piece = stream % 2 * 4 + 2 * t;
#pragma unroll
      for (int p = 0; p < 3; ++p) {
        *reinterpret_cast<uint32_t*>(to + hopper::swizzle_128(p * 24 + slot, piece)) = left[p];
        *reinterpret_cast<uint32_t*>(to + hopper::swizzle_128(p * 24 + slot, piece + 1)) = right[p];
      }
    }
    if (c + 1 < INNER) fetch(first + c + 1);
    hopper::fence_async();
    hopper::barrier_arrive(full + buffer);
  }
}

// One tile: 64 GROUPS rows, INNER chunks of all streams from blockIdx.y * INNER on. Writes the new streams and the
// collapsed rows (EXPAND), and for each row 24 products with the weights and the sum of squares.
//
// A warp has 16 rows, and copies its own bytes ahead: whole lines of 128 bytes, eight lanes a row. Then a thread takes
// two rows and eight columns of a chunk, which are what the tensor cores want of it. Warps share nothing but the weights.
template <int HIDDEN, int GROUPS, int INNER, int SUB, bool EXPAND>
__device__ __forceinline__ void streams(int64_t y, int64_t y_stride, int64_t x, int64_t post, int64_t comb, int64_t pre,
                                        int64_t fn, void* out, int64_t h, int64_t partial, int count, void* memory) {
  using T = Tile<GROUPS, INNER, EXPAND>;
  static_assert(INNER == 1 || INNER % SUB == 0);
  uint8_t* const shared = static_cast<uint8_t*>(memory);
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared + T::BARRIERS);
  uint64_t* const empty = full + T::BUFFERS;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < T::BUFFERS; ++i) {
      hopper::barrier_init(full + i, 128);
      hopper::barrier_init(empty + i, T::WARPS);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  const int first = blockIdx.y * INNER, role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (role == 0) {
    if constexpr (GROUPS > 1) hopper::registers_shrink<56>();
    split_weights<HIDDEN, T, INNER>(fn, first, shared, full, empty);
    return;
  }
  if constexpr (GROUPS > 1) hopper::registers_grow<224>();

  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, group = lane / 4;
  const int base = blockIdx.x * (64 * GROUPS) + warp * 16;
  uint8_t* const own = shared + T::DATA + warp * (T::STAGES * T::STAGE);
  // For copies: row lane / 8 of four, 16 bytes lane % 8 of a line. Lines of odd rows have their halves swapped.
  const int line = lane / 8, piece = lane % 8, place = line * 128 + (piece ^ line % 2 * 4) * 16;
  const auto fetch = [&](int span) {
    const int column = (first + 2 * span) * CHUNK + piece * 8;
    if (2 * span + 1 < INNER || piece < 4)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = min(base + 4 * i + line, count - 1);
        uint8_t* const to = own + span % T::STAGES * T::STAGE + i * 512 + place;
        const int64_t from = x + (row * (4 * HIDDEN) + column) * 2;
#pragma unroll
        for (int s = 0; s < 4; ++s)
          if constexpr (INNER > SUB)
            hopper::copy_16(to + s * 2048, at<const uint8_t>(from, s * HIDDEN * 2), true);
          else
            hopper::copy_16_ahead(to + s * 2048, at<const uint8_t>(from, s * HIDDEN * 2));
        if constexpr (EXPAND) hopper::copy_16_ahead(to + 8192, at<const uint16_t>(y, row * y_stride + column));
      }
  };
#pragma unroll
  for (int i = 0; i < T::STAGES; ++i) {
    fetch(i);
    hopper::copy_commit();
  }

  float mix[2][16], given[2][4], taken[2][4];
  if constexpr (EXPAND) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = min(base + group + 8 * r, count - 1);
#pragma unroll
      for (int s = 0; s < 4; ++s) load_4(comb, row * 4 + s, &mix[r][4 * s]);
      load_4(post, row, given[r]);
      load_4(pre, row, taken[r]);
    }
  }
  float total[3][4] = {}, sum[3][4] = {}, squares[2] = {}, square[2] = {};
#pragma unroll 1
  for (int c = 0; c < INNER; ++c) {
    const int span = c / 2;
    if (c % 2 == 0) {
      hopper::copy_wait<T::STAGES - 1>();
      __syncwarp();
    }
    const uint8_t* const from = own + span % T::STAGES * T::STAGE + group * 128 + ((c % 2 ^ group % 2) * 4 + lane % 4) * 16;
    uint32_t a[4][8];  // of a stream: four words of the first row, four of the second
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const uint4 v = *reinterpret_cast<const uint4*>(from + s * 2048 + r * 1024);
        a[s][4 * r] = v.x, a[s][4 * r + 1] = v.y, a[s][4 * r + 2] = v.z, a[s][4 * r + 3] = v.w;
      }
      if constexpr (EXPAND) {
        const uint4 v = *reinterpret_cast<const uint4*>(from + 8192 + r * 1024);
        const uint32_t added[4] = {v.x, v.y, v.z, v.w};
        uint32_t collapsed[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          uint32_t words[4] = {a[0][4 * r + w], a[1][4 * r + w], a[2][4 * r + w], a[3][4 * r + w]};
          collapsed[w] = expand_pair(mix[r], given[r], taken[r], added[w], words);
#pragma unroll
          for (int k = 0; k < 4; ++k) a[k][4 * r + w] = words[k];
        }
        const int64_t row = base + group + 8 * r, column = (first + c) * CHUNK + lane % 4 * 8;
        if (row < count) {
#pragma unroll
          for (int k = 0; k < 4; ++k)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + (row * 4 + k) * HIDDEN + column) =
                make_uint4(a[k][4 * r], a[k][4 * r + 1], a[k][4 * r + 2], a[k][4 * r + 3]);
          *at<uint4>(h, (row * HIDDEN + column) / 8) = make_uint4(collapsed[0], collapsed[1], collapsed[2], collapsed[3]);
        }
      }
    }

    float products[36];
#pragma unroll
    for (int i = 0; i < 36; ++i) products[i] = 0;
    const int buffer = c % T::BUFFERS;
    hopper::barrier_wait(full + buffer, c / T::BUFFERS & 1);
    const uint64_t tensor = hopper::tile_descriptor(hopper::smem_address(shared + buffer * T::WEIGHTS));
    hopper::wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint32_t left[4] = {a[s][0], a[s][4], a[s][1], a[s][5]};
      const uint32_t right[4] = {a[s][2], a[s][6], a[s][3], a[s][7]};
      const uint64_t weights = tensor + (s / 2 * T::TENSOR + s % 2 * 64) / 16;
      hopper::wgmma_bf16_rs(products, left, weights, 1);
      hopper::wgmma_bf16_rs(products, right, weights + 2, 1);
    }
    hopper::wgmma_commit();
    float size[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float v0 = __uint_as_float(a[s][4 * r + w] << 16), v1 = __uint_as_float(a[s][4 * r + w] & 0xFFFF0000u);
          size[r] = __fmaf_rn(v1, v1, __fmaf_rn(v0, v0, size[r]));
        }
      size[r] += __shfl_xor_sync(~0u, size[r], 1);
      size[r] += __shfl_xor_sync(~0u, size[r], 2);
      square[r] += size[r];
    }
    hopper::wgmma_wait<0>();
    hopper::keep(products);
    if (lane == 0) hopper::barrier_arrive(empty + buffer);
    // The parts of a weight, the smallest first.
#pragma unroll
    for (int n = 0; n < 3; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum[n][i] += (products[24 + 4 * n + i] + products[12 + 4 * n + i]) + products[4 * n + i];
    if (INNER > SUB && (c + 1) % SUB == 0) {
#pragma unroll
      for (int n = 0; n < 3; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[n][i] += sum[n][i], sum[n][i] = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) squares[r] += square[r], square[r] = 0;
    }

    if (c % 2 == 1 || c + 1 == INNER) {
      __syncwarp();
      if (2 * (span + T::STAGES) < INNER) fetch(span + T::STAGES);
      hopper::copy_commit();
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t row = base + group + 8 * r;
    if (row < count) {
      float* const to = at<float>(partial, (static_cast<int64_t>(blockIdx.y) * count + row) * WIDTH);
#pragma unroll
      for (int n = 0; n < 3; ++n)
        *reinterpret_cast<float2*>(to + n * 8 + lane % 4 * 2) =
            INNER > SUB ? make_float2(total[n][2 * r], total[n][2 * r + 1]) : make_float2(sum[n][2 * r], sum[n][2 * r + 1]);
      if (lane % 4 == 0) to[24] = INNER > SUB ? squares[r] : square[r];
    }
  }
}

__device__ __forceinline__ float inverse(float x) { return __fdiv_rn(1.0f, x); }
__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float sum_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }
__device__ __forceinline__ float4 times(float4 v, float by) { return make_float4(v.x * by, v.y * by, v.z * by, v.w * by); }
// Every column by its sum over the four lanes that hold the rows. The quick reciprocal (one unit): of forty in a row,
// each waits for the one before.
__device__ __forceinline__ float4 by_columns(float4 v, float eps) {
  float* const c = &v.x;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float sum = c[k] + __shfl_xor_sync(~0u, c[k], 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    c[k] *= __fdividef(1.0f, sum + eps);
  }
  return v;
}

// Coefficients of TOKENS tokens, from GROUPS x SUBS x PER parts of their sums; at most a warp has the matrices, a row
// a lane.
template <int HIDDEN, int GROUPS, int SUBS, int PER, int TOKENS>
__device__ __forceinline__ void coefficients(int64_t partial, int64_t base, int64_t scale, float norm_eps, float eps,
                                             int iters, void* pre, int64_t post, int64_t comb, int count, void* memory) {
  static_assert(TOKENS <= 8);
  float4* const sums = static_cast<float4*>(memory);
  const int first = blockIdx.x * TOKENS;
  for (int item = threadIdx.x; item < TOKENS * GROUPS * SUBS * 8; item += blockDim.x) {
    const int part = item / 8 % (GROUPS * SUBS) * PER, row = min(first + item / (GROUPS * SUBS * 8), count - 1);
    float4 sum = make_float4(0, 0, 0, 0);
    if (item % 8 < 7)
#pragma unroll
      for (int i = 0; i < PER; ++i)
        sum = plus(sum, *at<const float4>(partial, ((part + i) * static_cast<int64_t>(count) + row) * (WIDTH / 4) + item % 8));
    sums[item] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x % 4, token = threadIdx.x / 4;
  const int64_t row = first + token;
  const float4* from = sums + min(token, TOKENS - 1) * (GROUPS * SUBS * 8) + lane;
  float4 m = make_float4(0, 0, 0, 0), v = m;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    float4 mg = make_float4(0, 0, 0, 0), vg = mg;
#pragma unroll
    for (int s = 0; s < SUBS; ++s, from += 8) mg = plus(mg, from[0]), vg = plus(vg, from[4]);
    m = plus(m, mg), v = plus(v, vg);
  }
  const float square = __shfl_sync(~0u, v.x, 2, 4);  // lane 0 has the products of pre, lane 1 of post
  const float unit = inverse(__fsqrt_rn(square / (4 * HIDDEN) + norm_eps));
  const float* const factor = at<const float>(scale, 0);
  const float* const bias = at<const float>(base, 0);
  float z[4] = {v.x, v.y, v.z, v.w}, c[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    z[k] = inverse(1.0f + expf(-(z[k] * unit * factor[lane % 2] + bias[lane % 2 * 4 + k])));
    c[k] = c[k] * unit * factor[2] + bias[8 + lane * 4 + k];
  }
  // The maximum drops a NaN, which spoils its row through the sum all the same.
  const float largest = fmaxf(fmaxf(c[0], c[1]), fmaxf(c[2], c[3]));
#pragma unroll
  for (int k = 0; k < 4; ++k) c[k] = expf(c[k] - largest);
  float4 mix = make_float4(c[0], c[1], c[2], c[3]);
  mix = times(mix, __fdividef(1.0f, sum_of(mix)));
  mix = by_columns(plus(mix, make_float4(eps, eps, eps, eps)), eps);
  for (int i = 1; i < iters; ++i) {
    mix = times(mix, __fdividef(1.0f, sum_of(mix) + eps));
    mix = by_columns(mix, eps);
  }
  if (token < TOKENS && row < count) {
    if (lane == 0)
      reinterpret_cast<float4*>(pre)[row] = plus(make_float4(z[0], z[1], z[2], z[3]), make_float4(eps, eps, eps, eps));
    else if (lane == 1)
      *at<float4>(post, row) = times(make_float4(z[0], z[1], z[2], z[3]), 2.0f);
    *at<float4>(comb, row * 4 + lane) = mix;
  }
}

// All that follows the pass over the streams: the first blocks make coefficients, the others norm a row (NORM) and
// quantise it, where the collapsed one was.
template <int HIDDEN, int WARPS, int GROUPS, int SUBS, int PER, int TOKENS, bool NORM>
__device__ __forceinline__ void finish(int64_t partial, int64_t base, int64_t scale, float norm_eps, float eps, int iters,
                                       void* pre, int64_t post, int64_t comb, int count, int64_t norm, int64_t weight,
                                       float floor, int64_t values, int64_t codes, void* memory) {
  const int mixing = (count + TOKENS - 1) / TOKENS;
  if (!NORM || static_cast<int>(blockIdx.x) < mixing)
    coefficients<HIDDEN, GROUPS, SUBS, PER, TOKENS>(partial, base, scale, norm_eps, eps, iters, pre, post, comb, count, memory);
  else
    norm_rope::rms_norm<HIDDEN, WARPS, true>(norm, HIDDEN, weight, count, norm_eps, norm, HIDDEN, floor,
                                             reinterpret_cast<void*>(values), HIDDEN, codes, HIDDEN / 32, memory, mixing);
}

// Without the mixes: a block expands a row, collapses, norms and quantises it (`norm_rope::Place`).
template <int HIDDEN, int WARPS, bool SPREAD>
__device__ __forceinline__ void cross(int64_t y, int64_t y_stride, int64_t x, int64_t post, int64_t comb, int64_t pre,
                                      void* out, int count, int64_t weight, float eps, float floor, int64_t norm,
                                      int64_t values, int64_t codes, void* memory) {
  const norm_rope::Place<HIDDEN, WARPS, SPREAD> place(count, 0);
  const int64_t row = place.row;
  float mix[16], given[4], taken[4];
  uint4 old[place.TURNS][4], raw[place.TURNS];  // all of them before the first store: `out` may be `x`
#pragma unroll
  for (int i = 0; i < place.TURNS; ++i) {
#pragma unroll
    for (int s = 0; s < 4; ++s) old[i][s] = *at<const uint4>(x, (row * 4 + s) * (HIDDEN / 8) + place.chunk(i));
    raw[i] = *at<const uint4>(y + row * y_stride * 2, place.chunk(i));
  }
#pragma unroll
  for (int s = 0; s < 4; ++s) load_4(comb, row * 4 + s, &mix[4 * s]);
  load_4(post, row, given);
  load_4(pre, row, taken);
#pragma unroll
  for (int i = 0; i < place.TURNS; ++i) {
    uint32_t* const y_words = &raw[i].x;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t words[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) words[s] = (&old[i][s].x)[w];
      y_words[w] = expand_pair(mix, given, taken, y_words[w], words);
#pragma unroll
      for (int s = 0; s < 4; ++s) (&old[i][s].x)[w] = words[s];
    }
    if (place.valid(i))
#pragma unroll
      for (int s = 0; s < 4; ++s) static_cast<uint4*>(out)[(row * 4 + s) * (HIDDEN / 8) + place.chunk(i)] = old[i][s];
  }
  norm_rope::norm_row<true>(place, raw, weight, eps, norm, HIDDEN, floor, reinterpret_cast<void*>(values),
                                           HIDDEN, codes, HIDDEN / 32, memory);
}

}  // namespace mhc
