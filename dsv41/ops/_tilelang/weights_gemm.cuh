// Grouped GEMM whose weights are decoded in registers: out[token, feature] = sum_k w[feature, k] x[token, k].
//
// The weights are the A operand of wgmma and come from registers, decoded there from 4 or 8 bits (exact in
// bf16); the tokens are the B operand, bf16 in shared memory. So a tile of 8 tokens costs the tensor cores an
// eighth of a tile of 64 and the time of a decode step is the bytes of the weights. One producer warp group
// copies (weights with the copy engine, token rows with 16-byte gathers); four consumer warp groups multiply, 64
// features each. K_GROUPS = 1: a tile of 256 features, the least traffic of token rows. K_GROUPS = 2: 128 features,
// pairs of groups take turns at the blocks of k, so that there are more tiles. In one shape a token's sum has the same
// order whatever tile it is in.
//
// Packed weights: [expert][block of 128 features][block of 128 k][block of 64 features][bytes in the order the
// threads read them], see dsv41/ops/_tilelang/pack.py. Scale codes likewise, as exponents of bf16.
#pragma once

namespace gemm {

constexpr int BLOCK_K = 128;
// Two bf16 with the exponent field `byte index` of `codes`: the scale of one 1 x 32 block, twice.
__device__ __forceinline__ uint32_t scale_pair(uint32_t codes, int index) {
  return __byte_perm(codes, 0, index | 0x40 | index << 8 | 0x4000) << 7;
}
__device__ __forceinline__ uint32_t bits(__nv_bfloat162 v) {
  uint32_t out;
  memcpy(&out, &v, 4);
  return out;
}
__device__ __forceinline__ __nv_bfloat162 as_bf16(uint32_t v) {
  __nv_bfloat162 out;
  memcpy(&out, &v, 4);
  return out;
}
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) { return bits(__hmul2(as_bf16(a), as_bf16(b))); }

// MXFP4: words 2q and 2q + 1 hold the 16 values of a thread for the q-th 32 k: four magnitudes a half, as
// selectors of a table look-up; the signs of the low half at bits 7, 15, 23, 31, of the high half four
// bits lower.
struct Mxfp4 {
  static constexpr int WORDS = 8;     // 32-bit words a thread reads for a 64 x 128 block
  static constexpr int SCALES = 256;  // bytes of scale codes of the block
  uint32_t words[WORDS];
  uint32_t low, high;  // codes of this thread's two rows

  __device__ __forceinline__ void load(const uint8_t* values, const uint8_t* scales, int thread) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 v = *reinterpret_cast<const uint4*>(values + (i * 128 + thread) * 16);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
    uint2 s = *reinterpret_cast<const uint2*>(scales + (thread >> 2) * 8);
    low = s.x, high = s.y;
  }
  // The bf16 fragment of 16 k, scaled. The first product column pairs are k 4c + {0, 1}, the second 4c + {2, 3}
  // (c = lane % 4): the token rows carry k in that order.
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[4]) const {
    uint32_t w = words[step], magnitudes = w & 0x77777777u;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t scale = scale_pair(row ? high : low, step >> 1), pick = row ? magnitudes >> 16 : magnitudes;
      uint32_t upper = hopper::byte_select(0x3F3F3F00u, 0x40404040u, pick) | ((row ? w << 4 : w) & 0x80808080u);
      uint32_t lower = hopper::byte_select(0xC0800000u, 0xC0804000u, pick);
      a[row] = multiply(__byte_perm(lower, upper, 0x5140), scale);
      a[2 + row] = multiply(__byte_perm(lower, upper, 0x7362), scale);
    }
  }
  // The E4M3 fragment of the q-th 32 k, not scaled.
  __device__ __forceinline__ void decode_native(int q, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t w = words[2 * q + i], magnitudes = w & 0x77777777u;
      a[2 * i] = hopper::byte_select(0x3C383000u, 0x4C484440u, magnitudes) | (w & 0x80808080u);
      a[2 * i + 1] = hopper::byte_select(0x3C383000u, 0x4C484440u, magnitudes >> 16) | (w << 4 & 0x80808080u);
    }
  }
  // The E5M2 fragment of the q-th 32 k: values times 2^(code - base), exact for codes up to 13 from the base. The
  // exponents of the table are moved, not those of the values: 0 stays 0 whatever the code of its block.
  __device__ __forceinline__ void decode_folded(int q, uint2 fold, uint32_t (&a)[4]) const {
    // Opaque: otherwise the compiler masks each half by itself.
    uint32_t magnitudes[2] = {static_cast<uint32_t>(hopper::opaque(words[2 * q] & 0x77777777u)),
                              static_cast<uint32_t>(hopper::opaque(words[2 * q + 1] & 0x77777777u))};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t code = __byte_perm(row ? high : low, 0, 0x4440 | q);
      uint32_t small = fold.x + code * 0x04040400u, large = fold.y + code * 0x04040404u;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t w = words[2 * q + i];
        a[2 * i + row] = hopper::byte_select(small, large, magnitudes[i] >> 16 * row) |
                         ((row ? w << 4 : w) & 0x80808080u);
      }
    }
  }
  // What decode_folded adds to: E2M1 magnitudes as E5M2, moved by the base.
  static __device__ __forceinline__ uint2 folding(uint32_t base) {
    return make_uint2(0x3E3C3800u - base * 0x04040400u, 0x46444240u - base * 0x04040404u);
  }
  // The scale of a row for the q-th 32 k.
  __device__ __forceinline__ float scale(int row, int q) const {
    return __uint_as_float(__byte_perm(row ? high : low, 0, 0x4044 | q << 8) << 7);
  }
};

