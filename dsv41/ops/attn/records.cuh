// Records of the caches in the hands of a thread: reading those that are read directly, and decoding all of them to
// bf16 in the layout of the tensor cores.
namespace sparse_attn {
using namespace hopper;

constexpr int WIDTH = 512, HEADS = 64, KEYS = 64, HALF = 256;
constexpr int PRODUCERS = 8;  // warps, each with 8 keys of a tile
constexpr int RAW_ROW = 304;  // bytes from record to record: an odd number of 16, for the banks
constexpr int TILE_BYTES = KEYS * WIDTH * 2, COLUMN_BYTES = KEYS * 128, HALF_BYTES = TILE_BYTES / 2;

enum Layout { MXFP8 = 0, NVFP4 = 1, V4 = 2, BF16 = 3 };
// From record to record in a page.
template <int LAYOUT>
constexpr int BYTES = LAYOUT == MXFP8 ? 528 : LAYOUT == NVFP4 ? 288 : LAYOUT == V4 ? 576 : 1024;

// A cache and the selection from it.
struct Records {
  const uint8_t* pages;
  long long page_stride;  // bytes
  uint32_t page_size, slots;
  const int* ids;
  long long ids_stride;  // of a query row
  int count;
  // The record of a slot, `bytes` from record to record; null where there is none.
  __device__ __forceinline__ const uint8_t* record(int slot, int bytes) const {
    if (slot < 0) return nullptr;
    const bool shift = (page_size & page_size - 1) == 0;
    const uint32_t page = shift ? slot >> __popc(page_size - 1) : slot / page_size;
    return pages + page * page_stride + static_cast<size_t>(slot - page * page_size) * bytes;
  }
};

// ---- decoding --------------------------------------------------------------------------------------------
// Values are placed into bf16 fields as they are: the exponent is then too small by a constant, which the
// product puts right. Both products are exact, so is the value.
constexpr uint32_t TWO_120 = 0x7B807B80u, TWO_126 = 0x7E807E80u;

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  __nv_bfloat162 x, y;
  memcpy(&x, &a, 4);
  memcpy(&y, &b, 4);
  x = __hmul2(x, y);
  memcpy(&a, &x, 4);
  return a;
}
// Bytes LOW and LOW + 1 of four e4m3 as bf16 pair, times 2^-120.
template <int LOW>
__device__ __forceinline__ uint32_t place_e4m3(uint32_t four) {
  return byte_select(four, 0, LOW ? 0xB3A2 : 0x9180) << 4 & 0x87F087F0u;
}
// Byte PAIR of eight e2m1 as bf16 pair, times 2^-126; `low` is the word moved up by one nibble.
template <int PAIR>
__device__ __forceinline__ uint32_t place_e2m1(uint32_t low, uint32_t eight) {
  return byte_select(low, eight, 0xC480 + PAIR * 0x1111) << 2 & 0x81C081C0u;
}
__device__ __forceinline__ uint32_t e4m3_nan(uint32_t four) { return (four & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u; }
__device__ __forceinline__ uint32_t bf16_infinite(uint32_t two) { return (two & 0x7F807F80u) + 0x00800080u & 0x80008000u; }

__device__ __forceinline__ void read_16(uint32_t* to, const uint8_t* from) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Whether some of the scales whose union this is may need more than one product: MXFP8, where 2^120 times the scale
// is no bf16 (from 2^8 on; caught from 2 on), NVFP4, where 2^126 times it is none (from 4 on; caught from 2 on).
template <int LAYOUT>
__device__ __forceinline__ bool unusual(uint32_t scales) {
  return (scales & (LAYOUT == MXFP8 ? 0x80u : 0x4040u)) != 0;
}

// Layouts whose bytes are copied to shared memory ahead; the others are read when they are decoded.
template <int LAYOUT>
constexpr bool COPIED = LAYOUT == NVFP4 || LAYOUT == MXFP8;

// Reads segment `segment` (0..15, 32 columns) of a record; zeros where it is null.
template <int LAYOUT>
__device__ __forceinline__ void read_direct(uint32_t (&words)[16], uint32_t& scale, const Records& from,
                                            const uint8_t* record, int segment) {
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = 0;
  scale = 0;
  if (record == nullptr) return;
  if (LAYOUT == V4 && segment < 14) {
    read_16(words, record + segment * 32);
    read_16(words + 4, record + segment * 32 + 16);
    // The scales follow all values of a page.
    const size_t in_page = static_cast<size_t>(record - from.pages) % from.page_stride;
    scale = (record - in_page)[static_cast<size_t>(from.page_size) * 576 + in_page / 72 + segment / 2];
  } else {
    const uint8_t* plain = LAYOUT == V4 ? record + 448 - 14 * 64 : record;
#pragma unroll
    for (int i = 0; i < 4; ++i) read_16(words + 4 * i, plain + segment * 64 + 16 * i);
  }
}

// Stores 8 columns, piece `piece` (0..3) of a segment of 32; `to` is where the segment's row would begin without
// the swizzle, which is a row's own: an exclusive or.
__device__ __forceinline__ void put(uint8_t* tile, int to, int piece, const uint32_t (&v)[4]) {
  *reinterpret_cast<uint4*>(tile + (to ^ piece * 16)) = make_uint4(v[0], v[1], v[2], v[3]);
}

template <bool SIMPLE>
__device__ __forceinline__ uint32_t decode_e4m3(uint8_t* tile, int to, const uint32_t* words, uint32_t code) {
  // Its scale on top of 2^120; above 2^127 in two products.
  const uint32_t one = (SIMPLE || code < 135 ? code + 120 : 254) << 7, factor = one | one << 16;
  const uint32_t more = (SIMPLE || code < 135 ? 127 : code - 7) << 7, second = more | more << 16;
  uint32_t bad = code == 255;
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
    const uint32_t x = words[2 * piece], y = words[2 * piece + 1];
    uint32_t v[4] = {place_e4m3<0>(x), place_e4m3<1>(x), place_e4m3<0>(y), place_e4m3<1>(y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = times(v[i], factor);
      if (!SIMPLE) v[i] = times(v[i], second);
      if (!SIMPLE && code >= 247) bad |= bf16_infinite(v[i]);
    }
    bad |= e4m3_nan(x) | e4m3_nan(y);
    put(tile, to, piece, v);
  }
  return bad;
}

// Decodes a segment into the tile of this half; returns whether anything in it is not finite. SIMPLE: no scale is
// `unusual`, so that one product will do.
template <int LAYOUT, bool SIMPLE>
__device__ __forceinline__ uint32_t decode(uint8_t* tile, int row, int segment, int half, const uint32_t* words,
                                           uint32_t scale) {
  const int to = (segment >> 1) * COLUMN_BYTES + swizzle_128(row, (segment & 1) * 4);
  if constexpr (LAYOUT == NVFP4) {
    uint32_t factors = times(place_e4m3<0>(scale), TWO_126);  // 2^6 of both scales
    if constexpr (SIMPLE) factors = times(factors, TWO_120);
#pragma unroll
    for (int piece = 0; piece < 4; piece += 2) {
      const uint32_t factor = byte_select(factors, 0, piece < 2 ? 0x1010 : 0x3232);
      uint32_t v[2][4];  // two pieces at a time: the registers of a store are busy for a while
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t x = words[piece + i], low = x << 4;
        v[i][0] = place_e2m1<0>(low, x), v[i][1] = place_e2m1<1>(low, x);
        v[i][2] = place_e2m1<2>(low, x), v[i][3] = place_e2m1<3>(low, x);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t& two = v[i >> 2][i & 3];
        two = times(SIMPLE ? two : times(two, TWO_120), factor);
      }
      put(tile, to, piece, v[0]), put(tile, to, piece + 1, v[1]);
    }
    return SIMPLE ? 0 : e4m3_nan(scale);  // a NaN is an unusual scale
  } else if constexpr (LAYOUT == MXFP8) {
    return decode_e4m3<SIMPLE>(tile, to, words, scale);
  } else {
    if (LAYOUT == V4 && half * 8 + segment < 14) return decode_e4m3<SIMPLE>(tile, to, words, scale);
    uint32_t bad = 0;
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
      const uint32_t* w = words + 4 * piece;
      const uint32_t v[4] = {w[0], w[1], w[2], w[3]};
      bad |= bf16_infinite(w[0]) | bf16_infinite(w[1]) | bf16_infinite(w[2]) | bf16_infinite(w[3]);
      put(tile, to, piece, v);
    }
    return bad;
  }
}
}  // namespace sparse_attn
