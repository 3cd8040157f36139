// Both products of mxfp4_moe in one launch, for few rows an expert: the time is the weights' bytes, so their copies
// never stop. Blocks take tiles of 256 features from one list by a counter, first those of gate and up, then those of
// down. The weights of a down tile come while the rows that it multiplies may still be in the making; whoever makes
// them took their tiles before, so nobody waits in a circle, however many blocks run. A tile's sums have one order,
// whichever block computes it.
#pragma once

namespace moe {

// A tile of the list; `rows` < 0: the list has ended.
struct Work {
  int expert, row, rows, block;
  int down;  // 0: gate and up
};

template <int HIDDEN, int INTER, int MAX_ROWS>
struct Stream : gemm::Layout<HIDDEN, MAX_ROWS, 1, gemm::Mxfp4, gemm::Split> {
  using L = gemm::Layout<HIDDEN, MAX_ROWS, 1, gemm::Mxfp4, gemm::Split>;
  static constexpr int GATE_UP_BLOCKS = INTER / 128, DOWN_BLOCKS = HIDDEN / 256;  // tiles of an expert's features
  static constexpr int MAXIMA = MAX_ROWS * 8;  // bytes of a group
  // The list as this block takes it. A slot is written again when its tile has been multiplied: even with one block
  // of k a tile, the ring of copies holds fewer tiles than there are slots.
  static constexpr int SLOTS = 16;
  static_assert(L::STAGES + 2 < SLOTS);
  static constexpr int BYTES = L::BYTES + SLOTS * (32 + 8);
  static_assert(BYTES <= 232448);
  __device__ __forceinline__ Work* work(int i) const {
    return reinterpret_cast<Work*>(this->base + L::BYTES + i % SLOTS * 32);
  }
  __device__ __forceinline__ uint64_t* taken(int i) const {
    return reinterpret_cast<uint64_t*>(this->base + L::BYTES + SLOTS * 32) + i % SLOTS;
  }
  __device__ __forceinline__ Work next(int i) const {
    hopper::barrier_wait(taken(i), i / SLOTS & 1);
    return *work(i);
  }
};

// End of a gate and up tile: the inner activations, relative to the largest scale of their 128, as sums of two E5M2.
template <int INTER, int N>
__device__ __forceinline__ void finish_gate_up(float (&acc)[N / 2], const Work& tile, int group, int thread,
                                               const int2* notes, uint32_t* maxima, int pitch, float limit, float unit,
                                               uint8_t* inner, float* inner_scale) {
  int warp = thread >> 5, lane = thread & 31, column = 2 * (lane & 3);
  uint32_t y[N / 8];  // in bf16, two tokens a word
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    int n = 8 * j + column;
    float2 gate = rounded(acc[4 * j], acc[4 * j + 1]), up = rounded(acc[4 * j + 2], acc[4 * j + 3]);
    float first = n < tile.rows ? __int_as_float(notes[n].x) : 0.0f;
    float second = n + 1 < tile.rows ? __int_as_float(notes[n + 1].x) : 0.0f;
    y[j] = gemm::pair_bf16(swiglu(gate.x, up.x, first, limit), swiglu(gate.y, up.y, second, limit));
    uint32_t amax = y[j] & 0x7FFF7FFFu;
#pragma unroll
    for (int d = 4; d < 32; d *= 2)  // a NaN does not count
      amax = gemm::bits(__hmax2(gemm::as_bf16(amax), gemm::as_bf16(__shfl_xor_sync(0xFFFFFFFFu, amax, d))));
    if (lane < 4) maxima[group * pitch + warp * (N / 2) + 4 * j + lane] = amax;
  }
  hopper::named_barrier(1, 512);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    int n = 8 * j + column;
    __nv_bfloat162 own = gemm::as_bf16(0), all = gemm::as_bf16(0);
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const uint32_t* of_warp = maxima + g * pitch + 4 * j + (lane & 3);
      __nv_bfloat162 amax = gemm::as_bf16(0);
#pragma unroll
      for (int w = 0; w < 4; ++w) amax = __hmax2(amax, gemm::as_bf16(of_warp[w * (N / 2)]));
      all = __hmax2(all, amax);
      if (g == group) own = amax;
    }
    int top[2] = {scale_code(fmaxf(1e-4f, __low2float(all))), scale_code(fmaxf(1e-4f, __high2float(all)))};
    int code[2] = {scale_code(fmaxf(1e-4f, __low2float(own))), scale_code(fmaxf(1e-4f, __high2float(own)))};
    float2 v = make_float2(__uint_as_float(y[j] << 16) * __int_as_float((254 - code[0]) << 23),
                           __uint_as_float(y[j] & 0xFFFF0000u) * __int_as_float((254 - code[1]) << 23));
    v = from_e4m3(__nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, __NV_E4M3));
    v.x *= power_of(code[0] - top[0] + SPLIT_SHIFT), v.y *= power_of(code[1] - top[1] + SPLIT_SHIFT);
    uint32_t lower = 0, upper = split(v, lower);
    // A token's upper and lower part together, transposed, then apart.
    uint32_t pair = hopper::transpose_8x8(__byte_perm(upper, lower, 0x5140));
    if (group == 0 && thread < 4) {
      float* to = inner_scale + static_cast<int64_t>(tile.row + n) * (INTER / 128) + tile.block;
      if (n < tile.rows) to[0] = power(top[0]) * (unit * SPLIT_UNIT);
      if (n + 1 < tile.rows) to[INTER / 128] = power(top[1]) * (unit * SPLIT_UNIT);
    }
    n = 8 * j + (lane >> 2);
    if (n < tile.rows) {
      int feature = group * 32 + warp * 8 + column;  // of the tile's 128
      uint8_t* to = inner + static_cast<int64_t>(tile.row + n) * (2 * INTER) + tile.block * 256 + feature;
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(__byte_perm(pair, 0, 0x4420));
      *reinterpret_cast<uint16_t*>(to + 128) = static_cast<uint16_t>(__byte_perm(pair, 0, 0x4431));
    }
  }
  hopper::named_barrier(1, 512);  // all is written, and the maxima may be overwritten
}