// One tile of work: `rows` tokens from position `row` of `expert` (positions count through all experts).
struct Tile {
  int expert, row, rows, block;
};

// The token tiles of all experts, from the counts on the device: at most MAX_ROWS tokens each, spread evenly.
template <int MAX_ROWS>
struct Schedule {
  const int* starts;  // [experts + 1] in shared memory: first token tile of each expert
  const int* begins;  // [experts + 1] in global memory: first position of each expert
  int experts, blocks, total;

  __device__ __forceinline__ Tile operator()(int work) const {
    int tile = work / blocks, low = 0, high = experts;
    while (high - low > 1) {  // the last expert whose first tile is at or before this one
      int middle = (low + high) >> 1;
      if (starts[middle] <= tile)
        low = middle;
      else
        high = middle;
    }
    int begin = __ldg(begins + low), count = __ldg(begins + low + 1) - begin;
    int tiles = starts[low + 1] - starts[low], index = tile - starts[low];
    int each = ((count + tiles - 1) / tiles + 7) & ~7;
    int first = index * each;
    return {low, begin + first, max(0, min(each, count - first)), work - tile * blocks};
  }
};

// How token rows come. Bf16: in the order of k that the weights' fragments have. Native: E4M3 in the natural order
// with a float scale each 32. For folded weights, with a float scale each 128: Coarse, E4M3; Split, exact, sums of two
// E5M2 values, the 128 upper ones first, two columns of the product a token.
template <int VALUE_BYTES, int SCALE_BYTES, int TOKEN_COLUMNS>
struct TokensAs {
  static constexpr int BYTES = VALUE_BYTES, SCALES = SCALE_BYTES;  // of a value; of the scales of a row for 128 k
  static constexpr int COLUMNS = TOKEN_COLUMNS;
  static constexpr bool FOLDED = SCALE_BYTES == 4;
};
using Bf16 = TokensAs<2, 0, 1>;
using Native = TokensAs<1, 16, 1>;
using Coarse = TokensAs<1, 4, 1>;
using Split = TokensAs<2, 4, 2>;

