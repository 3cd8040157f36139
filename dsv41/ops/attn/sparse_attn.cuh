// Sparse attention over cache records: one block attends one query row (up to 64 heads) at a time.
//
// Four warp groups. Two producers fetch the records of a tile of 64 keys, decode them to bf16 (exact) and lay them
// out for the tensor cores. The first consumer makes the scores, the softmax and columns 0..255 of the output; the
// second takes the weights and makes columns 256..511, and its first warp, the scout, finds the tiles and their
// records for everybody. A decoded tile is key and value, handed over and given back in halves of 256 columns.
// Tiles without a key are skipped, but for the last of a row, which ends it.
namespace sparse_attn {
using namespace hopper;

// A tile with keys, or the last of its row: what the scout writes and the others read.
struct alignas(16) Tile {
  int item, last, near, unused;  // `item` is -1 when there is none left
  unsigned long long keys;       // a bit for each that is there
  const uint8_t* records[KEYS];  // null where there is none
};
// The scout is AHEAD tiles ahead of the second consumer. By then everybody has read what it overwrites.
constexpr int AHEAD = 6, TILES = 8;

// An argument that is a pointer here and an address in TileLang: tensors may be views of any strides.
struct Address {
  const void* at;
  template <typename P>
  __device__ __forceinline__ Address(P address) : at((const void*)(address)) {}
  template <typename T>
  __device__ __forceinline__ T* as() const { return static_cast<T*>(const_cast<void*>(at)); }
};

struct Shared {
  alignas(1024) uint8_t q[TILE_BYTES];
  uint8_t kv[2][TILE_BYTES];
  uint8_t raw[PRODUCERS][8 * RAW_ROW];  // of each producer warp: its 8 records, or halves of them
  uint4 weights[4][128];
  float2 factors[128];
  Tile tiles[TILES];
  int spoiled[4];
  uint64_t full[2][2], empty[2][2], posted[TILES], sent, taken;
};
static_assert(sizeof(Shared) == 230400, "SHARED_BYTES of tilelang_cuda.py");

// ---- what a block does in which order --------------------------------------------------------------------
struct Work {
  int rows, heads, head_tiles, splits, window_tiles, tiles;
  __device__ __forceinline__ int items() const { return rows * head_tiles * splits; }
  __device__ __forceinline__ int row(int item) const { return item / (head_tiles * splits); }
  __device__ __forceinline__ int head(int item) const { return item / splits % head_tiles * HEADS; }
  __device__ __forceinline__ int first_tile(int item) const { return item % splits * tiles / splits; }
  __device__ __forceinline__ int end_tile(int item) const { return (item % splits + 1) * tiles / splits; }
};

// Lanes of a warp that arrive. (For compute-sanitizer's racecheck all of them: it does not know that __syncwarp orders
// what the others did.)
constexpr int ARRIVING = 1;
__device__ __forceinline__ void warp_arrive(uint64_t* bar) {
  __syncwarp();
  if ((threadIdx.x & 31) < ARRIVING) barrier_arrive(bar);
}
__device__ __forceinline__ void init_warps(uint64_t* bar, int warps) { barrier_init(bar, warps * ARRIVING); }

// ---- scout -----------------------------------------------------------------------------------------------
// One warp. Ids are read one tile before they are looked at.
struct Scout {
  const Work& work;
  const Records &window, &compressed;
  Shared& shared;
  int lane;
  int item, row, tile, end, number;
  int low, high;  // ids `lane` and `lane + 32` of the tile

