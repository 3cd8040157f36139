// Scores of paged index keys on Hopper's tensor cores.
//
// Keys are operand A, straight from registers: a lane decodes 32 values of a row, which is one scale group. Heads are
// operand B. The order of the 128 values within the product is free, so it is the one in which a lane's values are
// adjacent in memory.
//
// E2M1 times a power of two is E4M3 as long as the power stays within 2^-5..2^6: groups of a key are scaled
// relative to its first one. Rows beyond that (and scales that are NaN) are computed by `plain_score`.
#pragma once
#include <cstdint>

namespace index_topk {

constexpr int kPlain = 1 << 20;
__device__ __forceinline__ float power(int exponent) {  // 2^exponent, exponent clamped to normal floats
  exponent = exponent < -126 ? -126 : exponent > 127 ? 127 : exponent;
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}
__device__ __forceinline__ float scaled(float x, int exponent) {
  int half = exponent >> 1;
  return x * power(half) * power(exponent - half);
}
__device__ __forceinline__ float e2m1(uint32_t code) {
  uint32_t magnitude = code & 7;
  float value = magnitude < 2 ? 0.5f * magnitude : (magnitude & 1 ? 1.5f : 1.0f) * (1 << (magnitude / 2 - 1));
  return code & 8 ? -value : value;
}
__device__ __forceinline__ float e4m3(uint32_t code) {
  uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
  float value = exponent == 0 ? mantissa * 0.001953125f
                              : __uint_as_float((exponent + 120) << 23 | mantissa << 20);
  if ((code & 127) == 127) value = __uint_as_float(0x7FC00000u);
  return code & 128 ? -value : value;
}
// The E4M3 code of a value that E4M3 holds exactly.
__device__ __forceinline__ uint32_t e4m3_code(float x) {
  uint32_t bits = __float_as_uint(x), sign = bits >> 31 << 7;
  int exponent = static_cast<int>(bits >> 23 & 255) - 127;
  if (exponent < -6) return sign | static_cast<uint32_t>(fabsf(x) * 512.0f);
  return sign | static_cast<uint32_t>(exponent + 7) << 3 | (bits >> 20 & 7);
}

// Eight E2M1 codes to E4M3 through a table of the eight magnitudes; the sign comes out inverted. `signs` is four
// bytes of 0x40.
__device__ __forceinline__ void decode(uint32_t word, uint32_t low, uint32_t high, uint32_t signs, uint32_t& first,
                                       uint32_t& second) {
  const uint32_t upper = word >> 16;
  first = __byte_perm(low, high, word & 0x7777u) + 2 * hopper::byte_select(signs, signs, word);
  second = __byte_perm(low, high, upper & 0x7777u) + 2 * hopper::byte_select(signs, signs, upper);
}

// Heads of the queries of a unit as operand B, and what it leaves out. Eight threads a head, 16 values each.
template <int FORMAT, int NQ, class S>
__device__ void load_queries(const Args& args, S& s, int unit, int tid) {
  constexpr int SIDE = Plan<NQ>::kThreads / 256, EACH = (NQ + SIDE - 1) / SIDE;  // queries at a time
  const int lane = tid % 32, head = tid % 256 / 8, part = tid % 8, group = part / 2, side = tid / 256;
  uint2 q[EACH];
  int code[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int m = SIDE * i + side, t = unit * NQ + m;
    const bool real = head < args.heads && side < SIDE && m < NQ && t < args.tokens;
    const int64_t row = real ? static_cast<int64_t>(t) * args.heads + head : 0;
    q[i] = *reinterpret_cast<const uint2*>(args.q + row * 64 + part * 8);
    code[i] = args.q_scale[row * 4 + group];
    if (!real) q[i] = make_uint2(0, 0), code[i] = 0;
  }
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int m = SIDE * j + side;
    if (side >= SIDE || m >= NQ) break;
    bool live = ((q[j].x | q[j].y) & 0x77777777u) != 0;
    live = __shfl_xor_sync(~0u, live ? 1 : 0, 1) || live;
    int top = live ? code[j] : 0, low = live ? code[j] : 255, nan = code[j] == 255;
    for (int step = 1; step < 8; step *= 2) {
      const int a = __shfl_xor_sync(~0u, top, step), b = __shfl_xor_sync(~0u, low, step);
      nan |= __shfl_xor_sync(~0u, nan, step);
      top = a > top ? a : top, low = b < low ? b : low;
    }
    if (nan || (low <= top && top - low > 14)) top = kPlain;
    if (part == 0) s.top[m][head] = top;
    // A head's values are those in b times 2^(top - 6 - 127): the table of this group's magnitudes.
    uint32_t table[2] = {0, 0};
    if (live && top != kPlain) {
      const float factor = power(code[j] - top + 6);
#pragma unroll
      for (int i = 1; i < 8; ++i) table[i / 4] |= e4m3_code(e2m1(i) * factor) << (i % 4 * 8);
    }
    const uint32_t words[2] = {q[j].x, q[j].y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t out[2];
      decode(words[i], table[0], table[1], 0x40404040u, out[0], out[1]);
      const int step = part % 2 * 2 + i;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Keys are decoded with the other sign, too.
        if (FORMAT != kMXFP4) out[half] ^= 0x80808080u;
        const int at = 32 * step + 16 * half + 4 * group;  // where the product takes these four values
        *reinterpret_cast<uint32_t*>(s.b[m] + hopper::swizzle_128(head, at / 16) + at % 16) = out[half];
      }
    }
  }
  choose::sync<Plan<NQ>::kThreads>();
  const int m = tid / 32;
  if (m < NQ) {
    const int top = s.top[m][lane];
    const bool real = lane < args.heads && unit * NQ + m < args.tokens;
    const float w = real ? args.weights[static_cast<int64_t>(unit * NQ + m) * args.heads + lane] : 0.0f;
    // Half of it: the sum over heads takes x + |x|, which is twice relu(x).
    const float weight = top > 0 ? scaled(0.5f * w, top - 6 - 127) : 0.5f * w, size = fabsf(weight);
    s.weight[m][lane / 2 % 4][lane / 8 * 2 + lane % 2] = weight;
    // Sums of the products are far from both ends of float32.
    const bool fits = top != kPlain && (w == 0.0f || (size > power(-60) && size < power(60)));
    const bool plain = __any_sync(~0u, !fits);
    if (lane == 0) s.plain[m] = plain;
  }
}