template <int K, int MAX_ROWS, int K_GROUPS, class Format, class Tokens>
struct Layout {
  static constexpr int K_BLOCKS = K / BLOCK_K, BLOCKS = 4 / K_GROUPS;  // BLOCKS: blocks of 64 features of a tile
  // Registers of a producer and of a consumer thread: out of what the block got at its start, or it waits for ever.
  static constexpr int THREADS = 640, PRODUCER = 56, CONSUMER = 104;
  static constexpr bool FOLDED = Tokens::FOLDED;
  // Three warps copy token rows, the first one copies weights. They share a block of k, or, with few rows, take turns.
  static constexpr int TEAMS = MAX_ROWS <= 32 ? 3 : 1, PRODUCERS = 96 / TEAMS;
  static_assert(128 * PRODUCER + 512 * CONSUMER <= 65536 / THREADS / 8 * 8 * THREADS);
  static constexpr int VALUES = Format::WORDS * 512, SCALES = Format::SCALES;
  static constexpr int TOKENS = MAX_ROWS * BLOCK_K * Tokens::BYTES, TOKEN_SCALES = MAX_ROWS * Tokens::SCALES;
  static constexpr int STAGE = (TOKENS + BLOCKS * (VALUES + SCALES) + TOKEN_SCALES + 1023) / 1024 * 1024;
  static constexpr int SUMS = K_GROUPS == 1 ? 0 : MAX_ROWS * 512;  // a group's sums for the other
  // Schedule, the epilogues' words and maxima, barriers.
  static constexpr int REST = SUMS + 4096 + BLOCKS * MAX_ROWS * (4 + 8) + 256;
  static constexpr int FIT = (232448 - REST) / STAGE;
  static constexpr int STAGES = FIT < 12 ? FIT : 12;
  static constexpr int LAG = STAGES / 2 / TEAMS;  // blocks of token rows that a team has in flight
  static constexpr int BYTES = STAGES * STAGE + REST;
  uint8_t* base;
  __device__ __forceinline__ uint8_t* tokens(int stage) const { return base + stage * STAGE; }
  __device__ __forceinline__ uint8_t* values(int stage, int block) const {
    return base + stage * STAGE + TOKENS + block * VALUES;
  }
  __device__ __forceinline__ uint8_t* scales(int stage, int block) const {
    return base + stage * STAGE + TOKENS + BLOCKS * VALUES + block * SCALES;
  }
  __device__ __forceinline__ float* token_scales(int stage) const {
    return reinterpret_cast<float*>(base + stage * STAGE + TOKENS + BLOCKS * (VALUES + SCALES));
  }
  __device__ __forceinline__ uint8_t* rest() const { return base + STAGES * STAGE; }
  __device__ __forceinline__ float* sums(int group) const {
    return reinterpret_cast<float*>(rest() + group * (SUMS / 2));
  }
  __device__ __forceinline__ int* starts() const { return reinterpret_cast<int*>(rest() + SUMS); }  // 1,023 experts
  __device__ __forceinline__ __nv_bfloat16* maxima(int group) const {
    return reinterpret_cast<__nv_bfloat16*>(rest() + SUMS + 4096 + group * MAX_ROWS * 8);
  }
  __device__ __forceinline__ int* notes(int group) const {  // a word a token for the epilogue
    return reinterpret_cast<int*>(rest() + SUMS + 4096 + BLOCKS * MAX_ROWS * 8) + group * MAX_ROWS;
  }
  __device__ __forceinline__ uint64_t* full(int stage) const {
    return reinterpret_cast<uint64_t*>(rest() + REST - 256) + stage;
  }
  __device__ __forceinline__ uint64_t* empty(int stage) const { return full(stage) + 12; }
};

// Where the block of k at `position` (counted through all tiles) lies.
template <int STAGES>
struct Ring {
  int stage;
  uint32_t phase;
  __device__ __forceinline__ explicit Ring(int position) : stage(position % STAGES), phase(position / STAGES & 1) {}
  __device__ __forceinline__ void advance(int blocks) {  // fewer than STAGES
    stage += blocks;
    if (stage >= STAGES) stage -= STAGES, phase ^= 1;
  }
};

