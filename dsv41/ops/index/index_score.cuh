// Scores of paged index keys on the tensor cores, and the best of each query while they pass by.
//
// A block has a warp that copies tiles of 64 keys into a ring in shared memory and two groups of four warps that
// take the tiles in turn. Keys are operand A, straight from registers: a lane decodes 32 values of a row, which
// is one scale group. Heads are operand B. The order of the 128 values within the product is free, so it is the
// one in which a lane's values are adjacent in memory.
//
// E2M1 times a power of two is E4M3 as long as the power stays within 2^-5..2^6: groups of a key are scaled
// relative to its first one. Rows beyond that (and scales that are NaN) are computed by `plain_score`.
#pragma once
#include <cstdint>

namespace index_topk {

constexpr int kHeads = 32;   // fewer are padded with heads of weight 0
constexpr int kTile = 128;   // keys a tile: two products of 64 rows
constexpr int kQuad = 4;     // keys that always lie together: the least page and the least candidate block
constexpr int kThreads = 288;
constexpr int kGroups = 2;   // of four warps
constexpr int kLook = 4;     // a list that has not room for so many tiles is cut
constexpr int kMost = 512, kBlockMost = 2048;  // entries and blocks of a query
constexpr int kSlack = 256, kBlockSlack = 512;  // more of them in lists that are merged later
constexpr int kListRoom = kMost + kSlack, kBlockRoom = kBlockMost + kBlockSlack;
constexpr int kLeast = 8;    // tiles a block at least

enum Format { kMXFP4 = 0, kFP8 = 1 };

struct Args {
  const uint8_t* q;          // [tokens, heads, 64]
  const uint8_t* q_scale;    // [tokens, heads, 4]
  const float* weights;      // [tokens, heads]
  const int* requests;       // [tokens]
  const int* visible;        // [tokens]
  const uint8_t* pages;
  const int* table;          // [num_requests, table_width], rows table_stride apart
  const int* candidates;     // [tokens, num_candidates]
  int* ids;                  // [tokens, k]
  int* blocks;               // [tokens, num_blocks]
  float* scores;             // [tokens, k]: only in the form that keeps all scores
  int* counts;               // of the lists below
  uint64_t* lists;           // [2 * blocks, NQ, kListRoom], then block lists [2 * blocks, NQ, kBlockRoom]
  int tokens, heads, num_requests, table_width, table_stride, page_size, num_pages;
  int num_candidates, num_blocks, block_size, k;
  int64_t page_stride;
};

template <int FORMAT, int NQ, bool PUBLISH>
struct Shared {
  static constexpr int kValues = FORMAT == kMXFP4 ? 64 : 128;
  static constexpr int kStages = FORMAT != kMXFP4 ? 4 : NQ > 1 ? 6 : PUBLISH ? 5 : 8;
  static constexpr int kCap = 2048, kBlockCap = 4096;
  uint8_t b[NQ][kHeads * 128];
  uint8_t values[kStages][kTile * kValues];
  uint32_t scales[kStages][kTile];
  int entry[kStages][kTile / kQuad];  // first entry of each quad, -1: none
  uint64_t list[NQ][kCap];
  uint64_t block_list[PUBLISH ? NQ : 1][PUBLISH ? kBlockCap : 1];
  uint64_t bar[NQ], block_bar[NQ];
  uint64_t full[kStages], empty[kStages];
  choose::Work work;
  choose::Share share;
  float weight[NQ][kHeads];
  int sums[32];
  Args args;       // for functions that are not inlined
  uint32_t signs;  // 0x40404040, which the compiler shall not know
  int top[NQ][kHeads];
  bool plain[NQ];  // b and weight cannot hold the query
  int visible[NQ];
  int count[3][NQ], block_count[3][NQ];
};
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

// Tiles of a unit: NQ rows, whose runs of one request are scanned one behind the other.
template <int NQ, bool RESTRICT>
struct Units {
  const Args& args;
  __device__ int seen(int t) const {  // entries that a row sees
    int request = args.requests[t];
    if (request < 0 || request >= args.num_requests) return 0;
    int room = args.table_width * args.page_size, n = args.visible[t];
    return n < 0 ? 0 : n < room ? n : room;
  }
  __device__ int tiles(int most) const {
    if (!RESTRICT) return (most + kTile - 1) / kTile;
    int blocks = (most + args.block_size - 1) / args.block_size, per = kTile / args.block_size;
    return ((blocks < args.num_candidates ? blocks : args.num_candidates) + per - 1) / per;
  }
  // The run of rows that begins at row `start` of unit `u`: its length, and the most that its rows see.
  __device__ int run(int u, int start, int& most) const {
    int t = u * NQ + start, length = 1;
    most = seen(t);
    while (start + length < NQ && t + length < args.tokens && args.requests[t + length] == args.requests[t]) {
      int n = seen(t + length);
      most = n > most ? n : most;
      ++length;
    }
    return length;
  }
  __device__ int operator()(int u) const {
    int total = 0, most;
    for (int i = 0; i < NQ && u * NQ + i < args.tokens;) {
      i += run(u, i, most);
      total += tiles(most);
    }
    return total > 0 ? total : 1;
  }
};

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
  const int lane = tid % 32, head = tid / 8, part = tid % 8, group = part / 2;
  uint2 q[NQ];
  int code[NQ];
#pragma unroll
  for (int m = 0; m < NQ; ++m) {
    const bool real = head < args.heads && unit * NQ + m < args.tokens;
    const int64_t row = real ? static_cast<int64_t>(unit * NQ + m) * args.heads + head : 0;
    q[m] = *reinterpret_cast<const uint2*>(args.q + row * 64 + part * 8);
    code[m] = args.q_scale[row * 4 + group];
    if (!real) q[m] = make_uint2(0, 0), code[m] = 0;
  }
#pragma unroll
  for (int m = 0; m < NQ; ++m) {
    bool live = ((q[m].x | q[m].y) & 0x77777777u) != 0;
    live = __shfl_xor_sync(~0u, live ? 1 : 0, 1) || live;
    int top = live ? code[m] : 0, low = live ? code[m] : 255, nan = code[m] == 255;
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
      const float factor = power(code[m] - top + 6);
#pragma unroll
      for (int i = 1; i < 8; ++i) table[i / 4] |= e4m3_code(e2m1(i) * factor) << (i % 4 * 8);
    }
    const uint32_t words[2] = {q[m].x, q[m].y};
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
  choose::sync();
  const int m = tid / 32;
  if (m < NQ) {
    const int top = s.top[m][lane];
    const bool real = lane < args.heads && unit * NQ + m < args.tokens;
    const float w = real ? args.weights[static_cast<int64_t>(unit * NQ + m) * args.heads + lane] : 0.0f;
    // Half of it: the sum over heads takes x + |x|, which is twice relu(x).
    const float weight = top > 0 ? scaled(0.5f * w, top - 6 - 127) : 0.5f * w, size = fabsf(weight);
    s.weight[m][lane] = weight;
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
  for (int j = 0; j < 4; ++j) {
    const float2 pair = *reinterpret_cast<const float2*>(&s.weight[m][8 * j + 2 * c]);
    w[2 * j] = pair.x, w[2 * j + 1] = pair.y;
  }
}

// What a group of warps does with the tiles of a run whose queries are `first` .. `first + COUNT`.
template <int COUNT, int FORMAT, int NQ, bool PUBLISH, bool SELECT>
struct Run {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  // Queries of one product. Its sums over heads meet in four lanes; of their four results (two rows of two
  // queries, or of one query and two halves of the tile) each lane takes one.
  static constexpr int PAIR = COUNT > 1 ? COUNT / 2 : 1;
  static_assert(PAIR <= 2);
  const Args& args;
  S& s;
  int unit, first;
  uint32_t warp, lane, c, row;  // of the group; row: the lane's first one
  bool plain;                   // a query that b cannot hold
  uint32_t signs;
  int visible;                  // of the one query
  uint32_t bar_high;            // upper half of the one query's bar
  int (&base)[NQ];
  int (&block_base)[NQ];