  __device__ __forceinline__ void read_ids() {
    low = high = -1;
    const bool near = tile < work.window_tiles;
    const int at = (near ? tile : tile - work.window_tiles) * KEYS + lane;
    const int* ids = near ? window.ids : compressed.ids;
    ids += (near ? window.ids_stride : compressed.ids_stride) * row;
    const int count = near ? window.count : compressed.count;
    if (at < count) low = ids[at];
    if (at + 32 < count) high = ids[at + 32];
  }
  __device__ __forceinline__ void start(int first) {
    item = first;
    if (item >= work.items()) return;
    row = work.row(item), tile = work.first_tile(item), end = work.end_tile(item);
    read_ids();
  }
  __device__ __forceinline__ void advance() {
    if (++tile < end)
      read_ids();
    else
      start(item + gridDim.x);
  }
  __device__ __forceinline__ unsigned long long keys() {
    const uint32_t slots = tile < work.window_tiles ? window.slots : compressed.slots;
    if (static_cast<uint32_t>(low) >= slots) low = -1;
    if (static_cast<uint32_t>(high) >= slots) high = -1;
    return __ballot_sync(~0u, low >= 0) | static_cast<unsigned long long>(__ballot_sync(~0u, high >= 0)) << 32;
  }
  // Writes the next tile, or that there is none, once; asks for the ids behind it.
  template <int WINDOW, int COMPRESSED>
  __device__ __forceinline__ void post() {
    if (item == -1) return;
    Tile& to = shared.tiles[number % TILES];
    if (item >= work.items()) {
      item = -1;
      to.records[lane] = to.records[lane + 32] = nullptr;
      if (lane == 0) to.item = -1, to.last = to.near = 0;
    } else {
      unsigned long long bits = keys();
      while (bits == 0 && tile + 1 < end) {
        advance();
        bits = keys();
      }
      const bool near = tile < work.window_tiles;
      // By value: a choice of addresses would put both into local memory.
      const Records from = near ? window : compressed;
      const int bytes = near ? BYTES<WINDOW> : BYTES<COMPRESSED>;
      to.records[lane] = from.record(low, bytes);
      to.records[lane + 32] = from.record(high, bytes);
      if (lane == 0) to.keys = bits, to.item = item, to.last = tile + 1 == end, to.near = near;
      advance();
    }
    warp_arrive(&shared.posted[number++ % TILES]);
  }
};

// ---- producers -------------------------------------------------------------------------------------------
template <int WINDOW, int COMPRESSED>
struct Producer {
  const Work& work;
  const Records &window, &compressed;
  Shared& shared;
  // This thread's row of a tile, its segment (0..3) of 32 columns among those of a half, and its row's bytes.
  int row, segment;
  uint8_t* raw;
  // The first row of this warp, and its bytes.
  int row_0;
  uint8_t* raw_0;

  // What a producer keeps of a tile.
  struct Part {
    int item, slot;  // `slot` of the scout's tiles
    bool near;
    const uint8_t* record;  // of this thread's row, null where there is none
  };
  __device__ __forceinline__ Part part(int number) const {
    barrier_wait(&shared.posted[number % TILES], number / TILES & 1);
    const Tile& tile = shared.tiles[number % TILES];
    const int4 head = *reinterpret_cast<const int4*>(&tile);
    return {head.x, number % TILES, head.z != 0, tile.records[row]};
  }

  // Copies this warp's records to its place: whole ones (NVFP4), or halves of 256 columns with all scales (MXFP8);
  // zeros where there is none. Layouts that are read directly need no copy.
  __device__ __forceinline__ void fetch(const Part& of, int half) {
    if (of.item < 0 || !(of.near ? COPIED<WINDOW> : COPIED<COMPRESSED>)) return;
    // Sixteen lanes copy 256 bytes of one record: shared memory takes what a line of memory holds at once.
    const bool small = (of.near ? WINDOW : COMPRESSED) == NVFP4;
    const int lane = opaque(threadIdx.x & 31);
    const uint8_t* const* records = shared.tiles[of.slot].records + row_0;
    const int offset = (lane & 15) * 16 + half * 256;
    uint8_t* to = raw_0 + (lane >> 4) * RAW_ROW + (lane & 15) * 16;
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      const uint8_t* record = records[k + (lane >> 4)];
      copy_16(to + k * RAW_ROW, record + offset, record != nullptr);
    }
    // The rest, or all scales: two pieces a record or one.
    const int last = small ? lane >> 1 : lane, piece = small ? lane & 1 : 0;
    if (last < 8) {
      const uint8_t* record = records[last];
      copy_16(raw_0 + last * RAW_ROW + 256 + piece * 16, record + (small ? 256 : 512) + piece * 16, record != nullptr);
    }
    copy_commit();
  }