// Multiplies a tile with this group's 64 features and writes what it makes.
template <int HIDDEN, int INTER, int N, class L>
__device__ __forceinline__ void finish_work(const L& smem, uint2 fold, int group, int thread, int position, int blocks,
                                            const Work& tile, const int* order, const float* weights, float limit,
                                            float unit, void* inner, float* inner_scale, void* out, int* counts) {
  thread = hopper::opaque(thread);
  float acc[N / 2] = {};  // written before the first product: otherwise ptxas keeps it live for ever
  int2* notes = smem.notes(group);
  for (int n = thread; n < tile.rows; n += 128) {
    int at = __ldg(order + tile.row + n);
    notes[n].x = tile.down ? at : __float_as_int(__ldg(weights + at));
  }
  gemm::multiply_folded<N, L, gemm::Mxfp4, gemm::Split>(smem, fold, group, thread, position, blocks, acc);
  hopper::named_barrier(2 + group, 128);  // the notes are there
  if (tile.down) {
    gemm::Tile at{tile.expert, tile.row, tile.rows, tile.block};
    Down<HIDDEN, gemm::Split> end{order, static_cast<__nv_bfloat16*>(out), nullptr, 0.0f};
    end.template operator()<N>(acc, at, tile.block * 4 + group, group, thread, notes, nullptr);
  } else {
    finish_gate_up<INTER, N>(acc, tile, group, thread, notes, reinterpret_cast<uint32_t*>(smem.maxima(0)),
                             smem.MAXIMA / 4, limit, unit, static_cast<uint8_t*>(inner), inner_scale);
    if (group == 0 && thread == 0) {
      __threadfence();
      atomicAdd(counts + tile.expert, 1);
    }
  }
  hopper::named_barrier(2 + group, 128);  // the notes may be overwritten
}