// Multiplies one tile of N tokens with this group's features, over this group's blocks of k.
template <int N, int K_GROUPS, class L, class Format>
__device__ __forceinline__ void multiply_tile(const L& smem, int group, int k_group, int thread, int position,
                                              float (&acc)[N / 2]) {
  constexpr int HALF = L::TOKENS / 2;
  Format weights;
  uint32_t a[2][4];
  int previous = -1;
  Ring<L::STAGES> ring(position + k_group);
#pragma unroll 1
  for (int block = k_group; block < L::K_BLOCKS; block += K_GROUPS) {
    int stage = ring.stage;
    hopper::barrier_wait(smem.full(stage), ring.phase);
    ring.advance(K_GROUPS);
    weights.load(smem.values(stage, group), smem.scales(stage, group), thread);
    uint64_t tokens = hopper::tile_descriptor(hopper::smem_address(smem.tokens(stage)));
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      hopper::wgmma_wait<1>();  // a[step & 1] is free again
      if (step == 1 && previous >= 0 && (thread & 31) == 0) hopper::barrier_arrive(smem.empty(previous));
      weights.decode(step, a[step & 1]);
      hopper::wgmma_fence();
      hopper::wgmma_bf16_rs(acc, a[step & 1], tokens + ((step >> 2) * HALF + (step & 3) * 32) / 16, 1);
      hopper::wgmma_commit();
    }
    previous = stage;
  }
  hopper::wgmma_wait<0>();
  hopper::keep(acc);
  if (previous >= 0 && (thread & 31) == 0) hopper::barrier_arrive(smem.empty(previous));
}

__device__ __forceinline__ float component(float4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The same with native FP8: a product of 32 k at a time, scaled in f32 by the token's and the row's scale.
template <int N, int K_GROUPS, class L, class Format>
__device__ __forceinline__ void multiply_native(const L& smem, int group, int k_group, int thread, int position,
                                                float (&acc)[N / 2]) {
  Format weights;
  float part[2][N / 2] = {};
  uint32_t a[2][4];
  int column = 2 * (thread & 3);
  Ring<L::STAGES> ring(position + k_group);
#pragma unroll 1
  for (int block = k_group; block < L::K_BLOCKS; block += K_GROUPS) {
    int stage = ring.stage;
    hopper::barrier_wait(smem.full(stage), ring.phase);
    ring.advance(K_GROUPS);
    weights.load(smem.values(stage, group), smem.scales(stage, group), thread);
    constexpr bool EARLY = N <= 16;  // read all the scales of the tokens at once
    const float4* scales = reinterpret_cast<const float4*>(smem.token_scales(stage)) + column;
    float4 early[EARLY ? N / 4 : 1];
    if (EARLY)
#pragma unroll
      for (int n = 0; n < N / 4; ++n) early[n] = scales[8 * (n / 2) + n % 2];
    uint64_t tokens = hopper::tile_descriptor(hopper::smem_address(smem.tokens(stage)));
#pragma unroll
    for (int q = 0; q <= 4; ++q) {
      if (q < 4) {
        weights.decode_native(q, a[q & 1]);
        hopper::wgmma_fence();
        hopper::wgmma_e4m3_rs(part[q & 1], a[q & 1], tokens + 2 * q, 0);
        hopper::wgmma_commit();
      }
      if (q == 0) continue;
      if (q < 4)
        hopper::wgmma_wait<1>();
      else
        hopper::wgmma_wait<0>();
      hopper::keep(part[(q - 1) & 1]);
      float low = weights.scale(0, q - 1), high = weights.scale(1, q - 1);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float scale = EARLY ? component(early[2 * j + i], q - 1)
                              : reinterpret_cast<const float*>(scales + 8 * j + i)[q - 1];
          acc[4 * j + i] += part[(q - 1) & 1][4 * j + i] * scale * low;
          acc[4 * j + 2 + i] += part[(q - 1) & 1][4 * j + 2 + i] * scale * high;
        }
      }
    }
    if ((thread & 31) == 0) hopper::barrier_arrive(smem.empty(stage));
  }
}

