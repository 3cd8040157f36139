// block_linear on the FP8 tensor cores: out[token, feature] = sum_k x[token, k] w[feature, k], both E4M3 in the
// checkpoint's layout, with power-of-two scales applied outside.
//
// One wgmma covers the 32 k of one scale (PROMOTE = 1) or 128 k (PROMOTE = 4, weights folded to 128 x 128 tiles);
// its sums go into f32 accumulators with the product of the two scales, so nothing is decoded and no scale is
// approximated. The tensor cores align the 32 products to 13 bits behind the largest one before they add them.
// Tokens are the A operand: a thread has two tokens and few scales. One thread runs the copy engine, two or three
// consumer groups multiply; each accumulates MB x 64 tokens x COLUMNS features. The order of a sum depends on K
// and the number of blocks in a cluster only.
#pragma once

namespace blocks {

constexpr int BLOCK_K = 128;

// WM x WN consumer groups; UNIT: features of one wgmma.
template <int WM, int WN, int MB, int BN, int UNIT, int PROMOTE>
struct Shape {
  static constexpr int GROUPS = WM * WN, THREADS = 128 + 128 * GROUPS;
  static_assert((GROUPS == 2 || GROUPS == 3) && 4 % PROMOTE == 0);
  static constexpr int BM = 64 * MB * WM, COLUMNS = BN / WN, UNITS = COLUMNS / UNIT;
  // Products in flight, as registers allow: each takes long, above all with few rows.
  static constexpr int BUFFERS = UNIT > 64 ? 1 : GROUPS == 3 ? 2 : MB * COLUMNS + 4 * UNIT <= 384 ? 4 : 2;
  static constexpr int WMS = WM, MBS = MB, BNS = BN, UNITN = UNIT, STEPS = 4 / PROMOTE, PER_STEP = PROMOTE;
  static constexpr int TILE = 128 / STEPS;  // features and k that share a scale
  // A stage: tokens, weights, and the scale codes of both, a word a row (PROMOTE = 1).
  static constexpr int COPIED = (BM + BN) * BLOCK_K, WORDS = PROMOTE == 1 ? BM + BN / 32 : 0;
  static constexpr int STAGE = COPIED + (4 * WORDS + 1023) / 1024 * 1024;
  static constexpr int FIT = (232448 - 256) / STAGE, STAGES = FIT < 12 ? FIT : 12;
  static constexpr int BYTES = STAGES * STAGE + 256;
  static constexpr int EARLY = 2;  // stages whose weights are asked for before the launch in front has ended
  // Registers of a producer and of a consumer thread: no more than the block has, or it waits for ever.
  static constexpr int PRODUCER = GROUPS == 2 ? 40 : 32, CONSUMER = GROUPS == 2 ? 232 : 160;
  static_assert(128 * PRODUCER + 128 * GROUPS * CONSUMER <= 65536 / THREADS / 8 * 8 * THREADS);
};

struct Tile {
  int row, column, split;
};

// Tiles in groups of 16 blocks of tokens, so that those that run at once share tokens and weights in the L2.
template <class S>
__device__ __forceinline__ Tile tile_of(int work, int tokens, int features, int splits) {
  int split = work % splits, tile = work / splits;
  int columns = (features + S::BNS - 1) / S::BNS, rows = (tokens + S::BM - 1) / S::BM;
  int group = tile / (16 * columns), in_group = tile - group * 16 * columns;
  int height = min(16, rows - 16 * group), column = in_group / height;
  return {(16 * group + in_group - column * height) * S::BM, column * S::BNS, split};
}

// Byte `index` of `codes` as 2^(code - 127); code 0 counts as 0 and 255 as infinity.
__device__ __forceinline__ float power(uint32_t codes, int index) {
  return __uint_as_float((index == 0 ? codes << 23 : codes >> (8 * index) << 23) & 0x7F800000u);
}

template <int N>
struct Count {
  static constexpr int VALUE = N;
};

// Where a warp group stands in the ring of stages.
struct Ring {
  int stage;
  uint32_t phase;
  template <int STAGES>
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

template <class S>
__device__ __forceinline__ uint8_t* tokens_at(uint8_t* shared, int stage) { return shared + stage * S::STAGE; }
template <class S>
__device__ __forceinline__ uint64_t* full_at(uint8_t* shared, int stage) {
  return reinterpret_cast<uint64_t*>(shared + S::STAGES * S::STAGE) + stage;
}
template <class S>
__device__ __forceinline__ uint64_t* empty_at(uint8_t* shared, int stage) { return full_at<S>(shared, stage) + 12; }

// The scale codes of a stage's rows of tokens and, from BM on, of its tiles of weights.
template <class S>
__device__ __forceinline__ uint32_t* codes_at(uint8_t* shared, int stage) {
  return reinterpret_cast<uint32_t*>(shared + stage * S::STAGE + S::COPIED);
}

__device__ __forceinline__ uint32_t pair_bf16(float low, float high) {
  return static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
         static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

// p[j] of the four lanes of a quad to p[lane] of each: a lane then has 16 bytes in a row.
__device__ __forceinline__ uint4 transpose_quad(const uint32_t (&p)[4], int lane) {
  bool odd = lane & 1, high = lane & 2;
  uint32_t r0 = __shfl_xor_sync(0xFFFFFFFFu, odd ? p[0] : p[1], 1);
  uint32_t r1 = __shfl_xor_sync(0xFFFFFFFFu, odd ? p[2] : p[3], 1);
  uint32_t a0 = odd ? r0 : p[0], a1 = odd ? p[1] : r0, b0 = odd ? r1 : p[2], b1 = odd ? p[3] : r1;
  r0 = __shfl_xor_sync(0xFFFFFFFFu, high ? a0 : b0, 2);
  r1 = __shfl_xor_sync(0xFFFFFFFFu, high ? a1 : b1, 2);
  return high ? make_uint4(r0, r1, b0, b1) : make_uint4(a0, a1, r0, r1);
}

// Adds the sums of all blocks of a cluster in order, in memory that none of them uses any more: block `rank` those of a
// share of each thread's pieces, which give(piece) tells and take(piece, sums) takes.
template <int CLUSTER, int PIECES, class Give, class Take>
__device__ __forceinline__ void add_in_cluster(uint8_t* shared, int rank, int thread, int threads, const Give& give,
                                               const Take& take) {
  constexpr int EACH = (PIECES + CLUSTER - 1) / CLUSTER;
  float4* sums = reinterpret_cast<float4*>(shared) + thread;
  hopper::cluster_barrier();  // all have multiplied
#pragma unroll
  for (int j = 0; j < PIECES; ++j)
    hopper::cluster_store(hopper::cluster_address(sums + (rank * EACH + j % EACH) * threads, j / EACH), give(j));
  hopper::cluster_barrier();  // all sums are there
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    if (rank * EACH + e >= PIECES) break;
    float4 sum = sums[e * threads];
#pragma unroll
    for (int r = 1; r < CLUSTER; ++r) {
      float4 more = sums[(r * EACH + e) * threads];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    take(rank * EACH + e, sum);
  }
}

// x [tokens, K] and x_scale [tokens, K / TILE]; w [features, K] and w_scale [features / TILE, K / TILE]; `out` [tokens,
// features]. CLUSTER blocks share K and one tile, and add their sums; alone, a block goes on from tile to tile.
template <int WM, int WN, int MB, int BN, int UNIT, int PROMOTE, int CLUSTER, class Map>
__device__ __forceinline__ void linear(const Map& x, const uint8_t* x_scale, const Map& w, const uint8_t* w_scale,
                                       int tokens, int features, int K, void* out, uint8_t* shared) {
  using S = Shape<WM, WN, MB, BN, UNIT, PROMOTE>;
  // The shuffle tells the compiler that a warp has one role, so that addresses can be scalars.
  int role = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127, blocks_k = K / BLOCK_K;
  int total = (features + BN - 1) / BN * ((tokens + S::BM - 1) / S::BM) * CLUSTER, groups = K / S::TILE;
  constexpr bool CARRIED = S::WORDS > 0;  // scale codes come in the stages, copied by 96 threads
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::STAGES; ++i) {
      hopper::barrier_init(full_at<S>(shared, i), CARRIED ? 97 : 1);
      hopper::barrier_init(empty_at<S>(shared, i), 4 * S::GROUPS);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  Ring ring{0, 0};

  if (role == 0) {
    hopper::registers_shrink<S::PRODUCER>();
    if (thread == 0) {
      // Weights of the first stages, which no launch in front of this one writes.
      int ahead = 0;
      if (blockIdx.x < total) {
        Tile tile = tile_of<S>(blockIdx.x, tokens, features, CLUSTER);
        int begin = tile.split * blocks_k / CLUSTER, end = (tile.split + 1) * blocks_k / CLUSTER;
        for (ahead = min(end - begin, S::EARLY); ring.stage < ahead; ++ring.stage) {
          hopper::barrier_expect(full_at<S>(shared, ring.stage), S::COPIED);
          hopper::tile_copy(tokens_at<S>(shared, ring.stage) + S::BM * 128, w, (begin + ring.stage) * 128, tile.column,
                            full_at<S>(shared, ring.stage));
        }
        ring.stage = 0;
      }
      hopper::wait_for_launch();
      hopper::let_next_launch();
      for (int work = blockIdx.x; work < total; work += gridDim.x) {
        Tile tile = tile_of<S>(work, tokens, features, CLUSTER);
        int begin = tile.split * blocks_k / CLUSTER, end = (tile.split + 1) * blocks_k / CLUSTER;
        for (int k = begin; k < end; ++k) {
          uint64_t* full = full_at<S>(shared, ring.stage);
          uint8_t* to = tokens_at<S>(shared, ring.stage);
          if (--ahead < 0) {
            hopper::barrier_wait(empty_at<S>(shared, ring.stage), ring.phase ^ 1);
            hopper::barrier_expect(full, S::COPIED);
            hopper::tile_copy(to + S::BM * 128, w, k * 128, tile.column, full);
          }
          hopper::tile_copy(to, x, k * 128, tile.row, full);
          ring.template next<S::STAGES>();
        }
      }
    }
    if constexpr (CARRIED) {
      if (thread < 32) return;
      hopper::wait_for_launch();
      for (int work = blockIdx.x; work < total; work += gridDim.x) {
        Tile tile = tile_of<S>(work, tokens, features, CLUSTER);
        int begin = tile.split * blocks_k / CLUSTER, end = (tile.split + 1) * blocks_k / CLUSTER;
        constexpr int COUNT = (S::WORDS + 95) / 96;
        const uint8_t* from[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          int word = thread - 32 + 96 * i;
          int row = min(tile.row + word, tokens - 1), at = min(tile.column / 32 + word - S::BM, (features + 31) / 32 - 1);
          from[i] = (word < S::BM ? x_scale + static_cast<int64_t>(row) * groups : w_scale + static_cast<int64_t>(at) * groups) + 4 * begin;
        }
        for (int k = begin; k < end; ++k) {
          hopper::barrier_wait(empty_at<S>(shared, ring.stage), ring.phase ^ 1);
#pragma unroll
          for (int i = 0; i < COUNT; ++i) {
            int word = thread - 32 + 96 * i;
            if (word < S::WORDS) hopper::copy_4(codes_at<S>(shared, ring.stage) + word, from[i] + 4 * (k - begin));
          }
          hopper::barrier_arrive_copies(full_at<S>(shared, ring.stage));
          ring.template next<S::STAGES>();
        }
      }
      hopper::copy_commit();
      hopper::copy_wait<0>();
    }
    return;
  }

  hopper::registers_grow<S::CONSUMER>();
  hopper::wait_for_launch();
  constexpr int ALL = S::STEPS * MB * S::UNITS, WIDE = UNIT / 8, SCALES = S::COLUMNS / S::TILE ? S::COLUMNS / S::TILE : 1;
  int m_group = WM == 1 ? 0 : role - 1, n_group = WM == 1 ? role - 1 : 0;
  int warp = thread >> 5, lane = thread & 31, row_in = m_group * MB * 64 + warp * 16 + (lane >> 2);
  for (int work = blockIdx.x; work < total; work += gridDim.x) {
    Tile tile = tile_of<S>(work, tokens, features, CLUSTER);
    int begin = tile.split * blocks_k / CLUSTER, end = (tile.split + 1) * blocks_k / CLUSTER;
    int column = tile.column + n_group * S::COLUMNS;
    int x_from[MB][2], w_from[SCALES];  // a step's scales are far below 2^31 bytes
    uint32_t x_codes[MB][2], w_codes[SCALES];
    if constexpr (!CARRIED) {
#pragma unroll
      for (int m = 0; m < MB; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int row = min(tile.row + row_in + m * 64 + h * 8, tokens - 1);
          x_from[m][h] = row * groups + begin;
          x_codes[m][h] = __ldg(x_scale + x_from[m][h]);
        }
#pragma unroll
      for (int i = 0; i < SCALES; ++i) {
        int at = min((column + i * S::TILE) / S::TILE, (features + S::TILE - 1) / S::TILE - 1);
        w_from[i] = at * groups + begin;
        w_codes[i] = __ldg(w_scale + w_from[i]);
      }
    }
    float acc[MB][S::UNITS][UNIT / 2] = {}, part[S::BUFFERS][UNIT / 2] = {};
    // COUNT blocks of k: while the products of one are added, those of the next run.
    auto multiply = [&](auto count, bool last) {
      constexpr int COUNT = decltype(count)::VALUE, PRODUCTS = COUNT * ALL;
      uint32_t xs[COUNT][MB][2], ws[COUNT][SCALES];
      uint64_t a[COUNT], b[COUNT];
      int stages[COUNT];
#pragma unroll
      for (int c = 0; c < COUNT; ++c) {
        stages[c] = ring.stage;
        if constexpr (!CARRIED) {
#pragma unroll
          for (int m = 0; m < MB; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) xs[c][m][h] = x_codes[m][h];
#pragma unroll
          for (int i = 0; i < SCALES; ++i) ws[c][i] = w_codes[i];
          if (!last) {  // the next block's codes arrive while this one is multiplied
#pragma unroll
            for (int m = 0; m < MB; ++m)
#pragma unroll
              for (int h = 0; h < 2; ++h) x_codes[m][h] = __ldg(x_scale + ++x_from[m][h]);
#pragma unroll
            for (int i = 0; i < SCALES; ++i) w_codes[i] = __ldg(w_scale + ++w_from[i]);
          }
        }
        hopper::barrier_wait(full_at<S>(shared, ring.stage), ring.phase);
        uint8_t* stage = tokens_at<S>(shared, ring.stage);
        a[c] = hopper::tile_descriptor(hopper::smem_address(stage + m_group * MB * 8192));
        b[c] = hopper::tile_descriptor(hopper::smem_address(stage + (S::BM + n_group * S::COLUMNS) * 128));
        if constexpr (CARRIED) {
          const uint32_t* code = codes_at<S>(shared, ring.stage);
#pragma unroll
          for (int m = 0; m < MB; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) xs[c][m][h] = code[row_in + m * 64 + h * 8];
#pragma unroll
          for (int i = 0; i < SCALES; ++i) ws[c][i] = code[S::BM + n_group * SCALES + i];
        }
        ring.template next<S::STAGES>();
      }
      // Product i: block i / ALL, step i / (MB * UNITS) of k, tokens m, features u; others run while it is added.
      auto issue = [&](int i) {
        int c = i / ALL, step = i % ALL / (MB * S::UNITS), m = i / S::UNITS % MB, u = i % S::UNITS;
        hopper::wgmma_fence();
#pragma unroll
        for (int p = 0; p < PROMOTE; ++p)
          hopper::wgmma_e4m3_ss(part[i % S::BUFFERS], a[c] + (m * 8192 + (step * PROMOTE + p) * 32) / 16,
                                b[c] + (u * UNIT * 128 + (step * PROMOTE + p) * 32) / 16, p > 0);
        hopper::wgmma_commit();
      };
#pragma unroll
      for (int i = 0; i < S::BUFFERS - 1 && i < PRODUCTS; ++i) issue(i);
#pragma unroll
      for (int i = 0; i < PRODUCTS; ++i) {
        if (i + S::BUFFERS - 1 < PRODUCTS) issue(i + S::BUFFERS - 1);
        int later = min(S::BUFFERS - 1, PRODUCTS - 1 - i);  // products that may still run
        if (later == 3) hopper::wgmma_wait<3>();
        if (later == 2) hopper::wgmma_wait<2>();
        if (later == 1) hopper::wgmma_wait<1>();
        if (later == 0) hopper::wgmma_wait<0>();
        if (i % ALL + 1 == ALL && lane == 0) hopper::barrier_arrive(empty_at<S>(shared, stages[i / ALL]));
        hopper::keep(part[i % S::BUFFERS]);
        int c = i / ALL, step = i % ALL / (MB * S::UNITS), m = i / S::UNITS % MB, u = i % S::UNITS;
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
          float scale = power(ws[c][(u * UNIT + 8 * j) / S::TILE], step);
          float low = power(xs[c][m][0], step) * scale, high = power(xs[c][m][1], step) * scale;
          float* sum = acc[m][u] + 4 * j;
          const float* more = part[i % S::BUFFERS] + 4 * j;
          sum[0] += more[0] * low, sum[1] += more[1] * low, sum[2] += more[2] * high, sum[3] += more[3] * high;
        }
      }
    };
    constexpr int COUNT = CARRIED ? 2 : 1;
    int k = begin;
#pragma unroll 1
    for (; k + COUNT <= end; k += COUNT) multiply(Count<COUNT>{}, k + COUNT == end);
    if constexpr (COUNT == 2)
      if (k < end) multiply(Count<1>{}, true);

    if constexpr (CLUSTER > 1) {
      auto give = [&](int j) {
        const float* sum = acc[j / WIDE / S::UNITS][j / WIDE % S::UNITS] + 4 * (j % WIDE);
        return make_float4(sum[0], sum[1], sum[2], sum[3]);
      };
      auto take = [&](int j, float4 sum) {
        int row = tile.row + row_in + j / WIDE / S::UNITS * 64;
        int at = column + j / WIDE % S::UNITS * UNIT + j % WIDE * 8 + 2 * (lane & 3);
        uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(out) + static_cast<int64_t>(row) * features + at);
        if (row < tokens && at < features) to[0] = pair_bf16(sum.x, sum.y);
        if (row + 8 < tokens && at < features) to[4 * features] = pair_bf16(sum.z, sum.w);
      };
      add_in_cluster<CLUSTER, MB * S::UNITS * WIDE>(shared, tile.split, threadIdx.x - 128, 128 * S::GROUPS, give, take);
      return;
    }
#pragma unroll
    for (int m = 0; m < MB; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int row = tile.row + row_in + m * 64 + h * 8;
#pragma unroll
        for (int u = 0; u < S::UNITS; ++u)
#pragma unroll
          for (int j = 0; j < WIDE; j += 4) {
            int at = column + u * UNIT + 8 * j;  // 32 features
            const float* sum = acc[m][u] + 4 * j + 2 * h;
            uint32_t p[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) p[c] = pair_bf16(sum[4 * c], sum[4 * c + 1]);
            uint4 words = transpose_quad(p, lane);
            if (row < tokens && at < features)
              *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(out) + static_cast<int64_t>(row) * features +
                                        at + 8 * (lane & 3)) = words;
          }
      }
  }
}