  // Decodes a half of this warp's records of tile `now` when `empty` lets it, and fetches what comes next as soon as
  // the bytes are read.
  template <int LAYOUT>
  __device__ __forceinline__ uint32_t decode_half(uint8_t* to, int half, const Records& from, const Part& now,
                                                  const Part& then, uint64_t* empty, int turn) {
    uint32_t bad = 0;
    if constexpr (COPIED<LAYOUT>) {
      constexpr int WORDS = LAYOUT == NVFP4 ? 4 : 8;
      if (LAYOUT == MXFP8 || half == 0) {
        copy_wait<0>();
        __syncwarp();
      }
      uint32_t words[2][WORDS], scales[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = e * 4 + segment;
        if constexpr (LAYOUT == NVFP4) {
          read_16(words[e], raw + half * 128 + at * 16);
          scales[e] = *reinterpret_cast<const uint16_t*>(raw + 256 + half * 16 + at * 2);
        } else {
          read_16(words[e], raw + at * 32);
          read_16(words[e] + 4, raw + at * 32 + 16);
          scales[e] = raw[256 + half * 8 + at];
        }
      }
      const bool simple = !__any_sync(~0u, unusual<LAYOUT>(scales[0] | scales[1]));
      __syncwarp();  // all have read
      if (half == 1)
        fetch(then, 0);
      else if (LAYOUT == MXFP8)
        fetch(now, 1);
      barrier_wait(empty, turn);
      if (simple) {
#pragma unroll
        for (int e = 0; e < 2; ++e) bad |= decode<LAYOUT, true>(to, row, e * 4 + segment, half, words[e], scales[e]);
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) bad |= decode<LAYOUT, false>(to, row, e * 4 + segment, half, words[e], scales[e]);
      }
    } else {
      barrier_wait(empty, turn);
#pragma unroll 1
      for (int e = 0; e < 2; ++e) {
        uint32_t words[16], scale;
        read_direct<LAYOUT>(words, scale, from, now.record, half * 8 + e * 4 + segment);
        bad |= decode<LAYOUT, false>(to, row, e * 4 + segment, half, words, scale);
      }
      if (half == 1) fetch(then, 0);
    }
    return bad;
  }

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) % PRODUCERS;
    row = opaque(warp * 8 + (lane & 7)), segment = opaque(lane >> 3);
    raw = shared.raw[0] + opaque(row * RAW_ROW);
    row_0 = warp * 8, raw_0 = shared.raw[warp];
    int tile = 0, buffer = 0, turn = 0, current = -1, items = 0;  // counts of this block
    Part now = part(tile);
    fetch(now, 0);
    while (now.item >= 0) {
      const Part then = part(++tile);
      items += now.item != current, current = now.item;
      uint32_t bad = 0;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        uint8_t* to = shared.kv[buffer] + half * HALF_BYTES;
        uint64_t* empty = &shared.empty[buffer][half];
        bad |= now.near ? decode_half<WINDOW>(to, half, window, now, then, empty, turn ^ 1)
                        : decode_half<COMPRESSED>(to, half, compressed, now, then, empty, turn ^ 1);
        if (half == 1 && bad != 0) atomicExch(&shared.spoiled[opaque(items) & 3], items);
        fence_async();
        warp_arrive(&shared.full[buffer][half]);
      }
      buffer ^= 1, turn ^= buffer == 0;
      now = then;
    }
  }
};

