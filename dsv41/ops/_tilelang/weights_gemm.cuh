// Grouped GEMM whose weights are decoded in registers: out[token, feature] = sum_k w[feature, k] x[token, k].
//
// The weights are the A operand of wgmma and come from registers, decoded there from 4 or 8 bits (exact in
// bf16); the tokens are the B operand, bf16 in shared memory. So a tile of 8 tokens costs the tensor cores an
// eighth of a tile of 64 and the time of a decode step is the bytes of the weights. One producer warp group
// copies (weights with the copy engine, token rows with 16-byte gathers); consumer warp groups multiply. Two
// shapes: M_BLOCKS = 2, K_GROUPS = 1 (256 features, two groups of 128: the least traffic of token rows) and
// M_BLOCKS = 1, K_GROUPS = 2 (128 features, four groups that take turns at the blocks of k: enough warps to keep
// the decoding ahead of the memory). In one shape a token's sum has the same order whatever tile it is in.
//
// Packed weights: [expert][block of 64 features][block of 128 k][bytes in the order the threads read them],
// see dsv41/ops/_tilelang/pack.py. Scale codes likewise, as exponents of bf16.
#pragma once

namespace gemm {

constexpr int BLOCK_K = 128;
// Two bf16 with the exponent field `byte index` of `codes`: the scale of one 1 x 32 block, twice.
__device__ __forceinline__ uint32_t scale_pair(uint32_t codes, int index) {
  return __byte_perm(codes, 0, index | 0x40 | index << 8 | 0x4000) << 7;
}
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  __nv_bfloat162 x, y;
  memcpy(&x, &a, 4);
  memcpy(&y, &b, 4);
  __nv_bfloat162 z = __hmul2(x, y);
  uint32_t out;
  memcpy(&out, &z, 4);
  return out;
}

// MXFP4: a word holds the eight values of a thread for 16 k. Each 16-bit half holds four magnitudes (3 bits) and
// four signs so that shifts and masks alone put a pair at bf16's bits 15 and 8..6, times 2^-126.
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
  // The A fragment of k step `step` (0..7).
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[4]) const {
    uint32_t w = words[step], lo = scale_pair(low, step >> 1), hi = scale_pair(high, step >> 1);
    a[0] = multiply(w & 0x81C081C0u, lo);
    a[1] = multiply(w << 3 & 0x81C081C0u, hi);
    a[2] = multiply((w & 0x40074007u) * 66 & 0x81C081C0u, lo);  // << 6 and << 1 at once
    a[3] = multiply((w >> 3 & 0x01C001C0u) | (w << 2 & 0x80008000u), hi);
  }
};

// E4M3 with 32 x 32 scale tiles. Two words hold the eight values of a thread for 16 k; the pair of a register
// lies in the same byte of both halves.
struct Mxfp8Tiles {
  static constexpr int WORDS = 16;
  static constexpr int SCALES = 16;
  uint32_t words[WORDS];
  uint32_t codes;

