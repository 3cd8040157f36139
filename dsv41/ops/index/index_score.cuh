// Scores of paged index keys on the tensor cores, and the best of each query while they pass by.
//
// A block is groups of four warps that take tiles of keys in turn: two groups for one query at a time, four for
// several queries of one request. Keys are operand A, straight from registers: a lane decodes 32 values of a row,
// which is one scale group. Heads are operand B. The order of the 128 values within the product is free, so it is the
// one in which a lane's values are adjacent in memory.
//
// E2M1 times a power of two is E4M3 as long as the power stays within 2^-5..2^6: groups of a key are scaled
// relative to its first one. Rows beyond that (and scales that are NaN) are computed by `plain_score`.
#pragma once
#include <cstdint>

namespace index_topk {

constexpr int kHeads = 32;   // fewer are padded with heads of weight 0
constexpr int kQuad = 4;     // keys that always lie together: the least page and the least candidate block
constexpr int kMost = 512, kBlockMost = 2048;  // entries and blocks of a query
constexpr int kSlack = 256, kBlockSlack = 512;  // more of them in lists that are merged later
constexpr int kListRoom = kMost + kSlack, kBlockRoom = kBlockMost + kBlockSlack;

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

// How the threads of a block are used for NQ queries at once.
template <int NQ>
struct Plan {
  static constexpr int kTile = NQ == 1 ? 128 : 64;  // keys a tile: one or two products of 64 rows
  static constexpr int kGroups = NQ == 1 ? 2 : 4;   // of four warps
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kTeam = NQ == 1 ? kThreads : 128;  // threads that cut and sort a list
  static constexpr int kTeams = kThreads / kTeam;
  static constexpr int kLeast = 1024 / kTile;  // tiles a block at least
};

template <int FORMAT, int NQ, bool PUBLISH>
struct Shared {
  static constexpr int kTile = Plan<NQ>::kTile;
  static constexpr int kValues = FORMAT == kMXFP4 ? 64 : 128;
  static constexpr int kGroups = Plan<NQ>::kGroups;
  // Tiles that a group takes between two looks at the lists, and stages of its ring: a round is scored while the next
  // ones are copied.
  static constexpr int kRound = FORMAT == kMXFP4 && !PUBLISH ? 2 : 1;
  static constexpr int kRing = FORMAT != kMXFP4 || (NQ > 1 && PUBLISH) ? 2 : PUBLISH ? 3 : 4;
  static constexpr int kCap = NQ > 1 && PUBLISH ? 1536 : 2048, kBlockCap = NQ > 1 ? 3072 : 4096;
  // Lists are cut before they hold more. The warp that looks may be a round ahead of the other three of its group: what
  // it does not see yet, and what all add before they look again, has room.
  static constexpr int kAhead = kGroups * kRound * (kTile + kTile / 4 * 3);
  static constexpr int kFull = kCap - kAhead, kBlockFull = kBlockCap - kAhead / kQuad;
  static_assert(kMost + (kCap - kMost) / 3 <= kFull, "lists that stop the groups are cut");
  static constexpr int kPadded = NQ == 1 ? 1 : NQ + 1;  // an odd last query is scored beside nothing
  uint8_t b[kPadded][kHeads * 128];
  uint8_t values[kGroups][kRing][kTile * kValues];
  uint32_t scales[kGroups][kRing][kTile];
  int entry[kGroups][kRing][kTile / kQuad];  // first entry of each quad, -1: none
  uint64_t list[NQ][kCap];
  uint64_t block_list[PUBLISH ? NQ : 1][PUBLISH ? kBlockCap : 1];
  uint64_t bar[NQ], block_bar[NQ];
  uint64_t full[kGroups][kRing];
  alignas(16) float weight[kPadded][4][8];  // of the heads of lane % 4
  struct alignas(16) Look {
    float bar;  // the scores of the bars
    int visible;
    float block_bar;
  } look[kPadded];
  choose::Work work[Plan<NQ>::kTeams];
  choose::Share share;
  int sums[2 * choose::kWarps];
  Args args;       // for functions that are not inlined
  uint32_t signs;  // 0x40404040, which the compiler shall not know
  int top[NQ][kHeads];
  bool plain[NQ];  // b and weight cannot hold the query
  int count[NQ], block_count[NQ];
  int stop[2][4];  // of a group: a list is full
  bool ended[4];   // a group has no tile left
};
constexpr int kPlain = 1 << 20;
constexpr float kInfinite = __builtin_huge_valf();

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
  static constexpr int kTile = Plan<NQ>::kTile;
  static constexpr int kExtra = NQ == 1 ? 8 : 16 + 8 * NQ;  // loading the queries, the last cut, the sort: in tiles
  const Args& args;
  __device__ int seen(int t, int request) const {  // entries that a row sees
    if (request < 0 || request >= args.num_requests) return 0;
    int room = args.table_width * args.page_size, n = args.visible[t];
    return n < 0 ? 0 : n < room ? n : room;
  }
  __device__ int tiles(int most) const {
    if (!RESTRICT) return (most + kTile - 1) / kTile;
    int blocks = (most + args.block_size - 1) / args.block_size, per = kTile / args.block_size;
    return ((blocks < args.num_candidates ? blocks : args.num_candidates) + per - 1) / per;
  }
  __device__ int operator()(int u) const {
    int request[NQ], sees[NQ], total = 0, most = 0;
#pragma unroll
    for (int i = 0; i < NQ; ++i) {
      const int t = u * NQ + i;
      request[i] = t < args.tokens ? args.requests[t] : -1, sees[i] = t < args.tokens ? seen(t, request[i]) : 0;
    }
#pragma unroll
    for (int i = 0; i < NQ; ++i) {
      most = sees[i] > most ? sees[i] : most;
      if (i + 1 == NQ || request[i + 1] != request[i]) total += tiles(most), most = 0;
    }
    return total > 0 ? total : 1;
  }
};