  __device__ Run(const Args& args, S& s, int unit, int first, uint32_t tid, int (&base)[NQ], int (&block_base)[NQ])
      : args(args), s(s), unit(unit), first(first), warp(tid / 32 % 4), lane(hopper::opaque(tid % 32)), c(hopper::opaque(tid % 4)),
        row(hopper::opaque(16 * warp + lane / 4)), plain(false), signs(s.signs), visible(s.visible[first]),
        base(base), block_base(block_base) {
    for (int m = 0; m < COUNT; ++m) plain |= s.plain[first + m];
  }

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
  static __device__ __noinline__ float replace(S& s, int stage, int half, int unit, int pair,
                                               int warp, int lane, float out) {
    const int c = lane % 4;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int row = 64 * half + 16 * warp + i;
      const uint32_t scales = s.scales[stage][row];
      bool key = false;
      if (FORMAT == kMXFP4)
        for (int g = 0; g < 4; ++g) {
          const int e = scales & 255, d = static_cast<int>(scales >> (8 * g) & 255) - e;
          key |= !fits(e, d);
        }
      if (s.entry[stage][row / kQuad] < 0) continue;
#pragma unroll 1
      for (int m = 0; m < PAIR; ++m) {
        const int t = unit * NQ + pair + m;
        if (t >= s.args.tokens || !(key || s.plain[pair + m])) continue;
        const float x = plain_score<FORMAT>(s.args, t, &s.values[stage][row * S::kValues], scales, lane);
        if (lane / 4 == i % 8 && (c & 1) == i / 8 && (c >> 1) == (COUNT == 1 ? half : m)) out = x;
      }
    }
    return out;
  }