// out = the splits' sums, added in order; four features a thread.
__device__ __forceinline__ void reduce(const float* parts, int splits, int64_t count, void* out) {
  int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (4 * at >= count) return;
  float4 sum = __ldg(reinterpret_cast<const float4*>(parts) + at);
  for (int s = 1; s < splits; ++s) {
    float4 more = __ldg(reinterpret_cast<const float4*>(parts + s * count) + at);
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  static_cast<uint2*>(out)[at] = make_uint2(pair_bf16(sum.x, sum.y), pair_bf16(sum.z, sum.w));
}

// Two E4M3 values as halves, which is exact.
__device__ __forceinline__ __half2 halves(uint32_t two) {
  __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  __half2 out;
  memcpy(&out, &raw, 4);
  return out;
}

// Four E4M3 values times 2^(code - top), to nearest even. Halves hold them: what they round lies far below E4M3's
// smallest step.
__device__ __forceinline__ uint32_t fold(uint32_t word, int code, int top) {
  __half2 scale = __half2half2(__float2half(__uint_as_float(static_cast<uint32_t>(max(127 + code - top, 0)) << 23)));
  uint32_t out = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    __half2 v = __hmul2(halves(word >> 16 * i), scale);
    __half2_raw raw;
    memcpy(&raw, &v, 4);
    out |= static_cast<uint32_t>(__nv_cvt_halfraw2_to_fp8x2(raw, __NV_SATFINITE, __NV_E4M3)) << 16 * i;
  }
  return out;
}