  __device__ __forceinline__ void load(const uint8_t* values, const uint8_t* scales, int thread) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 v = *reinterpret_cast<const uint4*>(values + (i * 128 + thread) * 16);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
    codes = *reinterpret_cast<const uint32_t*>(scales + (thread >> 6) * 4);
  }
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[4]) const {
    uint32_t scale = scale_pair(codes, step >> 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t w = words[2 * step + i];
      a[2 * i] = multiply((w & 0x80008000u) | (w >> 4 & 0x07F007F0u), scale);
      a[2 * i + 1] = multiply((w << 8 & 0x80008000u) | (w << 4 & 0x07F007F0u), scale);
    }
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

template <int K, int MAX_ROWS, int M_BLOCKS, int K_GROUPS, class Format>
struct Layout {
  static constexpr int K_BLOCKS = K / BLOCK_K, BLOCKS = 2 * M_BLOCKS;  // BLOCKS: blocks of 64 features of a tile
  static constexpr int THREADS = 128 + 256 * K_GROUPS;
  // Registers of a producer and of a consumer thread: out of what the block got at its start, or it waits for ever.
  static constexpr int PRODUCER = 56, CONSUMER = K_GROUPS == 1 ? 224 : 104;
  static_assert(128 * PRODUCER + 256 * K_GROUPS * CONSUMER <= 65536 / THREADS / 8 * 8 * THREADS);
  static constexpr int VALUES = Format::WORDS * 512, SCALES = Format::SCALES, TOKENS = MAX_ROWS * 256;
  static constexpr int STAGE = TOKENS + BLOCKS * (VALUES + SCALES);
  static constexpr int SUMS = K_GROUPS == 1 ? 0 : MAX_ROWS * 512 * M_BLOCKS;  // a group's sums for the other
  // Schedule, table of rows, maxima, barriers.
  static constexpr int REST = SUMS + 4096 + MAX_ROWS * 4 + 2 * MAX_ROWS * 8 + 256;
  static constexpr int FIT = (232448 - REST) / STAGE;
  static constexpr int STAGES = FIT < 12 ? FIT : 12;
  static constexpr int BYTES = STAGES * STAGE + REST;
  uint8_t* base;
  __device__ __forceinline__ uint8_t* tokens(int stage) const { return base + stage * TOKENS; }
  __device__ __forceinline__ uint8_t* values(int stage, int block) const {
    return base + STAGES * TOKENS + (stage * BLOCKS + block) * VALUES;
  }
  __device__ __forceinline__ uint8_t* scales(int stage, int block) const {
    return base + STAGES * (TOKENS + BLOCKS * VALUES) + (stage * BLOCKS + block) * SCALES;
  }
  __device__ __forceinline__ uint8_t* rest() const { return base + STAGES * STAGE; }
  __device__ __forceinline__ float* sums(int group) const {
    return reinterpret_cast<float*>(rest() + group * (SUMS / 2));
  }
  __device__ __forceinline__ int* starts() const { return reinterpret_cast<int*>(rest() + SUMS); }  // 1,023 experts
  __device__ __forceinline__ int* rows() const { return reinterpret_cast<int*>(rest() + SUMS + 4096); }
  __device__ __forceinline__ __nv_bfloat16* maxima(int group) const {
    return reinterpret_cast<__nv_bfloat16*>(rest() + SUMS + 4096 + MAX_ROWS * 4 + group * MAX_ROWS * 8);
  }
  __device__ __forceinline__ uint64_t* full(int stage) const {
    return reinterpret_cast<uint64_t*>(rest() + REST - 256) + stage;
  }
  __device__ __forceinline__ uint64_t* empty(int stage) const { return full(stage) + 12; }
};

// Where a consumer stands in the ring of stages.
struct Ring {
  int stage;
  uint32_t phase;
  template <int STAGES>
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Multiplies one tile of N tokens with this group's features, over this group's blocks of k.
template <int N, int M_BLOCKS, int K_GROUPS, class L, class Format>
__device__ __forceinline__ void multiply_tile(const L& smem, int group, int k_group, int thread, Ring& ring,
                                              float (&acc)[M_BLOCKS][N / 2]) {
  constexpr int HALF = L::TOKENS / 2;
  Format weights[M_BLOCKS];
  uint32_t a[2][M_BLOCKS][4];
  int previous = -1;
#pragma unroll 1
  for (int block = 0; block < L::K_BLOCKS; ++block) {
    if (K_GROUPS > 1 && block % K_GROUPS != k_group) {
      ring.template next<L::STAGES>();
      continue;
    }
    hopper::barrier_wait(smem.full(ring.stage), ring.phase);
    hopper::fence_async();
#pragma unroll
    for (int m = 0; m < M_BLOCKS; ++m)
      weights[m].load(smem.values(ring.stage, group * M_BLOCKS + m), smem.scales(ring.stage, group * M_BLOCKS + m),
                      thread);
    uint64_t tokens = hopper::tile_descriptor(hopper::smem_address(smem.tokens(ring.stage)));
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      hopper::wgmma_wait<1>();  // a[step & 1] is free again
      if (step == 1 && previous >= 0 && (thread & 31) == 0) hopper::barrier_arrive(smem.empty(previous));
#pragma unroll
      for (int m = 0; m < M_BLOCKS; ++m) weights[m].decode(step, a[step & 1][m]);
      hopper::wgmma_fence();
#pragma unroll
      for (int m = 0; m < M_BLOCKS; ++m)
        hopper::wgmma_bf16_rs(acc[m], a[step & 1][m], tokens + ((step >> 2) * HALF + (step & 3) * 32) / 16, 1);
      hopper::wgmma_commit();
    }
    previous = ring.stage;
    ring.template next<L::STAGES>();
  }
  hopper::wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < M_BLOCKS; ++m) hopper::keep(acc[m]);
  if (previous >= 0 && (thread & 31) == 0) hopper::barrier_arrive(smem.empty(previous));
}