// Whether a group of a key fits: the code of the key's first group, and this one's relative to it. 255 is NaN.
__device__ __forceinline__ bool fits(int first, int d) {
  return static_cast<uint32_t>(d + 5) <= 11 && first + d != 255;
}

// A score by plain arithmetic, each step in float32; lane = head. `key` is the row in shared memory.
template <int FORMAT>
__device__ __noinline__ float plain_score(const Args& args, int t, const uint8_t* key, uint32_t scales, int lane) {
  const bool real = lane < args.heads;
  const int64_t row = static_cast<int64_t>(t) * args.heads + (real ? lane : 0);
  float dot = 0.0f;
  const float nan = __uint_as_float(0x7FC00000u);
#pragma unroll 1
  for (int g = 0; g < 4; ++g) {
    float part = 0.0f;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const uint32_t q = args.q[row * 64 + g * 16 + i];
      float a, b;
      if (FORMAT == kMXFP4) a = e2m1(key[g * 16 + i]), b = e2m1(key[g * 16 + i] >> 4);
      else a = e4m3(key[g * 32 + 2 * i]), b = e4m3(key[g * 32 + 2 * i + 1]);
      part = part + e2m1(q) * a + e2m1(q >> 4) * b;
    }
    int code = args.q_scale[row * 4 + g], exponent = code - 127;
    if (code == 255) part = nan;
    if (FORMAT == kMXFP4) {
      int key_code = scales >> (8 * g) & 255;
      exponent += key_code - 127;
      if (key_code == 255) part = nan;
    }
    dot += scaled(part, exponent);
  }
  if (FORMAT == kFP8) dot *= __uint_as_float(scales);
  float relu = dot <= 0.0f ? 0.0f : dot;  // NaN stays
  float sum = real ? args.weights[row] * relu : 0.0f;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// What has been seen of the scales of rows: the largest of d + 5 and of the codes (see `fits`).
struct Seen {
  uint32_t far = 0, code = 0;
  __device__ __forceinline__ bool all_fit() const { return far <= 11 && code < 255; }
};