// MXFP8 rows with a scale a 32 k to one a 128 k, the largest of the four; twice 16 values a thread.
__device__ __forceinline__ void coarsen(const uint8_t* x, const uint8_t* x_scale, int64_t count, uint8_t* values,
                                        uint8_t* scale) {
  int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x * 2 + threadIdx.x;
  uint4 v[2];
  uint32_t four[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // all loads first
    int64_t at = min(first + i * blockDim.x, count / 16 - 1);
    four[i] = __ldg(reinterpret_cast<const uint32_t*>(x_scale) + (at >> 3));
    v[i] = __ldg(reinterpret_cast<const uint4*>(x) + at);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int64_t at = first + i * blockDim.x;
    if (16 * at >= count) return;
    int top = max(max(four[i] & 0xFF, four[i] >> 8 & 0xFF), max(four[i] >> 16 & 0xFF, four[i] >> 24));
    int code = four[i] >> 8 * (at >> 1 & 3) & 0xFF;
    if (code != top)
      v[i] = make_uint4(fold(v[i].x, code, top), fold(v[i].y, code, top), fold(v[i].z, code, top), fold(v[i].w, code, top));
    reinterpret_cast<uint4*>(values)[at] = v[i];
    if ((at & 7) == 0) scale[at >> 3] = top;
  }
}

// MXFP8 rows to bf16, which is exact for codes 3 to 246; 16 values a thread. Of a block of 128 k, place
// 16 s + 8 h + 2 c + e gets k = 32 c + 4 s + 2 e + h: the order in which the product decodes its weights.
__device__ __forceinline__ void expand(const uint8_t* x, const uint8_t* x_scale, int64_t count, void* out) {
  int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (16 * at >= count) return;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(x) + (at >> 3) * 32 + (at & 7);
  uint32_t codes = __ldg(reinterpret_cast<const uint32_t*>(x_scale) + (at >> 3)), four[4], pairs[2][4];
#pragma unroll
  for (int c = 0; c < 4; ++c) four[c] = __ldg(words + 8 * c);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    uint32_t code = codes >> 8 * c & 0xFF;
    float scale = __uint_as_float(code == 0 ? 0x00400000u : code << 23);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      __half2 two = halves(__byte_perm(four[c], 0, h ? 0x4431 : 0x4420));
      pairs[h][c] = pair_bf16(__low2float(two) * scale, __high2float(two) * scale);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    static_cast<uint4*>(out)[2 * at + h] = make_uint4(pairs[h][0], pairs[h][1], pairs[h][2], pairs[h][3]);
}

}  // namespace blocks
