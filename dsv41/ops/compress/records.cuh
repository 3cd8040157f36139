// Cache records: rows normalised, rotated, quantised and stored by one warp each; records copied; and the pairs of
// the compressor. After quantize.cuh.
#pragma once

namespace records {

enum Layout { kMXFP8, kNVFP4, kMXFP4, kV4, kFP8, kBF16 };
constexpr float kFloor8 = 1e-4f, kFloorNV = 0.01171875f;      // 6 * 2^-9
constexpr float kFloor4 = 7.052966104933725e-38f;              // 6 * 2^-126

template <int LAYOUT, int DIM>
struct Record {
  static constexpr int values = LAYOUT == kMXFP8 || LAYOUT == kFP8 ? DIM
                                : LAYOUT == kV4                    ? DIM + 64
                                : LAYOUT == kBF16                  ? 2 * DIM
                                                                   : DIM / 2;
  static constexpr int scales = LAYOUT == kMXFP8 || LAYOUT == kMXFP4 ? DIM / 32
                                : LAYOUT == kNVFP4                   ? DIM / 16
                                : LAYOUT == kV4                      ? 8
                                : LAYOUT == kFP8                     ? 4
                                                                     : 0;
  static constexpr bool split = LAYOUT == kMXFP4 || LAYOUT == kV4 || LAYOUT == kFP8;
};

// A lane has the chunks of eight values lane, lane + 32, ...; rows shorter than a warp leave lanes idle.
template <int LAYOUT, int DIM, bool NORM, bool ROUND, int PAIRS>
__device__ __forceinline__ void write(const void* x_, int64_t x_stride, const void* weight, float eps, const void* cos_,
                                      const void* sin_, int64_t cos_stride, int64_t sin_stride, const void* slots,
                                      int count, void* pages, int64_t page_stride, int page_size, int num_pages) {
  using R = Record<LAYOUT, DIM>;
  constexpr int CHUNKS = DIM / 8, TURNS = (CHUNKS + 31) / 32, FIRST = CHUNKS - PAIRS / 4;
  const int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= count) return;
  const int slot = static_cast<const int*>(slots)[row];
  if (slot < 0 || slot >= static_cast<int64_t>(page_size) * num_pages) return;
  const uint16_t* x = static_cast<const uint16_t*>(x_) + row * x_stride;
  float v[TURNS][8];
  uint32_t words[4];
  int chunk[TURNS];
  bool valid[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    valid[i] = lane + 32 * i < CHUNKS;
    chunk[i] = valid[i] ? lane + 32 * i : CHUNKS - 1;
    quantize::load_8<true>(x, chunk[i] * 8, v[i]);
  }
  if constexpr (NORM) {
    float sum = 0;  // in the order of norm_rope.cuh
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      float part = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) part = __fmaf_rn(v[i][j], v[i][j], part);
      if (valid[i]) sum += part;
    }