// The rows of a unit, one a lane: what it sees, and where runs of one request begin.
struct Rows {
  int sees;
  uint32_t starts;
  int tiles;  // of all runs, at least one

  template <int NQ, bool RESTRICT>
  __device__ Rows(const Units<NQ, RESTRICT>& units, int u, int lane) {
    const int t = u * NQ + lane;
    const bool real = lane < NQ && t < units.args.tokens;
    const int request = real ? units.args.requests[t] : -1;
    sees = real ? units.seen(t, request) : 0;
    const int before = __shfl_up_sync(~0u, request, 1);
    starts = __ballot_sync(~0u, real && (lane == 0 || before != request));
    tiles = 0;
    for (int at = 0, next, most; at < NQ; at = next) most = run(at, NQ, next), tiles += units.tiles(most);
    tiles = tiles > 0 ? tiles : 1;
  }
  // The run that begins at row `at`: where it ends, and the most that its rows see.
  __device__ int run(int at, int rows, int& end) const {
    const uint32_t later = starts & ~((2u << at) - 1);
    end = later != 0 ? __ffs(later) - 1 : rows;
    const int lane = threadIdx.x % 32;
    return __reduce_max_sync(~0u, lane >= at && lane < end ? sees : 0);
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

// What a group of warps does with the tiles of a run: of the unit's queries [first, end).
template <int FORMAT, int NQ, bool PUBLISH, bool SELECT>
struct Run {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  // Queries of one product. Its sums over heads meet in four lanes; of their four results (two rows of two
  // queries, or of one query and two halves of the tile) each lane takes one.
  static constexpr int PAIR = NQ == 1 ? 1 : 2;
  const Args& args;
  S& s;
  int unit, first, end, group;
  uint32_t warp, lane, c, row;  // of the group; row: the lane's first one
  bool plain;                   // a query that b cannot hold
  uint32_t signs;
  int block_shift;  // of 4 or 8 entries

  __device__ Run(const Args& args, S& s, int unit, int first, int end, int group, uint32_t tid)
      : args(args), s(s), unit(unit), first(first), end(end), group(group), warp(tid / 32 % 4), lane(hopper::opaque(tid % 32)),
        c(hopper::opaque(tid % 4)), row(hopper::opaque(16 * warp + lane / 4)), plain(false), signs(s.signs),
        block_shift(args.block_size == 8 ? 3 : 2) {
    for (int m = first; m < end; ++m) plain |= s.plain[m];
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

  // One value of each lane: of query m and an entry, or of none (-1).
  __device__ __forceinline__ void take(float score, int m, int entry) {
    const typename S::Look look = s.look[m];
    const bool live = m < end && static_cast<uint32_t>(entry) < static_cast<uint32_t>(look.visible);
    if constexpr (!SELECT) {
      if (live) args.scores[static_cast<int64_t>(unit * NQ + m) * args.k + entry] = score;
      return;
    }
    // The lanes that share a query.
    const uint32_t peers = PAIR == 1 ? ~0u : c & 2 ? 0xCCCCCCCCu : 0x33333333u;
    const int leader = PAIR == 1 ? 0 : c & 2;
    if (__any_sync(~0u, live && score >= look.bar)) {
      const uint32_t order = choose::ordered(score);
      const uint64_t key = choose::key_of(order, entry);
      const bool pass = live && choose::passes(order, key, s.bar[m]);
      choose::append_to(s.list[m], &s.count[m], pass, key, peers, leader, lane);
    }
    if constexpr (PUBLISH) {
      // The best of each candidate block: rows of one block are neighbours within eight.
      float best = live ? score : -kInfinite;
      best = best == best ? best : -kInfinite;
      for (int step = 4; step < 4 << block_shift; step *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
      const int block = entry >> block_shift;
      const bool head = live && entry == block << block_shift;
      if (head && block == (look.visible - 1) >> block_shift) best = kInfinite;
      if (__any_sync(~0u, head && best >= look.block_bar)) {
        const uint64_t key = choose::key_of(choose::ordered(best), block);
        const bool pass = head && key > s.block_bar[m];
        choose::append_to(s.block_list[m], &s.block_count[m], pass, key, peers, leader, lane);
      }
    }
  }

  __device__ __forceinline__ uint64_t operand(int m) const {
    return hopper::tile_descriptor(hopper::smem_address(s.b[m]));
  }
  __device__ __forceinline__ int entry_of(int stage, uint32_t row) const {
    const int entry = s.entry[group][stage][row / kQuad];
    return entry >= 0 ? entry + static_cast<int>(row % kQuad) : -1;
  }

  __device__ __forceinline__ void tile(int stage) {
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
      const int entry = entry_of(stage, mine);
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
      take(out, 0, entry);
    } else {
      uint32_t a[4][4];
      Seen seen;
      load_keys<FORMAT>(values, scales, signs, row, c, a, seen);
      const uint32_t mine = row + 8 * (c & 1);
      const int entry = entry_of(stage, mine);
      const float scale = scale_of(scales, mine);
      const bool apart = __any_sync(~0u, !seen.all_fit()) || plain;
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
        take(out, pair + static_cast<int>(c >> 1), entry);
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