// ---- consumers -------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t pair(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}

// A thread's output: two accumulators of 128 columns. (One of 256 does not compile for blocks of 512 threads.)
typedef float Out[2][64];

// Adds weights (a thread's A fragments of four k steps) times this half of a tile's values to the output.
__device__ __forceinline__ void add_values(Out& out, uint32_t (&weights)[4][4], uint32_t tile, bool first) {
  const uint64_t values = tile_descriptor(tile, COLUMN_BYTES, 1024);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int part = 0; part < 2; ++part)
      wgmma_bf16_rs_t(out[part], weights[k], values + (k * 2048 + part * 2 * COLUMN_BYTES >> 4), k > 0 || !first);
  }
  wgmma_commit();
  wgmma_wait<0>();
  keep(out[0]), keep(out[1]);
}

__device__ __forceinline__ void scale_rows(Out& out, float2 by) {
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i >> 6][i & 63] *= i & 2 ? by.y : by.x;
}

// Angles that the last 64 columns of a row are rotated back by, or null.
struct Angles {
  const float *cos, *sin;
  long long cos_row, sin_row;
};

// Two neighbouring columns of the output, rounded, and rotated back by angle `at` of the row where there are angles.
__device__ __forceinline__ uint32_t rotated(float a, float b, const Angles& angles, int row, int at) {
  const uint32_t two = pair(a, b);
  if (angles.cos == nullptr) return two;
  const float c = __ldg(angles.cos + row * angles.cos_row + at), s = -__ldg(angles.sin + row * angles.sin_row + at);
  a = __uint_as_float(two << 16), b = __uint_as_float(two & 0xFFFF0000u);
  return pair(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)), __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
}

struct Result {
  uint8_t* out;
  long long out_row, out_head;
  Angles angles;
  float* partial;
  // Behind the parts: the maximum and the sum of part `part` of all.
  __device__ __forceinline__ float* sums(const Work& work, size_t part) const {
    return partial + static_cast<size_t>(work.rows) * work.splits * work.heads * WIDTH + 2 * part;
  }
};

// This thread's part of the output: rows `row` and `row + 8` of the head tile, columns of one half.
__device__ __forceinline__ void write_out(Out& out, float2 factor, const Work& work, const Result& result,
                                          int item, int half) {
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2), quad = lane & 3;
  const int head = work.head(item);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = head + row + 8 * r;
    const float by = r ? factor.y : factor.x;
    if (work.splits > 1) {
      if (at >= work.heads) continue;
      const size_t part = static_cast<size_t>(work.row(item) * work.splits + item % work.splits) * work.heads + at;
      float* to = result.partial + part * WIDTH + half * HALF + 2 * quad;
#pragma unroll
      for (int j = 0; j < 32; ++j)
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(out[j >> 4][4 * (j & 15) + 2 * r], out[j >> 4][4 * (j & 15) + 2 * r + 1]);
      continue;
    }
    uint8_t* to = result.out + 2 * (work.row(item) * result.out_row + at * result.out_head) + half * 512;
    to += (quad & 1) * 16 + (quad >> 1) * 8;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      // Four threads hold 16 bytes of two column groups in pieces of 4: each gathers half of one.
      uint32_t a[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * ((j & 15) + i) + 2 * r;
        const float low = out[j >> 4][at] * by, high = out[j >> 4][at + 1] * by;
        // Columns 448 and up: eight groups of four angles.
        a[i] = half == 1 && j >= 24 ? rotated(low, high, result.angles, work.row(item), 4 * (j + i - 24) + quad)
                                    : pair(low, high);
      }
      const uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? a[0] : a[1], 1);
      (lane & 1 ? a[0] : a[1]) = other;
      if (at < work.heads) *reinterpret_cast<uint2*>(to + 16 * j) = make_uint2(a[0], a[1]);
    }
  }
}