// `counts`: of each expert the finished tiles of gate and up, then the tiles that blocks have taken; zeros before.
template <int HIDDEN, int INTER, int MAX_ROWS>
__device__ __forceinline__ void products(const uint8_t* w13, const uint8_t* w13_scale, const uint8_t* w2,
                                         const uint8_t* w2_scale, const void* x, const float* x_scale,
                                         const int* begins, const int* order, const float* weights, int experts,
                                         int top_k, int base, int base2, float unit2, float limit, void* inner,
                                         float* inner_scale, void* out, int* counts, uint8_t* shared) {
  using L = Stream<HIDDEN, INTER, MAX_ROWS>;
  using Ring = gemm::Ring<L::STAGES>;
  L smem{shared};
  int role = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  int* starts = smem.starts();
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::STAGES; ++i) {
      hopper::barrier_init(smem.full(i), L::PRODUCERS + 1);
      hopper::barrier_init(smem.empty(i), 16);
    }
    for (int i = 0; i < L::SLOTS; ++i) hopper::barrier_init(smem.taken(i), 1);
    hopper::fence_barrier_init();
  }
  gemm::count_tiles<MAX_ROWS>(begins, experts, starts);

  if (role == 0) {
    hopper::registers_shrink<L::PRODUCER>();
    if (thread < 32) {
      if (!hopper::elect()) return;
      int first = starts[experts] * L::GATE_UP_BLOCKS, total = first + starts[experts] * L::DOWN_BLOCKS;
      gemm::Schedule<MAX_ROWS> gate_up{starts, begins, experts, L::GATE_UP_BLOCKS, first};
      gemm::Schedule<MAX_ROWS> down{starts, begins, experts, L::DOWN_BLOCKS, total - first};
      Ring ring(0);
      int next = atomicAdd(counts + experts, 1);
      for (int i = 0;; ++i) {
        Work tile{0, 0, -1, 0, next >= first};
        if (next < total) {
          gemm::Tile at = tile.down ? down(next - first) : gate_up(next);
          tile.expert = at.expert, tile.row = at.row, tile.rows = at.rows, tile.block = at.block;
        }
        *smem.work(i) = tile;
        hopper::barrier_arrive(smem.taken(i));
        if (tile.rows < 0) return;
        int blocks = tile.down ? INTER / 128 : HIDDEN / 128;
        int64_t at = static_cast<int64_t>(tile.expert) * (tile.down ? L::DOWN_BLOCKS : L::GATE_UP_BLOCKS) + tile.block;
        at *= 4 * blocks;
        const uint8_t* value = (tile.down ? w2 : w13) + at * L::VALUES;
        const uint8_t* scale = (tile.down ? w2_scale : w13_scale) + at * L::SCALES;
        int ahead = max(blocks - 3, 0);  // when the next tile is asked for: late, so that no block keeps two to the end
#pragma unroll 1
        for (int k = 0; k < blocks; ++k, value += 2 * L::VALUES, scale += 2 * L::SCALES) {
          uint64_t* full = smem.full(ring.stage);
          hopper::barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
          hopper::barrier_expect(full, 4 * (L::VALUES + L::SCALES));
#pragma unroll
          for (int b = 0; b < 4; b += 2) {  // two blocks of 64 features lie together
            hopper::bulk_copy(smem.values(ring.stage, b), value + b * (blocks * L::VALUES), 2 * L::VALUES, full);
            hopper::bulk_copy(smem.scales(ring.stage, b), scale + b * (blocks * L::SCALES), 2 * L::SCALES, full);
          }
          ring.advance(1);
          if (k == ahead) next = atomicAdd(counts + experts, 1);
        }
      }
    }
    // A thread copies one 16-byte piece of every STRIDE-th row.
    int team = (thread - 32) / L::PRODUCERS;
    thread = (thread - 32) % L::PRODUCERS;
    constexpr int PIECES = 16, STRIDE = L::PRODUCERS / PIECES, COUNT = (MAX_ROWS + STRIDE - 1) / STRIDE;
    constexpr int PERIOD = 4;  // after which rows are swizzled alike
    static_assert(PERIOD * STRIDE % 8 == 0);
    constexpr int SCALE_COUNT = (MAX_ROWS + L::PRODUCERS - 1) / L::PRODUCERS;
    int piece = thread % PIECES, first = thread / PIECES, to[PERIOD];
#pragma unroll
    for (int i = 0; i < PERIOD; ++i) {
      int row = first + i * STRIDE;  // lower parts lie eight rows after their upper ones
      to[i] = hopper::swizzle_128(row + (row & ~7) + (piece & 8), piece & 7);
    }
    Ring ring(team), landed(team);
    int pending = 0, begin = team;  // blocks copied and not announced; the team's first block of the tile
    for (int i = 0;; ++i) {
      Work tile = smem.next(i);
      if (tile.rows < 0) break;
      int blocks = tile.down ? INTER / 128 : HIDDEN / 128;
      const int* done = counts + tile.expert;
      int wanted = (starts[tile.expert + 1] - starts[tile.expert]) * L::GATE_UP_BLOCKS;
      if (tile.down && !__all_sync(0xFFFFFFFFu, hopper::count_reached(done, wanted))) {
        // What is missing may be the tile that these copies are for.
        hopper::copy_wait<0>();
        hopper::fence_async();
        for (; pending; --pending, landed.advance(L::TEAMS)) hopper::barrier_arrive(smem.full(landed.stage));
        hopper::wait_for_count(done, wanted);
      }
      int from[COUNT], scale_from[SCALE_COUNT];
#pragma unroll
      for (int r = 0; r < COUNT; ++r) {
        int row = first + r * STRIDE, at = tile.row + row;
        from[r] = row >= tile.rows ? -1 : tile.down ? at : __ldg(order + at) / top_k;
      }
#pragma unroll
      for (int r = 0; r < SCALE_COUNT; ++r) {
        int row = thread + r * L::PRODUCERS, at = tile.row + row;
        scale_from[r] = row >= tile.rows ? -1 : tile.down ? at : __ldg(order + at) / top_k;
      }
      int k = begin;
      const uint8_t* source = static_cast<const uint8_t*>(tile.down ? inner : x) + piece * 16 + k * (PIECES * 16);
      const float* scale = (tile.down ? inner_scale : x_scale) + k;
      for (; k < blocks; k += L::TEAMS) {
        hopper::barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
        uint8_t* tokens = smem.tokens(ring.stage);
#pragma unroll
        for (int r = 0; r < COUNT; ++r) {
          if (r * STRIDE >= tile.rows) break;
          if (from[r] >= 0)
            hopper::copy_16(tokens + to[r % PERIOD] + r / PERIOD * (PERIOD * STRIDE * 256),
                            source + static_cast<int64_t>(from[r]) * (blocks * 256), true);
        }
#pragma unroll
        for (int r = 0; r < SCALE_COUNT; ++r)
          if (scale_from[r] >= 0)
            hopper::copy_4(smem.token_scales(ring.stage) + thread + r * L::PRODUCERS,
                           scale + static_cast<int64_t>(scale_from[r]) * blocks);
        hopper::copy_commit();
        source += L::TEAMS * PIECES * 16, scale += L::TEAMS;
        ring.advance(L::TEAMS);
        if (++pending > L::LAG) {  // announced once it has landed, by the threads that copied it
          hopper::copy_wait<L::LAG>();
          hopper::fence_async();
          hopper::barrier_arrive(smem.full(landed.stage));
          landed.advance(L::TEAMS);
          --pending;
        }
      }
      begin = k - blocks;
    }
    hopper::copy_wait<0>();
    hopper::fence_async();
    for (; pending; --pending, landed.advance(L::TEAMS)) hopper::barrier_arrive(smem.full(landed.stage));
  } else {
    hopper::registers_grow<L::CONSUMER>();
    int group = role - 1, position = 0;
    for (int i = 0;; ++i) {
      Work tile = smem.next(i);
      if (tile.rows < 0) return;
      int blocks = tile.down ? INTER / 128 : HIDDEN / 128;
      uint2 fold = gemm::Mxfp4::folding(tile.down ? base2 : base);
#define DSV41_WIDTH(N)                                                                                          \
  if (N <= MAX_ROWS && tile.rows <= N) {                                                                        \
    finish_work<HIDDEN, INTER, (N <= MAX_ROWS ? N : 8)>(smem, fold, group, thread, position, blocks, tile, order, \
                                                        weights, limit, unit2, inner, inner_scale, out, counts); \
    position += blocks;                                                                                         \
    continue;                                                                                                   \
  }
      DSV41_WIDTHS(DSV41_WIDTH)
#undef DSV41_WIDTH
    }
  }
}

}  // namespace moe
