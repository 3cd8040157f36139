// Grouped GEMM whose weights are decoded in registers: out[token, feature] = sum_k w[feature, k] x[token, k].
//
// The weights are the A operand of wgmma and come from registers, decoded there from 4 or 8 bits (exact in
// bf16); the tokens are the B operand, bf16 in shared memory. So a tile of 8 tokens costs the tensor cores an
// eighth of a tile of 64 and the time of a decode step is the bytes of the weights. One producer warp group
// copies (weights with the copy engine, token rows with 16-byte gathers). Few rows: four consumer warp groups multiply,
// 64 features each; many rows ("wide"): two groups with 128 features each, whose registers hold tiles of up to 136
// tokens. K_GROUPS = 1: a tile of 256 features, the least traffic of token rows. K_GROUPS = 2: 128 features, pairs of
// groups take turns at the blocks of k, so that there are more tiles. In one shape a token's sum has the same order
// whatever tile it is in.
//
// Packed weights: [expert][block of 128 features][block of 128 k][block of 64 features][bytes in the order the
// threads read them], see dsv41/ops/_tilelang/pack.py. Scale codes likewise, as exponents of bf16.
#pragma once

namespace gemm {

constexpr int BLOCK_K = 128;

// One tile of work: `rows` tokens from position `row` of `expert` (positions count through all experts).
struct Tile {
  int expert, row, rows, block;
};

// Where each expert's token tiles start among those of all, and how many there are: starts[0, experts]. All threads
// of the block, which meet.
template <int MAX_ROWS>
__device__ __forceinline__ void count_tiles(const int* begins, int experts, int* starts) {
  for (int e = threadIdx.x; e < experts; e += blockDim.x)
    starts[e] = (__ldg(begins + e + 1) - __ldg(begins + e) + MAX_ROWS - 1) / MAX_ROWS;
  __syncthreads();
  if (threadIdx.x < 32) {
    int total = 0;
    for (int first = 0; first < experts; first += 32) {
      int e = first + threadIdx.x, tiles = e < experts ? starts[e] : 0, sum = tiles;
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
}

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
// with a float scale each 32. For folded weights, with a float scale each 128: E4M3, Coarse and, in tiles of up to 80
// tokens, Narrow; Split, exact, sums of two E5M2 values, the 128 upper ones first, two columns of the product a token
// (see mxfp4_stream.cuh). Half: for folded weights, f16 with one scale a row, which the epilogue applies, in bf16's order.
template <int VALUE_BYTES, int SCALE_BYTES, int TOKEN_COLUMNS, bool FOLDED_WEIGHTS, int BLOCKS_HELD>
struct TokensAs {
  static constexpr int BYTES = VALUE_BYTES, SCALES = SCALE_BYTES;  // of a value; of the scales of a row for 128 k
  static constexpr int COLUMNS = TOKEN_COLUMNS;
  static constexpr bool FOLDED = FOLDED_WEIGHTS;
  static constexpr int HELD = BLOCKS_HELD;  // blocks of 64 features that a consumer group multiplies
};
using Bf16 = TokensAs<2, 0, 1, false, 2>;
using Half = TokensAs<2, 0, 1, true, 2>;
using Native = TokensAs<1, 16, 1, false, 1>;
using Coarse = TokensAs<1, 4, 1, true, 2>;
using Narrow = TokensAs<1, 4, 1, true, 1>;
using Split = TokensAs<2, 4, 2, true, 1>;

template <int K, int MAX_ROWS, int K_GROUPS, class Format, class Tokens>
struct Layout {
  static constexpr int K_BLOCKS = K / BLOCK_K, BLOCKS = 4 / K_GROUPS;  // BLOCKS: blocks of 64 features of a tile
  // Wide: rows are announced by their copies as they land, and consumers fence them. Where the rows' threads do both
  // (few rows), a fence waits for all copies in flight, and a block of k costs the latency of memory.
  static constexpr bool WIDE = Tokens::HELD > 1;
  static constexpr int HELD = Tokens::HELD, GROUPS = 4 / HELD, THREADS = 128 + 128 * GROUPS;
  // Registers of a producer and of a consumer thread: out of what the block got at its start, or it waits for ever.
  static constexpr int PRODUCER = !WIDE ? 56 : Tokens::BYTES == 2 ? 72 : 56, CONSUMER = WIDE ? 252 - PRODUCER / 2 : 104;
  // Three warps copy token rows, the first one copies weights. They share a block of k, or, with few rows, take turns.
  static constexpr int TEAMS = MAX_ROWS <= 32 ? 3 : 1, PRODUCERS = 96 / TEAMS;
  static_assert(128 * (PRODUCER + GROUPS * CONSUMER) <= 65536 / THREADS / 8 * 8 * THREADS);
  static constexpr int VALUES = Format::WORDS * 512, SCALES = Format::SCALES;
  static constexpr int TOKENS = MAX_ROWS * BLOCK_K * Tokens::BYTES, TOKEN_SCALES = MAX_ROWS * Tokens::SCALES;
  static constexpr int STAGE = (TOKENS + BLOCKS * (VALUES + SCALES) + TOKEN_SCALES + 1023) / 1024 * 1024;
  static constexpr int SUMS = K_GROUPS == 1 ? 0 : MAX_ROWS * 512;  // a group's sums for the other
  // Schedule, the epilogues' words and maxima of the groups that have features of their own, barriers.
  static constexpr int OWNERS = BLOCKS / HELD;
  static constexpr int REST = SUMS + 4096 + OWNERS * MAX_ROWS * (8 + 8) + 256;
  static constexpr int FIT = (232448 - REST) / STAGE;
  static constexpr int STAGES = FIT < 12 ? FIT : 12;
  static constexpr int LAG = STAGES / 2 / TEAMS;  // blocks of token rows that a team has in flight
  static constexpr int BYTES = STAGES * STAGE + REST;
  // One group starts this many blocks of k after the other, so that the end of its tiles runs beside products.
  static constexpr int LEAD = STAGES / 2 < K_BLOCKS ? STAGES / 2 : K_BLOCKS - 1;
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
  // Where the scales of a row lie among them. Wide tiles: those of a thread's columns, 8 j + 2 (thread % 4) + {0, 1},
  // together.
  static __device__ __forceinline__ int scale_place(int row) {
    return WIDE ? (row >> 1 & 3) * (MAX_ROWS / 4) + (row >> 3) * 2 + (row & 1) : row * (Tokens::SCALES / 4);
  }
  __device__ __forceinline__ uint8_t* rest() const { return base + STAGES * STAGE; }
  __device__ __forceinline__ float* sums(int group) const {
    return reinterpret_cast<float*>(rest() + group * (SUMS / 2));
  }
  __device__ __forceinline__ int* starts() const { return reinterpret_cast<int*>(rest() + SUMS); }  // 1,023 experts
  __device__ __forceinline__ __nv_bfloat16* maxima(int group) const {
    return reinterpret_cast<__nv_bfloat16*>(rest() + SUMS + 4096 + group * MAX_ROWS * 8);
  }
  __device__ __forceinline__ int2* notes(int group) const {  // what the epilogue wants of a token
    return reinterpret_cast<int2*>(rest() + SUMS + 4096 + OWNERS * MAX_ROWS * 8) + group * MAX_ROWS;
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

// Multiplies one tile of N tokens with this group's features in bf16 or f16.
template <int N, class L, class Format, class Tokens>
__device__ __forceinline__ void multiply_wide(const L& smem, uint2 fold, int group, int thread, int position,
                                              float (&acc)[L::HELD][N / 2]) {
  constexpr int HALF = L::TOKENS / 2;
  uint32_t a[4][4];
  int previous = -1;
  Ring<L::STAGES> ring(position);
#pragma unroll
  for (int held = 0; held < L::HELD; ++held) hopper::keep(acc[held]);
#pragma unroll 1
  for (int block = 0; block < L::K_BLOCKS; ++block) {
    if (position == 0 && group == 0 && block == L::LEAD) hopper::named_barrier_arrive(10, 256);
    int stage = ring.stage;
    hopper::barrier_wait(smem.full(stage), ring.phase);
    hopper::fence_async();
    ring.advance(1);
    uint64_t tokens = hopper::tile_descriptor(hopper::smem_address(smem.tokens(stage)));
#pragma unroll
    for (int held = 0; held < L::HELD; ++held) {
      Format weights;
      weights.load(smem.values(stage, group * L::HELD + held), smem.scales(stage, group * L::HELD + held), thread);
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        hopper::wgmma_wait<3>();  // a[step & 3] is free again
        if (held == 0 && step == 3 && previous >= 0 && (thread & 31) == 0) hopper::barrier_arrive(smem.empty(previous));
        if constexpr (Tokens::FOLDED)
          weights.decode_half(step, fold, a[step & 3]);
        else
          weights.decode(step, a[step & 3]);
        uint64_t b = tokens + ((step >> 2) * HALF + (step & 3) * 32) / 16;
        hopper::wgmma_fence();
        if constexpr (Tokens::FOLDED)
          hopper::wgmma_f16_rs(acc[held], a[step & 3], b, 1);
        else
          hopper::wgmma_bf16_rs(acc[held], a[step & 3], b, 1);
        hopper::wgmma_commit();
      }
    }
    previous = stage;
  }
  hopper::wgmma_wait<0>();
#pragma unroll
  for (int held = 0; held < L::HELD; ++held) hopper::keep(acc[held]);
  if ((thread & 31) == 0) hopper::barrier_arrive(smem.empty(previous));
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

// The same with folded weights: 128 k add up on the tensor cores, then the token's scale is applied in f32. Wide tiles
// take two turns, for want of registers. `blocks`: of 128 k.
template <int N, class L, class Format, class Tokens>
__device__ __forceinline__ void multiply_folded(const L& smem, uint2 fold, int group, int thread, int position,
                                                int blocks, float (&acc)[N / 2]) {
  constexpr int COLUMNS = Tokens::COLUMNS, TURNS = N * COLUMNS > 64 && N % 16 == 0 ? 2 : 1, WIDE = N / TURNS;
  float part[WIDE * COLUMNS / 2] = {};
  uint32_t a[4][4];
  Ring<L::STAGES> ring(position);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    int stage = ring.stage;
    hopper::barrier_wait(smem.full(stage), ring.phase);
    ring.advance(1);
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

// COUNT scales from `first` on, 16 bytes at a time where they are aligned.
template <int COUNT>
__device__ __forceinline__ void load_scales(const float* from, int first, float (&to)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    bool aligned = (first + i) % 4 == 0;
    if (aligned && i + 2 < COUNT) {
      float4 four = *reinterpret_cast<const float4*>(from + first + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    } else if (aligned || i == 0) {
      float2 two = *reinterpret_cast<const float2*>(from + first + i);
      to[i] = two.x, to[i + 1] = two.y;
    }
  }
}

// The same for E4M3 tokens, with all blocks of features that a group holds after each other.
template <int N, class L, class Format>
__device__ __forceinline__ void multiply_coarse(const L& smem, uint2 fold, int group, int thread, int position,
                                                float (&acc)[L::HELD][N / 2]) {
  constexpr int TURNS = N > 64 ? 2 : 1, WIDE = N / TURNS;
  float part[WIDE / 2] = {};
  uint32_t a[4][4];
  Ring<L::STAGES> ring(position);
#pragma unroll 1
  for (int block = 0; block < L::K_BLOCKS; ++block) {
    if (position == 0 && group == 0 && block == L::LEAD) hopper::named_barrier_arrive(10, 256);
    int stage = ring.stage;
    hopper::barrier_wait(smem.full(stage), ring.phase);
    hopper::fence_async();
    ring.advance(1);
    uint64_t tokens = hopper::tile_descriptor(hopper::smem_address(smem.tokens(stage)));
    const float* scales = smem.token_scales(stage) + L::scale_place(2 * (thread & 3));
#pragma unroll
    for (int held = 0; held < L::HELD; ++held) {
      Format weights;
      weights.load(smem.values(stage, group * L::HELD + held), smem.scales(stage, group * L::HELD + held), thread);
#pragma unroll
      for (int q = 0; q < 4; ++q) weights.decode_folded(q, fold, a[q]);
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        hopper::wgmma_fence();
#pragma unroll
        for (int q = 0; q < 4; ++q)
          hopper::wgmma_e5m2e4m3_rs(part, a[q], tokens + turn * (WIDE * 8) + 2 * q, q > 0);
        hopper::wgmma_commit();
        float scale[WIDE / 4];  // read while the products run
        load_scales(scales, turn * (WIDE / 4), scale);
        hopper::wgmma_wait<0>();
        hopper::keep(part);
        if (held == L::HELD - 1 && turn == TURNS - 1 && (thread & 31) == 0) hopper::barrier_arrive(smem.empty(stage));
#pragma unroll
        for (int i = 0; i < WIDE / 2; ++i)
          acc[held][turn * (WIDE / 2) + i] += part[i] * scale[i / 4 * 2 + (i & 1)];
      }
    }
  }
}

template <int N, int K_GROUPS, class L, class Format, class Tokens, class Epilogue>
__device__ __forceinline__ void finish_tile(const L& smem, uint2 fold, int group, int k_group, int thread,
                                            int position, const Tile& tile, const Epilogue& epilogue) {
  thread = hopper::opaque(thread);
  float acc[L::HELD][N / 2] = {};  // written before the first product: otherwise ptxas keeps it live for ever
  // Loads of the epilogue's words hide behind the products.
  if (k_group == 0)
    for (int n = thread; n < N; n += 128)
      smem.notes(group)[n] = n < tile.rows ? epilogue.note(tile.row + n) : make_int2(0, 0);
  if (L::WIDE && position == 0 && group == 1) hopper::named_barrier(10, 256);
  if constexpr (Tokens::BYTES == 2 && Tokens::SCALES == 0)
    multiply_wide<N, L, Format, Tokens>(smem, fold, group, thread, position, acc);
  else if constexpr (Tokens::HELD > 1)
    multiply_coarse<N, L, Format>(smem, fold, group, thread, position, acc);
  else if constexpr (Tokens::FOLDED)
    multiply_folded<N, L, Format, Tokens>(smem, fold, group, thread, position, L::K_BLOCKS, acc[0]);
  else
    multiply_native<N, K_GROUPS, L, Format>(smem, group, k_group, thread, position, acc[0]);
  if (K_GROUPS > 1) {
    float* sums = smem.sums(group) + thread;
    if (k_group == 1) {
      hopper::named_barrier(6 + group, 256);  // the previous tile's sums have been read
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums[i * 128] = acc[0][i];
      hopper::named_barrier(8 + group, 256);
      return;
    }
    hopper::named_barrier_arrive(6 + group, 256);
    hopper::named_barrier(8 + group, 256);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[0][i] += sums[i * 128];
  }
  hopper::named_barrier(2 + group, 128);  // the notes are there
#pragma unroll
  for (int held = 0; held < L::HELD; ++held)
    epilogue.template operator()<N>(acc[held], tile, tile.block * L::BLOCKS + group * L::HELD + held, group, thread,
                                    smem.notes(group), smem.maxima(group));
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
      hopper::barrier_init(smem.empty(i), 4 * L::OWNERS);    // the warps that multiply this stage
    }
    hopper::fence_barrier_init();
  }
  count_tiles<MAX_ROWS>(begins, experts, starts);
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
      // The second half of the pieces: k from 64 on.
      to[i] = hopper::swizzle_128(first + i * STRIDE, piece & 7) + (piece >> 3) * (L::TOKENS / 2);
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
          if (!L::WIDE && i * STRIDE >= padded) break;
          if (from[i] >= 0)
            hopper::copy_16(tokens + to[i % PERIOD] + i / PERIOD * (PERIOD * STRIDE * 128),
                            source + static_cast<int64_t>(from[i]) * (Tokens::BYTES * K), true);
        }
#pragma unroll
        for (int i = 0; i < SCALE_COUNT; ++i) {
          if (scale_from[i] < 0) continue;
          float* scale_to = smem.token_scales(ring.stage) + L::scale_place(thread + i * L::PRODUCERS);
          const float* one = scale + static_cast<int64_t>(scale_from[i]) * (K * Tokens::SCALES / 512);
          if (Tokens::SCALES == 4)
            hopper::copy_4(scale_to, one);
          else
            hopper::copy_16(scale_to, one, true);
        }
        if (L::WIDE)
          hopper::barrier_arrive_copies(smem.full(ring.stage));  // and consumers fence: no wait here
        else
          hopper::copy_commit();
        source += L::TEAMS * PIECES * 16, scale += L::TEAMS * (Tokens::SCALES / 4);
        ring.advance(L::TEAMS);
        if (!L::WIDE && issued >= L::LAG) {  // announced once it has landed, by the threads that copied it
          hopper::copy_wait<L::LAG>();
          hopper::fence_async();
          hopper::barrier_arrive(smem.full(landed.stage));
          landed.advance(L::TEAMS);
        }
      }
      begin = k - L::K_BLOCKS;
    }
    if (L::WIDE) hopper::copy_commit();
    hopper::copy_wait<0>();
    hopper::fence_async();
    for (int late = L::WIDE ? 0 : min(issued, L::LAG); late > 0; --late) {
      hopper::barrier_arrive(smem.full(landed.stage));
      landed.advance(L::TEAMS);
    }
  } else {
    hopper::registers_grow<L::CONSUMER>();
    int group = (role - 1) % L::OWNERS, k_group = (role - 1) / L::OWNERS;
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