// The same with folded weights: 128 k add up on the tensor cores, then the token's scale is applied in f32. Wide
// tiles take two turns, for want of registers. `blocks`: of 128 k.
template <int N, int K_GROUPS, class L, class Format, class Tokens>
__device__ __forceinline__ void multiply_folded(const L& smem, uint2 fold, int group, int k_group, int thread,
                                                int position, int blocks, float (&acc)[N / 2]) {
  constexpr int COLUMNS = Tokens::COLUMNS, TURNS = N * COLUMNS > 64 && N % 16 == 0 ? 2 : 1, WIDE = N / TURNS;
  float part[WIDE * COLUMNS / 2] = {};
  uint32_t a[4][4];
  Ring<L::STAGES> ring(position + k_group);
#pragma unroll 1
  for (int block = k_group; block < blocks; block += K_GROUPS) {
    int stage = ring.stage;
    hopper::barrier_wait(smem.full(stage), ring.phase);
    ring.advance(K_GROUPS);
    uint64_t tokens = hopper::tile_descriptor(hopper::smem_address(smem.tokens(stage)));
    const float* scales = smem.token_scales(stage) + 2 * (thread & 3);
    Format weights;
    weights.load(smem.values(stage, group), smem.scales(stage, group), thread);
#pragma unroll
    for (int q = 0; q < 4; ++q) weights.decode_folded(q, fold, a[q]);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      hopper::wgmma_fence();
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        uint64_t b = tokens + turn * (WIDE * COLUMNS * 8) + 2 * q;
        if constexpr (COLUMNS == 1)
          hopper::wgmma_e5m2e4m3_rs(part, a[q], b, q > 0);
        else
          hopper::wgmma_e5m2_rs(part, a[q], b, q > 0);
      }
      hopper::wgmma_commit();
      float2 scale[WIDE / 8];  // read while the products run
#pragma unroll
      for (int j = 0; j < WIDE / 8; ++j) scale[j] = *reinterpret_cast<const float2*>(scales + turn * WIDE + 8 * j);
      hopper::wgmma_wait<0>();
      hopper::keep(part);
      if (turn == TURNS - 1 && (thread & 31) == 0) hopper::barrier_arrive(smem.empty(stage));
#pragma unroll
      for (int j = 0; j < WIDE / 8; ++j) {
        float* sum = acc + turn * (WIDE / 2) + 4 * j;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float value = COLUMNS == 1 ? part[4 * j + i] : part[8 * j + i] + part[8 * j + 4 + i];
          sum[i] += value * (i & 1 ? scale[j].y : scale[j].x);
        }
      }
    }
  }
}

template <int N, int K_GROUPS, class L, class Format, class Tokens, class Epilogue>
__device__ __forceinline__ void finish_tile(const L& smem, uint2 fold, int group, int k_group, int thread,
                                            int position, const Tile& tile, const Epilogue& epilogue) {
  thread = hopper::opaque(thread);
  float acc[N / 2] = {};  // written before the first product: otherwise ptxas keeps it live for ever
  // Loads of the epilogue's words hide behind the products.
  if (k_group == 0)
    for (int n = thread; n < tile.rows; n += 128) smem.notes(group)[n] = epilogue.note(tile.row + n);
  if constexpr (L::FOLDED)
    multiply_folded<N, K_GROUPS, L, Format, Tokens>(smem, fold, group, k_group, thread, position, L::K_BLOCKS, acc);
  else if constexpr (Tokens::SCALES > 0)
    multiply_native<N, K_GROUPS, L, Format>(smem, group, k_group, thread, position, acc);
  else
    multiply_tile<N, K_GROUPS, L, Format>(smem, group, k_group, thread, position, acc);
  if (K_GROUPS > 1) {
    float* sums = smem.sums(group) + thread;
    if (k_group == 1) {
      hopper::named_barrier(6 + group, 256);  // the previous tile's sums have been read
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums[i * 128] = acc[i];
      hopper::named_barrier(8 + group, 256);
      return;
    }
    hopper::named_barrier_arrive(6 + group, 256);
    hopper::named_barrier(8 + group, 256);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[i] += sums[i * 128];
  }
  hopper::named_barrier(2 + group, 128);  // the notes are there
  epilogue.template operator()<N>(acc, tile, tile.block * L::BLOCKS + group, group, thread, smem.notes(group),
                                  smem.maxima(group));
  hopper::named_barrier(2 + group, 128);  // and may be overwritten
}

__device__ __forceinline__ uint32_t pair_bf16(float low, float high) {
  return bits(__floats2bfloat162_rn(low, high));
}