  // One value of each lane: of query m and an entry, or of none (-1). `pair`: the first query of the lanes.
  __device__ __forceinline__ void take(float score, int pair, int entry, int slot) {
    const int m = PAIR == 2 ? pair + (c >> 1) : pair;
    const bool live = entry >= 0 && entry < (COUNT == 1 ? visible : s.visible[m]);
    if constexpr (!SELECT) {
      if (live) args.scores[static_cast<int64_t>(unit * NQ + m) * args.k + entry] = score;
      return;
    }
    const uint32_t order = choose::ordered(score);
    if (COUNT == 1 && !PUBLISH && !__any_sync(~0u, live && order >= bar_high && order <= choose::kInfinity)) return;
    const uint64_t key = choose::key_of(order, entry);
    add(s.list, base, s.count[slot], live && choose::passes(order, key, s.bar[m]), key, pair);
    if constexpr (PUBLISH) {
      // The best of each candidate block: rows of one block are neighbours within eight.
      uint32_t best = live && order <= 0xFF800000u && order > 0x007FFFFFu ? order : 0;
      for (int step = 4; step < 4 * args.block_size && step < 32; step *= 2) {
        uint32_t other = __shfl_xor_sync(~0u, best, step);
        best = other > best ? other : best;
      }
      const int block = entry / args.block_size;
      const bool head = live && entry % args.block_size == 0;
      if (head && block == (s.visible[m] - 1) / args.block_size) best = 0xFF800000u;
      const uint64_t block_key = choose::key_of(best, block);
      const bool pass = head && best != 0 && block_key > s.block_bar[m];
      add(s.block_list, block_base, s.block_count[slot], pass, block_key, pair);
    }
  }
  template <class List>
  __device__ __forceinline__ void add(List& list, const int (&bases)[NQ], int (&count)[NQ], bool pass, uint64_t key,
                                      int pair) {
    if (PAIR == 2 && !__any_sync(~0u, pass)) return;
#pragma unroll
    for (int m = 0; m < PAIR; ++m) {
      int own = bases[0];
#pragma unroll
      for (int i = 1; i < NQ; ++i) own = pair + m == i ? bases[i] : own;
      choose::append(list[pair + m], own, &count[pair + m], pass && (PAIR == 1 || (c >> 1) == m), key, lane);
    }
  }

  __device__ __forceinline__ uint64_t operand(int m) const {
    return hopper::tile_descriptor(hopper::smem_address(s.b[m]));
  }

