// Records of the caches in the hands of a thread: reading those that are read directly, and decoding all of them to
// bf16 in the layout of the tensor cores.
namespace sparse_attn {
using namespace hopper;

constexpr int WIDTH = 512, HEADS = 64, KEYS = 64, HALF = 256, THREADS = 384;
constexpr int RAW_ROW = 304;  // bytes from record to record: an odd number of 16, for the banks
constexpr int TILE_BYTES = KEYS * WIDTH * 2, COLUMN_BYTES = KEYS * 128, HALF_BYTES = TILE_BYTES / 2;

enum Layout { MXFP8 = 0, NVFP4 = 1, V4 = 2, BF16 = 3 };

// A cache and the selection from it.
struct Records {
  const uint8_t* pages;
  long long page_stride;  // bytes
  uint32_t page_size, slots;
  const int* ids;
  long long ids_stride;  // of a query row
  int count, page_shift;  // log2 of the page size, or -1
  __device__ __forceinline__ uint32_t page(uint32_t slot) const {
    return page_shift >= 0 ? slot >> page_shift : slot / page_size;
  }
};

__device__ __forceinline__ int shift_of(uint32_t size) { return size & size - 1 ? -1 : __popc(size - 1); }

// ---- decoding --------------------------------------------------------------------------------------------
// Values are placed into bf16 fields as they are: the exponent is then too small by a constant, which the
// product puts right. Both products are exact, so is the value.
constexpr uint32_t TWO_120 = 0x7B807B80u, TWO_126 = 0x7E807E80u, TWO_127 = 0x7F007F00u;

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

// Layouts whose bytes go through shared memory, fetched ahead; the others are read when they are decoded.
template <int LAYOUT>
constexpr bool AHEAD = LAYOUT == NVFP4 || LAYOUT == MXFP8;

// Reads segment `segment` (0..15, 32 columns) of record `at` of a page; zeros where `page` is null.
template <int LAYOUT>
__device__ __forceinline__ void read_direct(uint32_t (&words)[16], uint32_t& scale, const Records& from,
                                            const uint8_t* page, uint32_t at, int segment) {
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = 0;
  scale = 0;
  if (page == nullptr) return;
  const uint8_t* record = page + static_cast<size_t>(at) * (LAYOUT == V4 ? 576 : 1024);
  if (LAYOUT == V4 && segment < 14) {
    read_16(words, record + segment * 32);
    read_16(words + 4, record + segment * 32 + 16);
    scale = page[static_cast<size_t>(from.page_size) * 576 + at * 8 + segment / 2];
  } else {
    const uint8_t* plain = LAYOUT == V4 ? record + 448 - 14 * 64 : record;
#pragma unroll
    for (int i = 0; i < 4; ++i) read_16(words + 4 * i, plain + segment * 64 + 16 * i);
  }
}

// Stores 8 columns: piece `piece` (0..3) of a segment.
__device__ __forceinline__ void put(uint8_t* tile, int row, int segment, int piece, uint32_t a, uint32_t b, uint32_t c,
                                    uint32_t d) {
  *reinterpret_cast<uint4*>(tile + (segment >> 1) * COLUMN_BYTES + swizzle_128(row, (segment & 1) * 4 + piece)) =
      make_uint4(a, b, c, d);
}

__device__ __forceinline__ uint32_t decode_e4m3(uint8_t* tile, int row, int segment, const uint32_t* words, uint32_t code) {
  // 2^7 of the value, then the rest of its scale; below 2^-119 there is no value to speak of.
  const uint32_t one = code >= 8 ? code - 7 << 7 : 0, factor = one | one << 16;
  uint32_t bad = code == 255, infinite = 0;
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
    const uint32_t x = words[2 * piece], y = words[2 * piece + 1];
    const uint32_t a = times(times(place_e4m3<0>(x), TWO_127), factor), b = times(times(place_e4m3<1>(x), TWO_127), factor);
    const uint32_t c = times(times(place_e4m3<0>(y), TWO_127), factor), d = times(times(place_e4m3<1>(y), TWO_127), factor);
    bad |= e4m3_nan(x) | e4m3_nan(y);
    if (code >= 247) infinite |= bf16_infinite(a) | bf16_infinite(b) | bf16_infinite(c) | bf16_infinite(d);
    put(tile, row, segment, piece, a, b, c, d);
  }
  return bad | infinite;
}

// Whether one of two e4m3 scales is 4 or more: then 2^126 of it is no bf16.
__device__ __forceinline__ uint32_t large(uint32_t scales) { return (scales & 0x7F7Fu) + 0x3838u & 0x8080u; }

// Decodes a segment into the tile of this half; returns whether anything in it is not finite. SMALL: no scale is
// `large`, so that one product will do.
template <int LAYOUT, bool SMALL>
__device__ __forceinline__ uint32_t decode(uint8_t* tile, int row, int segment, int half, const uint32_t* words,
                                           uint32_t scale) {
  if constexpr (LAYOUT == NVFP4) {
    uint32_t factors = times(place_e4m3<0>(scale), TWO_126);  // 2^6 of both scales
    if constexpr (SMALL) factors = times(factors, TWO_120);
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
      const uint32_t x = words[piece], low = x << 4, factor = byte_select(factors, 0, piece < 2 ? 0x1010 : 0x3232);
      uint32_t v[4] = {place_e2m1<0>(low, x), place_e2m1<1>(low, x), place_e2m1<2>(low, x), place_e2m1<3>(low, x)};
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = times(SMALL ? v[i] : times(v[i], TWO_120), factor);
      put(tile, row, segment, piece, v[0], v[1], v[2], v[3]);
    }
    return e4m3_nan(scale);
  } else if constexpr (LAYOUT == MXFP8) {
    return decode_e4m3(tile, row, segment, words, scale);
  } else {
    if (LAYOUT == V4 && half * 8 + segment < 14) return decode_e4m3(tile, row, segment, words, scale);
    uint32_t bad = 0;
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
      const uint32_t* w = words + 4 * piece;
      bad |= bf16_infinite(w[0]) | bf16_infinite(w[1]) | bf16_infinite(w[2]) | bf16_infinite(w[3]);
      put(tile, row, segment, piece, w[0], w[1], w[2], w[3]);
    }
    return bad;
  }
}
}  // namespace sparse_attn