template <int N, int M_BLOCKS, int K_GROUPS, class L, class Format, class Epilogue>
__device__ __forceinline__ void finish_tile(const L& smem, int group, int k_group, int thread, Ring& ring,
                                            const Tile& tile, const Epilogue& epilogue) {
  thread = hopper::opaque(thread);
  float acc[M_BLOCKS][N / 2] = {};  // written before the first product: otherwise ptxas keeps it live for ever
  multiply_tile<N, M_BLOCKS, K_GROUPS, L, Format>(smem, group, k_group, thread, ring, acc);
  if (K_GROUPS > 1) {
    float* sums = smem.sums(group) + thread;
    if (k_group == 1) {
      hopper::named_barrier(4 + group, 256);  // the previous tile's sums have been read
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums[i * 128] = acc[0][i];
      hopper::named_barrier(6 + group, 256);
      return;
    }
    hopper::named_barrier_arrive(4 + group, 256);
    hopper::named_barrier(6 + group, 256);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[0][i] += sums[i * 128];
  }
#pragma unroll
  for (int m = 0; m < M_BLOCKS; ++m)
    epilogue.template operator()<N>(acc[m], tile, tile.block * L::BLOCKS + group * M_BLOCKS + m, group, thread,
                                    smem.maxima(group));
}

__device__ __forceinline__ uint32_t pair_bf16(float low, float high) {
  return static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
         static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

// The whole kernel. `rows` gives the row of `x` of a position: x + rows(position) * K. `features`: of one expert.
template <int K, int MAX_ROWS, int M_BLOCKS, int K_GROUPS, class Format, class Rows, class Epilogue>
__device__ __forceinline__ void run(const uint8_t* values, const uint8_t* scales, const void* x, const int* begins,
                                    int experts, int features, uint8_t* shared, const Rows& rows,
                                    const Epilogue& epilogue) {
  using L = Layout<K, MAX_ROWS, M_BLOCKS, K_GROUPS, Format>;
  L smem{shared};
  int thread = threadIdx.x & 127, role = threadIdx.x >> 7, blocks = features / (64 * L::BLOCKS);
  int* starts = smem.starts();
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::STAGES; ++i) {
      hopper::barrier_init(smem.full(i), 129);  // the producers' copies and the announcement of the weights
      hopper::barrier_init(smem.empty(i), 8);   // the warps that multiply this stage
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
  Ring ring{0, 0};

  if (role == 0) {
    hopper::registers_shrink<L::PRODUCER>();
    int* table = smem.rows();
    int piece = thread & 15, first = thread >> 4;
    for (int work = blockIdx.x; work < schedule.total; work += gridDim.x) {
      Tile tile = schedule(work);
      int padded = (tile.rows + 7) & ~7;
      hopper::named_barrier(1, 128);  // everybody is done with the previous table
      for (int i = thread; i < tile.rows; i += 128) table[i] = rows(tile.row + i);
      hopper::named_barrier(1, 128);
      int64_t block = (static_cast<int64_t>(tile.expert) * blocks + tile.block) * L::BLOCKS;
      for (int k = 0; k < L::K_BLOCKS; ++k) {
        hopper::barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
        uint64_t* full = smem.full(ring.stage);
        if (thread == 0) {
          hopper::barrier_expect(full, L::BLOCKS * (L::VALUES + L::SCALES));
          for (int b = 0; b < L::BLOCKS; ++b) {
            int64_t at = (block + b) * L::K_BLOCKS + k;
            hopper::bulk_copy(smem.values(ring.stage, b), values + at * L::VALUES, L::VALUES, full);
            hopper::bulk_copy(smem.scales(ring.stage, b), scales + at * L::SCALES, L::SCALES, full);
          }
        }
        uint8_t* tokens = smem.tokens(ring.stage) + (piece >> 3) * (L::TOKENS / 2);
        const uint8_t* source = static_cast<const uint8_t*>(x) + k * 256 + piece * 16;
#pragma unroll 4
        for (int row = first; row < padded; row += 8) {
          bool valid = row < tile.rows;
          int64_t at = valid ? table[row] : 0;
          hopper::copy_16(tokens + hopper::swizzle_128(row, piece & 7), source + at * (2 * K), valid);
        }
        hopper::barrier_arrive_copies(full);
        ring.template next<L::STAGES>();
      }
    }
  } else {
    hopper::registers_grow<L::CONSUMER>();
    int group = (role - 1) & 1, k_group = (role - 1) >> 1;
    for (int work = blockIdx.x; work < schedule.total; work += gridDim.x) {
      Tile tile = schedule(work);
#define DSV41_WIDTH(N)                                                                                       \
  if (N <= MAX_ROWS && tile.rows <= N) {                                                                     \
    finish_tile<(N <= MAX_ROWS ? N : 8), M_BLOCKS, K_GROUPS, L, Format>(smem, group, k_group, thread, ring, \
                                                                        tile, epilogue);                    \
    continue;                                                                                                \
  }
      DSV41_WIDTHS(DSV41_WIDTH)
#undef DSV41_WIDTH
    }
  }
}

}  // namespace gemm