  __device__ __forceinline__ void tile(int stage, uint32_t phase, int slot) {
    hopper::barrier_wait(&s.full[stage], phase);
    const uint8_t* values = s.values[stage];
    const uint32_t* scales = s.scales[stage];
    if constexpr (COUNT == 1) {
      uint32_t a0[4][4], a1[4][4];
      float d0[16], d1[16], w[8], x0, x1, y0, y1;
      Seen seen;
      load_keys<FORMAT>(values, scales, signs, row, c, a0, seen);
      load_keys<FORMAT>(values, scales, signs, row + 64, c, a1, seen);
      multiply(d0, a0, operand(first));
      multiply(d1, a1, operand(first));
      const uint32_t mine = row + 8 * (c & 1) + 64 * (c >> 1);
      int entry = s.entry[stage][mine / kQuad];
      if (entry >= 0) entry += mine % kQuad;
      const float scale = scale_of(scales, mine);
      load_weights(s, first, c, w);
      hopper::wgmma_wait<1>();
      hopper::keep(d0);
      weigh(d0, w, x0, x1);
      hopper::wgmma_wait<0>();
      hopper::keep(d1);
      weigh(d1, w, y0, y1);
      // Lane c: row c % 2 of half c / 2.
      const float x = (c & 1 ? x1 : x0) + __shfl_xor_sync(~0u, c & 1 ? x0 : x1, 1);
      const float y = (c & 1 ? y1 : y0) + __shfl_xor_sync(~0u, c & 1 ? y0 : y1, 1);
      float out = ((c & 2 ? y : x) + __shfl_xor_sync(~0u, c & 2 ? x : y, 2)) * scale;
      if (__any_sync(~0u, !seen.all_fit()) || plain)
#pragma unroll 1
        for (int half = 0; half < 2; ++half) out = replace(s, stage, half, unit, first, warp, lane, out);
      release(stage);
      take(out, first, entry, slot);
    } else {
      uint32_t a0[4][4], a1[4][4];
      // One product runs while the one before is summed up.
      float d0[PAIR * 16], d2[PAIR * 16];
      Seen seen0, seen1;
      load_keys<FORMAT>(values, scales, signs, row, c, a0, seen0);
      multiply(d0, a0, operand(0));
      multiply(d2, a0, operand(PAIR));
      load_keys<FORMAT>(values, scales, signs, row + 64, c, a1, seen1);
      hopper::wgmma_wait<1>();
      finish(d0, !seen0.all_fit(), stage, 0, 0, slot);
      multiply(d0, a1, operand(0));
      hopper::wgmma_wait<1>();
      finish(d2, !seen0.all_fit(), stage, 0, PAIR, slot);
      multiply(d2, a1, operand(PAIR));
      hopper::wgmma_wait<1>();
      finish(d0, !seen1.all_fit(), stage, 1, 0, slot);
      hopper::wgmma_wait<0>();
      finish(d2, !seen1.all_fit(), stage, 1, PAIR, slot);
      release(stage);
    }
  }

  __device__ __forceinline__ void release(int stage) {
    __syncwarp();
    if (lane == 0) hopper::barrier_arrive(&s.empty[stage]);
  }

  // From the product of half a tile and the queries from `pair` on to the lists.
  __device__ __forceinline__ void finish(float (&d)[PAIR * 16], bool bad, int stage, int half, int pair, int slot) {
    hopper::keep(d);
    const uint32_t mine = row + 8 * (c & 1) + 64 * half;
    const float scale = scale_of(s.scales[stage], mine);
    int entry = s.entry[stage][mine / kQuad];
    float sums[PAIR];
#pragma unroll
    for (int m = 0; m < PAIR; ++m) {
      float w[8], x0, x1;
      load_weights(s, pair + m, c, w);
      weigh(d + 16 * m, w, x0, x1);
      sums[m] = (c & 1 ? x1 : x0) + __shfl_xor_sync(~0u, c & 1 ? x0 : x1, 1);
    }
    const bool upper = PAIR == 2 && (c & 2);
    float out = (upper ? sums[PAIR - 1] : sums[0]) + __shfl_xor_sync(~0u, upper ? sums[0] : sums[PAIR - 1], 2);
    out *= scale;
    if (__any_sync(~0u, bad) || plain) out = replace(s, stage, half, unit, pair, warp, lane, out);
    entry = entry >= 0 && (PAIR == 2 || c < 2) ? entry + static_cast<int>(mine % kQuad) : -1;
    take(out, pair, entry, slot);
  }
};

}  // namespace index_topk