#pragma unroll
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const float size = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(DIM)), eps)));
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      float w[8];
      quantize::load_8<true>(weight, chunk[i] * 8, w);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(w[j], __fmul_rn(v[i][j], size));
      quantize::round_8(v[i], words);
    }
  }
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    if (chunk[i] < FIRST) continue;
    const float* cos = static_cast<const float*>(cos_) + row * cos_stride + (chunk[i] - FIRST) * 4;
    const float* sin = static_cast<const float*>(sin_) + row * sin_stride + (chunk[i] - FIRST) * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float a = v[i][2 * j], b = v[i][2 * j + 1], c = cos[j], s = sin[j];
      v[i][2 * j] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
      v[i][2 * j + 1] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    }
    if constexpr (ROUND) quantize::round_8(v[i], words);
  }
  const int page = slot / page_size, offset = slot % page_size;
  uint8_t* base = static_cast<uint8_t*>(pages) + page * page_stride;
  uint8_t* values = base + offset * (R::split ? R::values : R::values + R::scales);
  uint8_t* scales = R::split ? base + static_cast<int64_t>(page_size) * R::values + offset * R::scales : values + R::values;
  [[maybe_unused]] float most = kFloor8;
  if constexpr (LAYOUT == kFP8) {
#pragma unroll
    for (int i = 0; i < TURNS; ++i) most = fmaxf(most, quantize::block_max<32>(v[i], kFloor8));
  }
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    int code;
    if constexpr (LAYOUT == kMXFP8) {
      const uint2 q = quantize::mxfp8_8(v[i], kFloor8, code);
      if (valid[i]) reinterpret_cast<uint2*>(values)[chunk[i]] = q;
      if (valid[i] && chunk[i] % 4 == 0) scales[chunk[i] / 4] = static_cast<uint8_t>(code);
    } else if constexpr (LAYOUT == kMXFP4) {
      const uint32_t q = quantize::mxfp4_8(v[i], kFloor4, code);
      if (valid[i]) reinterpret_cast<uint32_t*>(values)[chunk[i]] = q;
      if (valid[i] && chunk[i] % 4 == 0) scales[chunk[i] / 4] = static_cast<uint8_t>(code);
    } else if constexpr (LAYOUT == kNVFP4) {
      const uint32_t q = quantize::nvfp4_8(v[i], kFloorNV, code);
      if (valid[i]) reinterpret_cast<uint32_t*>(values)[chunk[i]] = q;
      if (valid[i] && chunk[i] % 2 == 0) scales[chunk[i] / 2] = static_cast<uint8_t>(code);
    } else if constexpr (LAYOUT == kFP8) {
      code = quantize::scale_code<8>(most);
      const float factor = quantize::undo_scale(code);
      if (valid[i])
        reinterpret_cast<uint2*>(values)[chunk[i]] = make_uint2(quantize::e4m3_4(v[i], factor), quantize::e4m3_4(v[i] + 4, factor));
      if (valid[i] && chunk[i] == 0) *reinterpret_cast<uint32_t*>(scales) = static_cast<uint32_t>(code) << 23;
    } else if constexpr (LAYOUT == kV4) {
      code = quantize::scale_code<8>(quantize::block_max<8>(v[i], kFloor8));
      const float factor = quantize::undo_scale(code);
      if (chunk[i] < CHUNKS - 8) {
        if (valid[i])
          reinterpret_cast<uint2*>(values)[chunk[i]] = make_uint2(quantize::e4m3_4(v[i], factor), quantize::e4m3_4(v[i] + 4, factor));
        if (valid[i] && chunk[i] % 8 == 0) scales[chunk[i] / 8] = static_cast<uint8_t>(code);
      } else {
        quantize::round_8(v[i], words);
        uint2* rope = reinterpret_cast<uint2*>(values + DIM - 64) + 2 * (chunk[i] - (CHUNKS - 8));
        if (valid[i]) rope[0] = make_uint2(words[0], words[1]), rope[1] = make_uint2(words[2], words[3]);
        // The scales' padding: groups beyond the last are zero.
        if (valid[i] && chunk[i] - (CHUNKS - 8) < 8 - (DIM - 64) / 64) scales[(DIM - 64) / 64 + chunk[i] - (CHUNKS - 8)] = 0;
      }
    } else {
      quantize::round_8(v[i], words);
      if (valid[i]) reinterpret_cast<uint4*>(values)[chunk[i]] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// One warp a record; `bytes` is a multiple of 4, and of 16 where the addresses allow wide words.
__device__ __forceinline__ void copy(const void* source, int64_t source_stride, int source_size, int source_pages,
                                     const void* from_, const void* to_, int count, void* pages, int64_t page_stride,
                                     int page_size, int num_pages, int bytes) {
  const int lane = threadIdx.x % 32, i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (i >= count) return;
  const int from = static_cast<const int*>(from_)[i], to = static_cast<const int*>(to_)[i];
  if (from < 0 || to < 0 || from >= static_cast<int64_t>(source_size) * source_pages ||
      to >= static_cast<int64_t>(page_size) * num_pages)
    return;
  const uint8_t* a = static_cast<const uint8_t*>(source) + from / source_size * source_stride +
                     static_cast<int64_t>(from % source_size) * bytes;
  uint8_t* b = static_cast<uint8_t*>(pages) + to / page_size * page_stride + static_cast<int64_t>(to % page_size) * bytes;
  if ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | bytes) % 16 == 0) {
    for (int j = lane; j < bytes / 16; j += 32) reinterpret_cast<uint4*>(b)[j] = reinterpret_cast<const uint4*>(a)[j];
  } else {
    for (int j = lane; j < bytes; j += 32) b[j] = a[j];
  }
}