// The queries of all heads: address and strides in elements.
struct Queries {
  const uint8_t* at;
  long long row, head;
};

// Copies those of an item, if there is one, to shared memory in the tensor cores' layout; 128 threads.
__device__ __forceinline__ void copy_q(const Work& work, Shared& shared, const Queries& q, int item) {
  if (item >= work.items()) return;
  // A thread has a piece of every second head.
  const int piece = threadIdx.x & 63, odd = threadIdx.x >> 6 & 1, first = work.head(item) + odd;
  const uint8_t* from = q.at + 2 * (work.row(item) * q.row + first * q.head) + piece * 16;
  uint8_t* to = shared.q + (piece >> 3) * COLUMN_BYTES + odd * 128;
  const int place = ((piece & 7) ^ odd) << 4;  // in the row of the first; heads 2, 4 and 6 further differ in two bits
#pragma unroll 8
  for (int i = 0; i < HEADS / 2; ++i) {
    copy_16(to + i * 256 + (place ^ (i & 3) << 5), from, first + 2 * i < work.heads);
    from += 4 * q.head;
  }
  copy_commit();
}

// Scores, softmax, columns 0..255. Weights are rounded to bf16 relative to the running maximum (`top`, its log2),
// so that a key that outweighs the others is not rounded at all.
__device__ __forceinline__ void consume_scores(const Work& work, Shared& shared, const Queries& q_from,
                                               const Result& result, const float* sink, float* lse, float scale) {
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, row = (thread >> 5) * 16 + (lane >> 2);
  const uint64_t q = tile_descriptor(smem_address(shared.q));
  const float scale_2 = scale * 1.44269504088896340736f;
  Out out;
  int buffer = 0, turn = 0, sent_turn = 0, number = 0, tiles = 0;
  copy_q(work, shared, q_from, blockIdx.x);
  for (int item = blockIdx.x; item < work.items(); item += gridDim.x) {
    ++number;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    bool first = true, last;
    copy_wait<0>();
    fence_async();
    named_barrier(1, 128);
    do {
      const uint64_t tile = tile_descriptor(smem_address(shared.kv[buffer]));
      float s[32];
      barrier_wait(&shared.full[buffer][0], turn);
      const unsigned long long keys = shared.tiles[tiles % TILES].keys;
      last = shared.tiles[tiles++ % TILES].last;
      wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half) barrier_wait(&shared.full[buffer][1], turn);
#pragma unroll
        for (int k = half * 16; k < half * 16 + 16; ++k) {
          const uint32_t at = ((k >> 2) * COLUMN_BYTES + (k & 3) * 32) >> 4;  // descriptors count in 16 bytes
          wgmma_bf16_ss(s, q + at, tile + at, k > 0);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      keep(s);
      if (last) {
        named_barrier(1, 128);  // all four warps are done with Q
        copy_q(work, shared, q_from, item + gridDim.x);
      }
      // Softmax: element i is key 8 * (i / 4) + 2 * (lane % 4) + i % 2 of row (i & 2 ? row + 8 : row).
      float new_top[2] = {-INFINITY, -INFINITY};
      if (keys != ~0ull) {
        const unsigned long long mine = keys >> 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (!(mine >> (8 * (i >> 2) + (i & 1)) & 1)) s[i] = -INFINITY;
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) new_top[i >> 1 & 1] = fmaxf(new_top[i >> 1 & 1], s[i]);
      float2 rescale;
      float base[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        new_top[r] = fmaxf(new_top[r], __shfl_xor_sync(~0u, new_top[r], 1));
        new_top[r] = fmaxf(new_top[r], __shfl_xor_sync(~0u, new_top[r], 2));
        new_top[r] *= scale_2;
        // A maximum that grows by less stays: weights up to 65536 instead of 1 are no less exact.
        if (!(new_top[r] > top[r] + 16)) new_top[r] = top[r];
        base[r] = new_top[r] == -INFINITY ? 0.f : new_top[r];
      }
      rescale.x = exp2f(top[0] - base[0]), rescale.y = exp2f(top[1] - base[1]);
      top[0] = new_top[0], top[1] = new_top[1];
      float added[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        s[i] = exp2f(fmaf(s[i], scale_2, -base[i >> 1 & 1]));
        added[i >> 1 & 1] += s[i];
      }
      sum[0] = sum[0] * rescale.x + added[0], sum[1] = sum[1] * rescale.y + added[1];
      uint32_t weights[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[k][i] = pair(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
      barrier_wait(&shared.taken, sent_turn ^ 1);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        shared.weights[k][thread] = make_uint4(weights[k][0], weights[k][1], weights[k][2], weights[k][3]);
      shared.factors[thread] = rescale;
      warp_arrive(&shared.sent);
      sent_turn ^= 1;
      if (!first && __any_sync(~0u, rescale.x != 1 || rescale.y != 1)) scale_rows(out, rescale);
      add_values(out, weights, smem_address(shared.kv[buffer]), first);
      warp_arrive(&shared.empty[buffer][0]);
      buffer ^= 1, turn ^= buffer == 0;
      first = false;
    } while (!last);

    const bool spoiled = shared.spoiled[number & 3] == number;
    const int head = work.head(item) + row;
    float2 factor = make_float2(1.f, 1.f);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      if (spoiled) sum[r] = NAN;
      const int at = head + 8 * r;
      const bool mine = at < work.heads && (lane & 3) == 0;
      if (work.splits > 1) {
        if (mine) {
          const size_t part = static_cast<size_t>(work.row(item) * work.splits + item % work.splits) * work.heads + at;
          float* sums = result.sums(work, part);
          sums[0] = top[r], sums[1] = sum[r];
        }
        continue;
      }
      const float base = top[r] == -INFINITY ? 0.f : top[r];
      float total = sum[r];
      if (sink != nullptr && at < work.heads) total += exp2f(sink[at] * 1.44269504088896340736f - base);
      (r ? factor.y : factor.x) = total == 0 ? 0.f : 1 / total;
      if (mine && lse != nullptr)
        lse[static_cast<size_t>(work.row(item)) * work.heads + at] = logf(sum[r]) + base * 0.69314718055994530942f;
    }
    barrier_wait(&shared.taken, sent_turn ^ 1);
    shared.factors[thread] = factor;
    warp_arrive(&shared.sent);
    sent_turn ^= 1;
    write_out(out, factor, work, result, item, 0);
  }
}

// Columns 256..511, and the scout.
template <int WINDOW, int COMPRESSED>
__device__ __forceinline__ void consume_values(const Work& work, const Records& near, const Records& far, Shared& shared,
                                               const Result& result) {
  const int thread = threadIdx.x & 127;
  Out out;
  int buffer = 0, turn = 0, sent_turn = 0, tiles = 0;
  Scout scout{work, near, far, shared, thread};
  if (thread < 32) {
    scout.number = 0;
    scout.start(blockIdx.x);
#pragma unroll 1
    for (int i = 0; i < AHEAD; ++i) scout.post<WINDOW, COMPRESSED>();
  }
  for (int item = blockIdx.x; item < work.items(); item += gridDim.x) {
    bool first = true, last;
    do {
      const uint32_t tile = smem_address(shared.kv[buffer]) + HALF_BYTES;
      barrier_wait(&shared.full[buffer][1], turn);
      last = shared.tiles[tiles++ % TILES].last;
      barrier_wait(&shared.sent, sent_turn);
      uint32_t weights[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 v = shared.weights[k][thread];
        weights[k][0] = v.x, weights[k][1] = v.y, weights[k][2] = v.z, weights[k][3] = v.w;
      }
      const float2 rescale = shared.factors[thread];
      warp_arrive(&shared.taken);
      sent_turn ^= 1;
      if (!first && __any_sync(~0u, rescale.x != 1 || rescale.y != 1)) scale_rows(out, rescale);
      add_values(out, weights, tile, first);
      warp_arrive(&shared.empty[buffer][1]);
      if (thread < 32) scout.post<WINDOW, COMPRESSED>();
      buffer ^= 1, turn ^= buffer == 0;
      first = false;
    } while (!last);
    barrier_wait(&shared.sent, sent_turn);
    const float2 factor = shared.factors[thread];
    warp_arrive(&shared.taken);
    sent_turn ^= 1;
    write_out(out, factor, work, result, item, 1);
  }
}

// Strides in elements of their tensors, page strides in bytes. `sink`, `lse` and the angles may be null. With splits > 1 the
// results are parts: [rows, splits, heads, 512] f32 sums, then (log2 of the maximum, sum) pairs.
template <int WINDOW, int COMPRESSED>
__device__ __forceinline__ void attend(Address q, long long q_row, long long q_head, int rows, int heads,
                                       Address window, long long window_stride, int window_page, int window_slots,
                                       Address window_ids, long long window_ids_stride, int window_count,
                                       Address compressed, long long compressed_stride, int compressed_page,
                                       int compressed_slots, Address compressed_ids,
                                       long long compressed_ids_stride, int compressed_count, Address sink,
                                       Address cos, long long cos_row, Address sin, long long sin_row, float scale,
                                       int splits, Address out, long long out_row, long long out_head,
                                       Address lse, Address scratch, void* shared_memory) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  if (threadIdx.x == 0) {
    for (int b = 0; b < 2; ++b) {
      for (int half = 0; half < 2; ++half) init_warps(&shared.full[b][half], PRODUCERS), init_warps(&shared.empty[b][half], 4);
    }
    for (int i = 0; i < TILES; ++i) init_warps(&shared.posted[i], 1);
    init_warps(&shared.sent, 4), init_warps(&shared.taken, 4);
    for (int i = 0; i < 4; ++i) shared.spoiled[i] = 0;
    fence_barrier_init();
  }
  __syncthreads();
  const Records near = {window.as<const uint8_t>(), window_stride, static_cast<uint32_t>(window_page),
                        static_cast<uint32_t>(window_slots), window_ids.as<const int>(), window_ids_stride,
                        window_count};
  const Records far = {compressed.as<const uint8_t>(), compressed_stride,
                       static_cast<uint32_t>(compressed_page), static_cast<uint32_t>(compressed_slots),
                       compressed_ids.as<const int>(), compressed_ids_stride, compressed_count};
  Work work;
  work.rows = rows, work.heads = heads, work.head_tiles = (heads + HEADS - 1) / HEADS, work.splits = splits;
  work.window_tiles = (window_count + KEYS - 1) / KEYS;
  work.tiles = work.window_tiles + (compressed_count + KEYS - 1) / KEYS;
  if (work.tiles == 0) work.tiles = 1;
  Result result;
  result.out = out.as<uint8_t>(), result.out_row = out_row, result.out_head = out_head;
  result.angles = {cos.as<const float>(), sin.as<const float>(), cos_row, sin_row};
  result.partial = scratch.as<float>();
  const int group = threadIdx.x >> 7;
  // The counts add up to what 512 threads are launched with, 4 x 128; more would wait for ever.
  if (group == 0) {
    registers_grow<208>();
    const Queries queries = {q.as<const uint8_t>(), q_row, q_head};
    consume_scores(work, shared, queries, result, sink.as<const float>(), lse.as<float>(), scale);
  } else if (group == 1) {
    registers_grow<176>();
    consume_values<WINDOW, COMPRESSED>(work, near, far, shared, result);
  } else {
    registers_shrink<64>();
    Producer<WINDOW, COMPRESSED> producer{work, near, far, shared};
    producer.run();
  }
}
}  // namespace sparse_attn