// Rows of 64 keys as operand A.
template <int FORMAT>
__device__ __forceinline__ void load_keys(const uint8_t* values, const uint32_t* scales, uint32_t signs, uint32_t row,
                                          uint32_t c, uint32_t (&a)[4][4], Seen& seen) {
  constexpr int BYTES = FORMAT == kMXFP4 ? 64 : 128;
  const uint8_t* at = values + row * BYTES + c * (BYTES / 4);
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(scales + row);
  if constexpr (FORMAT == kMXFP4) {
    const uint4 x = *reinterpret_cast<const uint4*>(at), y = *reinterpret_cast<const uint4*>(at + 8 * BYTES);
    // A group's power relative to the row's first group; `low` and `high` are its table of magnitudes.
    const uint32_t n0 = codes[c], n1 = codes[32 + c], d0 = n0 - codes[0], d1 = n1 - codes[32];
    const uint32_t low0 = 0x3C383000u + d0 * 0x08080800u, high0 = 0x4C484440u + d0 * 0x08080808u;
    const uint32_t low1 = 0x3C383000u + d1 * 0x08080800u, high1 = 0x4C484440u + d1 * 0x08080808u;
    const uint32_t first[4] = {x.x, x.y, x.z, x.w}, second[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      decode(first[i], low0, high0, signs, a[i][0], a[i][2]);
      decode(second[i], low1, high1, signs, a[i][1], a[i][3]);
    }
    seen.far = d0 + 5 > seen.far ? d0 + 5 : seen.far, seen.far = d1 + 5 > seen.far ? d1 + 5 : seen.far;
    seen.code = n0 > seen.code ? n0 : seen.code, seen.code = n1 > seen.code ? n1 : seen.code;
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(at + 16 * i);
      const uint4 y = *reinterpret_cast<const uint4*>(at + 8 * BYTES + 16 * i);
      a[2 * i][0] = x.x, a[2 * i][2] = x.y, a[2 * i + 1][0] = x.z, a[2 * i + 1][2] = x.w;
      a[2 * i][1] = y.x, a[2 * i][3] = y.y, a[2 * i + 1][1] = y.z, a[2 * i + 1][3] = y.w;
    }
  }
}

// The product of those rows with queries into `d`, not waited for.
template <int N>
__device__ __forceinline__ void multiply(float (&d)[N], const uint32_t (&a)[4][4], uint64_t b) {
  hopper::keep(d);
  hopper::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)  // the address is the lower half
    hopper::wgmma_e4m3_rs(d, a[i], (b & 0xFFFFFFFF00000000ull) | (static_cast<uint32_t>(b) + 2 * i), i > 0);
  hopper::wgmma_commit();
}

// Sum over a lane's heads of query m, for its two rows.
__device__ __forceinline__ void weigh(const float* d, const float (&w)[8], float& sum0, float& sum1) {
  sum0 = sum1 = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    sum0 = fmaf(w[2 * j], d[4 * j] + fabsf(d[4 * j]), sum0);
    sum0 = fmaf(w[2 * j + 1], d[4 * j + 1] + fabsf(d[4 * j + 1]), sum0);
    sum1 = fmaf(w[2 * j], d[4 * j + 2] + fabsf(d[4 * j + 2]), sum1);
    sum1 = fmaf(w[2 * j + 1], d[4 * j + 3] + fabsf(d[4 * j + 3]), sum1);
  }
}
template <class S>
__device__ __forceinline__ void load_weights(const S& s, int m, uint32_t c, float (&w)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(&s.weight[m][c][4 * i]);
    w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
  }
}

template <int FORMAT, int NQ, bool PUBLISH, bool SELECT>
struct Run : Choice<FORMAT, NQ, PUBLISH, SELECT> {
  using Base = Choice<FORMAT, NQ, PUBLISH, SELECT>;
  using S = typename Base::S;
  using Base::PAIR, Base::s, Base::unit, Base::first, Base::end, Base::group, Base::warp, Base::lane, Base::c;
  uint32_t row;  // the lane's first one
  bool plain;    // a query that b cannot hold
  uint32_t signs;

  __device__ Run(const Args& args, S& s, int unit, int first, int end, int group, uint32_t tid)
      : Base(args, s, unit, first, end, group, tid), row(hopper::opaque(16 * warp + lane / 4)), plain(false), signs(s.signs) {
    for (int m = first; m < end; ++m) plain |= s.plain[m];
  }
  static __device__ __forceinline__ void init(S& s) { s.signs = 0x40404040u; }
  static __device__ __forceinline__ void open(S&, int) {}
  static __device__ __forceinline__ void close(S&, int) {}
  static __device__ __forceinline__ void load(const Args& args, S& s, int unit, int tid) { load_queries<FORMAT, NQ>(args, s, unit, tid); }

  // The scale of a row: for MXFP4 that of its first group.
  static __device__ __forceinline__ float scale_of(const uint32_t* scales, uint32_t row) {
    if (FORMAT == kMXFP4) {
      const uint32_t bits = static_cast<uint32_t>(*reinterpret_cast<const uint8_t*>(scales + row)) << 23;
      return __uint_as_float(bits > 0x00400000u ? bits : 0x00400000u);  // 2^-127 is subnormal
    }
    return __uint_as_float(scales[row]);
  }