// Rows of one request are consecutive: the first and the last of the run that holds row t, by bisection.
__device__ __forceinline__ int run_end(const int* requests, int t, int count) {
  const int request = requests[t];
  int good = t, bad = count;
  for (int step = 1; t + step < count; step *= 2) {
    if (requests[t + step] != request) {
      bad = t + step;
      break;
    }
    good = t + step;
  }
  while (bad - good > 1) {
    const int middle = good + (bad - good) / 2;
    (requests[middle] == request ? good : bad) = middle;
  }
  return good;
}
__device__ __forceinline__ int run_begin(const int* requests, int t) {
  const int request = requests[t];
  int good = t, bad = -1;
  for (int step = 1; t - step >= 0; step *= 2) {
    if (requests[t - step] != request) {
      bad = t - step;
      break;
    }
    good = t - step;
  }
  while (good - bad > 1) {
    const int middle = good - (good - bad) / 2;
    (requests[middle] == request ? good : bad) = middle;
  }
  return good;
}

// One block a row, four channels a thread. The ring is read by the first row of a request only, and only when that
// row closes a pair; the one write of this call that would meet the read is left to that row.
__device__ __forceinline__ void pairs(const void* rows_, int64_t row_stride, const void* requests_, const void* positions_,
                                      int count, void* carry_, int64_t request_stride, int64_t slot_stride,
                                      int num_requests, int slots, void* out_, int64_t out_stride, int dim) {
  const float* rows = static_cast<const float*>(rows_);
  const int* requests = static_cast<const int*>(requests_);
  const int* positions = static_cast<const int*>(positions_);
  const int t = blockIdx.x, request = requests[t];
  uint16_t* out = static_cast<uint16_t*>(out_) + t * out_stride;
  const bool live = request >= 0 && request < num_requests;
  const int position = positions[t];
  const bool closing = live && position % 2 == 1, first = t == 0 || requests[t - 1] != request;
  float* carry = static_cast<float*>(carry_) + (live ? request : 0) * request_stride;
  // The ring slot that this call reads, if any, and the row that writes there.
  int writes = -1, after = -1;  // rows whose values this block stores
  if (live) {
    const int begin = first ? t : run_begin(requests, t);
    const bool reads = positions[begin] % 2 == 1;
    const int read_slot = (positions[begin] + slots - 1) % slots;
    if (t + slots >= count || requests[t + slots] != request) {
      if (!reads || position % slots != read_slot) writes = t;
    }
    if (first && closing) {
      const int last = run_end(requests, t, count);
      // Rows of that slot: t - 1 + slots * n; the last one within the run.
      const int n = (last - t + 1) / slots;
      if (n > 0) after = t - 1 + slots * n;
    }
  }
  for (int c = threadIdx.x * 4; c < dim; c += blockDim.x * 4) {
    uint2 pooled = make_uint2(0, 0);
    if (closing) {
      const float* a = first ? carry + (position - 1) % slots * slot_stride : rows + (t - 1) * row_stride;
      const float* b = rows + t * row_stride;
      const float4 kv0 = *reinterpret_cast<const float4*>(a + c), gate0 = *reinterpret_cast<const float4*>(a + dim + c);
      const float4 kv1 = *reinterpret_cast<const float4*>(b + c), gate1 = *reinterpret_cast<const float4*>(b + dim + c);
      const float k0[4] = {kv0.x, kv0.y, kv0.z, kv0.w}, g0[4] = {gate0.x, gate0.y, gate0.z, gate0.w};
      const float k1[4] = {kv1.x, kv1.y, kv1.z, kv1.w}, g1[4] = {gate1.x, gate1.y, gate1.z, gate1.w};
      uint32_t bits[4];
      for (int i = 0; i < 4; ++i) {
        const float top = g0[i] != g0[i] || g1[i] != g1[i] ? g0[i] + g1[i] : fmaxf(g0[i], g1[i]);
        const float e0 = expf(__fsub_rn(g0[i], top)), e1 = expf(__fsub_rn(g1[i], top));
        const float sum = __fadd_rn(__fmul_rn(e0, k0[i]), __fmul_rn(e1, k1[i]));
        bits[i] = __bfloat16_as_ushort(__float2bfloat16_rn(__fdiv_rn(sum, __fadd_rn(e0, e1))));
      }
      pooled = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    }
    *reinterpret_cast<uint2*>(out + c) = pooled;
    for (int part = 0; part < 2; ++part) {
      const int at = part * dim + c;
      if (writes >= 0)
        *reinterpret_cast<float4*>(carry + position % slots * slot_stride + at) =
            *reinterpret_cast<const float4*>(rows + t * row_stride + at);
      if (after >= 0)
        *reinterpret_cast<float4*>(carry + (position - 1) % slots * slot_stride + at) =
            *reinterpret_cast<const float4*>(rows + after * row_stride + at);
    }
  }
}

}  // namespace records