// The whole kernel. `rows` gives the row of `x` (and of its scales, one a 32 or 128 k, where it has some) of a
// position. `features`: of one expert; `base`: the code of scale that folded weights are relative to.
template <int K, int MAX_ROWS, int K_GROUPS, class Format, class Tokens, class Rows, class Epilogue>
__device__ __forceinline__ void run(const uint8_t* values, const uint8_t* scales, const void* x, const float* x_scale,
                                    const int* begins, int experts, int features, int base, uint8_t* shared,
                                    const Rows& rows, const Epilogue& epilogue) {
  using L = Layout<K, MAX_ROWS, K_GROUPS, Format, Tokens>;
  L smem{shared};
  // From lane 0, so that the compiler knows it to be the same in a warp.
  int role = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  int blocks = features / (64 * L::BLOCKS);
  int* starts = smem.starts();
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::STAGES; ++i) {
      hopper::barrier_init(smem.full(i), L::PRODUCERS + 1);  // copies of rows, and the announcement of weights
      hopper::barrier_init(smem.empty(i), 4 * L::BLOCKS);    // the warps that multiply this stage
    }
    hopper::fence_barrier_init();
  }
  if (threadIdx.x < 32) {  // prefix sum of the token tiles
    int total = 0;
    for (int first = 0; first < experts; first += 32) {
      int e = first + threadIdx.x, tiles = 0;
      if (e < experts) tiles = (__ldg(begins + e + 1) - __ldg(begins + e) + MAX_ROWS - 1) / MAX_ROWS;
      int sum = tiles;
      for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
        if (threadIdx.x >= d) sum += other;
      }
      if (e < experts) starts[e] = total + sum - tiles;
      total += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (threadIdx.x == 0) starts[experts] = total;
  }
  __syncthreads();
  Schedule<MAX_ROWS> schedule{starts, begins, experts, blocks, starts[experts] * blocks};
  int position = 0;

  if (role == 0) {
    hopper::registers_shrink<L::PRODUCER>();
    if (thread < 32) {
      if (!hopper::elect()) return;
      Ring<L::STAGES> ring(0);
      for (int work = blockIdx.x; work < schedule.total; work += gridDim.x) {
        Tile tile = schedule(work);
        int64_t at = (static_cast<int64_t>(tile.expert) * blocks + tile.block) * L::BLOCKS * L::K_BLOCKS;
        const uint8_t *value = values + at * L::VALUES, *scale = scales + at * L::SCALES;
        for (int k = 0; k < L::K_BLOCKS; ++k, value += 2 * L::VALUES, scale += 2 * L::SCALES) {
          uint64_t* full = smem.full(ring.stage);
          hopper::barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
          hopper::barrier_expect(full, L::BLOCKS * (L::VALUES + L::SCALES));
#pragma unroll
          for (int b = 0; b < L::BLOCKS; b += 2) {  // two blocks of 64 features lie together
            hopper::bulk_copy(smem.values(ring.stage, b), value + b * (L::K_BLOCKS * L::VALUES), 2 * L::VALUES, full);
            hopper::bulk_copy(smem.scales(ring.stage, b), scale + b * (L::K_BLOCKS * L::SCALES), 2 * L::SCALES, full);
          }
          ring.advance(1);
        }
      }
      return;
    }
    // A thread copies one 16-byte piece of every STRIDE-th row.
    int team = (thread - 32) / L::PRODUCERS;
    thread = (thread - 32) % L::PRODUCERS;
    constexpr int PIECES = 8 * Tokens::BYTES, STRIDE = L::PRODUCERS / PIECES, COUNT = (MAX_ROWS + STRIDE - 1) / STRIDE;
    constexpr int PERIOD = STRIDE % 8 == 4 ? 2 : 4;  // after which rows are swizzled alike
    static_assert(PERIOD * STRIDE % 8 == 0);
    constexpr int SCALE_COUNT = Tokens::SCALES ? (MAX_ROWS + L::PRODUCERS - 1) / L::PRODUCERS : 0;
    int piece = thread % PIECES, first = thread / PIECES, to[PERIOD];
#pragma unroll
    for (int i = 0; i < PERIOD; ++i) {
      int row = first + i * STRIDE;
      // The second half of the pieces: k from 64 on; or lower parts of split values, eight rows after their upper ones.
      to[i] = Tokens::COLUMNS == 2 ? hopper::swizzle_128(row + (row & ~7) + (piece & 8), piece & 7)
                                   : hopper::swizzle_128(row, piece & 7) + (piece >> 3) * (L::TOKENS / 2);
    }
    Ring<L::STAGES> ring(team), landed(team);
    int issued = 0, begin = team;  // the team's first block of the tile
    for (int work = blockIdx.x; work < schedule.total; work += gridDim.x) {
      Tile tile = schedule(work);
      int padded = (tile.rows + 7) & ~7, from[COUNT], scale_from[SCALE_COUNT + 1];
      // Columns past the tile's rows are never read: they repeat its first row.
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        int row = first + i * STRIDE;
        from[i] = row < padded ? rows(tile.row + (row < tile.rows ? row : 0)) : -1;
      }
#pragma unroll
      for (int i = 0; i < SCALE_COUNT; ++i) {
        int row = thread + i * L::PRODUCERS;
        scale_from[i] = row < padded ? rows(tile.row + (row < tile.rows ? row : 0)) : -1;
      }
      int k = begin;
      const uint8_t* source = static_cast<const uint8_t*>(x) + piece * 16 + k * (PIECES * 16);
      const float* scale = x_scale + k * (Tokens::SCALES / 4);
      for (; k < L::K_BLOCKS; k += L::TEAMS, ++issued) {
        hopper::barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
        uint8_t* tokens = smem.tokens(ring.stage);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          if (i * STRIDE >= padded) break;
          if (from[i] >= 0)
            hopper::copy_16(tokens + to[i % PERIOD] + i / PERIOD * (PERIOD * STRIDE * 128 * Tokens::COLUMNS),
                            source + static_cast<int64_t>(from[i]) * (Tokens::BYTES * K), true);
        }
#pragma unroll
        for (int i = 0; i < SCALE_COUNT; ++i) {
          if (scale_from[i] < 0) continue;
          float* scale_to = smem.token_scales(ring.stage) + (thread + i * L::PRODUCERS) * (Tokens::SCALES / 4);
          const float* one = scale + static_cast<int64_t>(scale_from[i]) * (K * Tokens::SCALES / 512);
          if (L::FOLDED)
            hopper::copy_4(scale_to, one);
          else
            hopper::copy_16(scale_to, one, true);
        }
        hopper::copy_commit();
        source += L::TEAMS * PIECES * 16, scale += L::TEAMS * (Tokens::SCALES / 4);
        ring.advance(L::TEAMS);
        if (issued >= L::LAG) {  // announced once it has landed, by the threads that copied it
          hopper::copy_wait<L::LAG>();
          hopper::fence_async();
          hopper::barrier_arrive(smem.full(landed.stage));
          landed.advance(L::TEAMS);
        }
      }
      begin = k - L::K_BLOCKS;
    }
    hopper::copy_wait<0>();
    hopper::fence_async();
    for (int late = min(issued, L::LAG); late > 0; --late) {
      hopper::barrier_arrive(smem.full(landed.stage));
      landed.advance(L::TEAMS);
    }
  } else {
    hopper::registers_grow<L::CONSUMER>();
    int group = (role - 1) % L::BLOCKS, k_group = (role - 1) / L::BLOCKS;
    uint2 fold = Format::folding(base);
    for (int work = blockIdx.x; work < schedule.total; work += gridDim.x, position += L::K_BLOCKS) {
      Tile tile = schedule(work);
#define DSV41_WIDTH(N)                                                                                       \
  if (N <= MAX_ROWS && tile.rows <= N) {                                                                     \
    finish_tile<(N <= MAX_ROWS ? N : 8), K_GROUPS, L, Format, Tokens>(                            \
        smem, fold, group, k_group, thread, position, tile, epilogue);                                      \
    continue;                                                                                                \
  }
      DSV41_WIDTHS(DSV41_WIDTH)
#undef DSV41_WIDTH
    }
  }
}

}  // namespace gemm
