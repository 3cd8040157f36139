// From ids to decoded tiles in shared memory: what a block does in which order, the scout and the producers of
// sparse_attn.cuh. After records.cuh.
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
}  // namespace sparse_attn