  // Rows whose form is another one. It depends on the row and the query alone, so that a score does too. By value,
  // and apart: the usual way past it shall not pay for it.
  static __device__ __noinline__ float replace(S& s, int group, int stage, int half, int unit, int pair, int end,
                                               int warp, int lane, float out) {
    const int c = lane % 4;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int row = 64 * half + 16 * warp + i;
      const uint32_t scales = s.scales[group][stage][row];
      bool key = false;
      if (FORMAT == kMXFP4)
        for (int g = 0; g < 4; ++g) {
          const int e = scales & 255, d = static_cast<int>(scales >> (8 * g) & 255) - e;
          key |= !fits(e, d);
        }
      if (s.entry[group][stage][row / kQuad] < 0) continue;
#pragma unroll 1
      for (int m = pair; m < pair + PAIR && m < end; ++m) {
        if (!(key || s.plain[m])) continue;
        const float x = plain_score<FORMAT>(s.args, unit * NQ + m, &s.values[group][stage][row * S::kValues], scales, lane);
        if (lane / 4 == i % 8 && (c & 1) == i / 8 && (c >> 1) == (PAIR == 1 ? half : m - pair)) out = x;
      }
    }
    return out;
  }

  __device__ __forceinline__ uint64_t operand(int m) const {
    return hopper::tile_descriptor(hopper::smem_address(s.b[m]));
  }
  __device__ __forceinline__ void tile(int stage, uint32_t) {
    const uint8_t* values = s.values[group][stage];
    const uint32_t* scales = s.scales[group][stage];
    if constexpr (NQ == 1) {
      uint32_t a0[4][4], a1[4][4];
      float d0[16], d1[16], w[8], x0, x1, y0, y1;
      Seen seen;
      load_keys<FORMAT>(values, scales, signs, row, c, a0, seen);
      load_keys<FORMAT>(values, scales, signs, row + 64, c, a1, seen);
      multiply(d0, a0, operand(0));
      multiply(d1, a1, operand(0));
      const uint32_t mine = row + 8 * (c & 1) + 64 * (c >> 1);
      const int entry = this->entry_of(stage, mine);
      const float scale = scale_of(scales, mine);
      load_weights(s, 0, c, w);
      hopper::wgmma_wait<1>();
      hopper::keep(d0);
      weigh(d0, w, x0, x1);
      hopper::wgmma_wait<0>();
      hopper::keep(d1);
      weigh(d1, w, y0, y1);
      // Lane c: row c % 2 of half c / 2.
      float out = meet(x0, x1, y0, y1) * scale;
      if (__any_sync(~0u, !seen.all_fit()) || plain)
#pragma unroll 1
        for (int half = 0; half < 2; ++half) out = replace(s, group, stage, half, unit, 0, end, warp, lane, out);
      this->take(out, 0, entry);
    } else {
      uint32_t a[4][4];
      Seen seen;
      load_keys<FORMAT>(values, scales, signs, row, c, a, seen);
      const uint32_t mine = row + 8 * (c & 1);
      const int entry = this->entry_of(stage, mine);
      const float scale = scale_of(scales, mine);
      const bool apart = __any_sync(~0u, !seen.all_fit()) || plain;
      if (end - first == NQ && NQ % PAIR == 0 && !apart) {
        // All queries: while the product of a pair is made, the sums of the one before meet and are taken.
        float d[PAIR * 16], w[PAIR][8], x0, x1, y0, y1;
        multiply(d, a, operand(0));
#pragma unroll
        for (int pair = 0; pair < NQ; pair += PAIR) {
          load_weights(s, pair, c, w[0]), load_weights(s, pair + 1, c, w[1]);
          hopper::wgmma_wait<0>();
          hopper::keep(d);
          weigh(d, w[0], x0, x1);
          weigh(d + 16, w[1], y0, y1);
          if (pair + PAIR < NQ) multiply(d, a, operand(pair + PAIR));
          this->take(meet(x0, x1, y0, y1) * scale, pair + static_cast<int>(c >> 1), entry);
        }
        return;
      }
#pragma unroll 1
      for (int pair = first; pair < end; pair += PAIR) {
        float d[PAIR * 16], w[8], x0, x1, y0, y1;
        multiply(d, a, operand(pair));
        hopper::wgmma_wait<0>();
        hopper::keep(d);
        load_weights(s, pair, c, w);
        weigh(d, w, x0, x1);
        load_weights(s, pair + 1, c, w);
        weigh(d + 16, w, y0, y1);
        // Lane c: row c % 2 of query c / 2.
        float out = meet(x0, x1, y0, y1) * scale;
        if (apart) out = replace(s, group, stage, 0, unit, pair, end, warp, lane, out);
        this->take(out, pair + static_cast<int>(c >> 1), entry);
      }
    }
  }

  // Sums of a lane's heads to those of all: of two rows of x and two of y lane c keeps one.
  __device__ __forceinline__ float meet(float x0, float x1, float y0, float y1) const {
    const float x = (c & 1 ? x1 : x0) + __shfl_xor_sync(~0u, c & 1 ? x0 : x1, 1);
    const float y = (c & 1 ? y1 : y0) + __shfl_xor_sync(~0u, c & 1 ? y0 : y1, 1);
    return (c & 2 ? y : x) + __shfl_xor_sync(~0u, c & 2 ? x : y, 2);
  }
};

}  // namespace index_topk
