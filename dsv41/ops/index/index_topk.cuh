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
constexpr int kTile = 64;    // keys a tile
constexpr int kQuad = 4;     // keys that always lie together: the least page and the least candidate block
constexpr int kThreads = 288;
constexpr int kGroups = 2;   // of four warps
constexpr int kBatch = 2;    // tiles a group takes between two looks at the lists
constexpr int kListRoom = 512;
constexpr int kBlockRoom = 2048;
constexpr int kLeast = 16;   // tiles a block at least

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
  static constexpr int kStages = FORMAT == kMXFP4 ? 8 : 4;
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
  int sums[16];
  int exponent[NQ];  // of the powers that b and weight leave out; kPlain: b cannot hold the query
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

// Heads of one query as operand B, and what it leaves out. One warp; lane = head.
template <int FORMAT>
__device__ void load_query(const Args& args, int t, uint8_t* b, float* weight, int* exponent, int lane) {
  const bool real = lane < args.heads && t < args.tokens;
  const int64_t row = real ? static_cast<int64_t>(t) * args.heads + lane : 0;
  uint4 q[4];
  uint32_t codes = *reinterpret_cast<const uint32_t*>(args.q_scale + row * 4);
  int code[4], top = 0, low = 255;
  bool plain = false;
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    q[g] = *reinterpret_cast<const uint4*>(args.q + row * 64 + g * 16);
    code[g] = codes >> (8 * g) & 255;
    bool live = ((q[g].x | q[g].y | q[g].z | q[g].w) & 0x77777777u) != 0;
    plain |= code[g] == 255;
    if (live) top = code[g] > top ? code[g] : top, low = code[g] < low ? code[g] : low;
    else code[g] = -1;
  }
  plain = real && (plain || (low <= top && top - low > 14));
  // Head h's values are those in b times 2^(top - 6 - 127); the largest of these powers is the query's.
  int most = real ? top : 0;
  for (int step = 16; step > 0; step /= 2) {
    int other = __shfl_xor_sync(0xFFFFFFFFu, most, step);
    most = other > most ? other : most;
  }
  plain = __any_sync(0xFFFFFFFFu, plain);
  float w = real ? args.weights[row] : 0.0f;
  // Half of it: the sum over heads takes x + |x|, which is twice relu(x).
  weight[lane] = real && top > 0 ? scaled(0.5f * w, top - most) : 0.5f * w;
  if (lane == 0) *exponent = plain ? kPlain : most - 6 - 127;
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const uint32_t words[4] = {q[g].x, q[g].y, q[g].z, q[g].w};
    float factor = code[g] < 0 ? 0.0f : power(code[g] - top + 6);
    if (FORMAT == kMXFP4) factor = -factor;  // keys are decoded with the other sign
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t out = 0;
        for (int j = 0; j < 4; ++j) {
          float value = e2m1(words[s] >> (16 * half + 4 * j) & 15) * factor;
          out |= (plain || !real || value == 0.0f ? 0u : e4m3_code(value)) << (8 * j);
        }
        int at = 32 * s + 16 * half + 4 * g;  // where the product takes these four values
        *reinterpret_cast<uint32_t*>(b + hopper::swizzle_128(lane, at / 16) + at % 16) = out;
      }
  }
}

// A score by plain arithmetic, each step in float32; lane = head. The key's words and scales come from the lanes
// that hold the row: `source` is the first of four.
template <int FORMAT, int WORDS>
__device__ float plain_score(const Args& args, int t, const uint32_t (&words)[WORDS], uint32_t scales, int source,
                             int lane) {
  const bool real = lane < args.heads;
  const int64_t row = static_cast<int64_t>(t) * args.heads + (real ? lane : 0);
  float dot = 0.0f;
  scales = __shfl_sync(0xFFFFFFFFu, scales, source);
  const float nan = __uint_as_float(0x7FC00000u);
  for (int g = 0; g < 4; ++g) {
    float part = 0.0f;
#pragma unroll
    for (int s = 0; s < WORDS; ++s) {
      uint32_t key = __shfl_sync(0xFFFFFFFFu, words[s], source + g);
      if (FORMAT == kMXFP4) {
        uint32_t q = *reinterpret_cast<const uint32_t*>(args.q + row * 64 + g * 16 + s * 4);
        for (int j = 0; j < 8; ++j) part += e2m1(q >> 4 * j & 15) * e2m1(key >> 4 * j & 15);
      } else {
        uint32_t q = *reinterpret_cast<const uint16_t*>(args.q + row * 64 + g * 16 + s * 2);
        for (int j = 0; j < 4; ++j) part += e2m1(q >> 4 * j & 15) * e4m3(key >> 8 * j & 255);
      }
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
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  return sum;
}

// Eight E2M1 codes to E4M3 through a table of the eight magnitudes; the sign comes out inverted.
__device__ __forceinline__ void decode(uint32_t word, uint32_t low, uint32_t high, uint32_t& first, uint32_t& second) {
  uint32_t magnitude = word & 0x77777777u;
  first = __byte_perm(low, high, magnitude) + 2 * hopper::byte_select(0x40404040u, 0x40404040u, word);
  second = __byte_perm(low, high, magnitude >> 16) + 2 * hopper::byte_select(0x40404040u, 0x40404040u, word >> 16);
}

template <int FORMAT, int NQ, bool PUBLISH>
struct Ring {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  int stage = 0;
  uint32_t phase = 0;
  __device__ void next(int by = 1) {
    stage += by;
    if (stage >= S::kStages) stage -= S::kStages, phase ^= 1;
  }
};

// The copying warp: tiles [from, to) of a run of rows of one request.
template <int FORMAT, int NQ, bool PUBLISH, bool RESTRICT>
__device__ void copy_run(const Args& args, Shared<FORMAT, NQ, PUBLISH>& s, Ring<FORMAT, NQ, PUBLISH>& ring, int t,
                         int most, int from, int to, int lane) {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  int chunk = kTile;  // keys that lie together
  if (RESTRICT) chunk = args.block_size;
  else
    while (args.page_size % chunk != 0) chunk /= 2;
  const int each = kTile / chunk;        // chunks a tile
  const int batch = 32 / each;           // tiles that the lanes look up at once
  const int* row = args.table + static_cast<int64_t>(args.requests[t]) * args.table_stride;
  for (int tile = from; tile < to; tile += batch) {
    int number = tile * each + lane, entry = -1, page = -1;
    if (!RESTRICT) {
      if (number < (0x7FFFFFFF / chunk) && number * chunk < most) entry = number * chunk;
    } else if (number < args.num_candidates) {
      const int* own = args.candidates + static_cast<int64_t>(t) * args.num_candidates;
      int block = own[number];
      bool again = number > 0 && own[number - 1] == block;
      if (block >= 0 && !again && block < (most + args.block_size - 1) / args.block_size) entry = block * chunk;
    }
    if (entry >= 0) page = row[entry / args.page_size];
    if (page < 0 || page >= args.num_pages) entry = -1;
    const uint8_t* base = args.pages + page * args.page_stride;
    const int offset = entry >= 0 ? entry % args.page_size : 0;
    for (int i = 0; i < batch && tile + i < to; ++i, ring.next()) {
      hopper::barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
      const int place = lane - i * each;
      const bool mine = place >= 0 && place < each;
      if (mine)
        for (int j = 0; j < chunk / kQuad; ++j)
          s.entry[ring.stage][place * (chunk / kQuad) + j] = entry < 0 ? -1 : entry + j * kQuad;
      const uint32_t votes = __ballot_sync(0xFFFFFFFFu, mine && entry >= 0);
      if (lane == 0) hopper::barrier_expect(&s.full[ring.stage], __popc(votes) * chunk * (S::kValues + 4));
      __syncwarp();
      if (mine && entry >= 0) {
        hopper::bulk_copy(&s.values[ring.stage][place * chunk * S::kValues], base + offset * S::kValues,
                          chunk * S::kValues, &s.full[ring.stage]);
        hopper::bulk_copy(&s.scales[ring.stage][place * chunk],
                          base + static_cast<int64_t>(args.page_size) * S::kValues + offset * 4, chunk * 4,
                          &s.full[ring.stage]);
      }
    }
  }
}

// Scores of one tile. COUNT queries: all of the unit, or the one at `first`. Lane c of a quad of lanes gets row
// c % 2 of the pair that the quad holds (16 * warp + lane / 4, and that + 8).
template <int COUNT, int FORMAT, int NQ, bool PUBLISH>
__device__ __forceinline__ void tile_scores(const Args& args, Shared<FORMAT, NQ, PUBLISH>& s, int stage, int unit,
                                            int first, int warp, int lane, int& entry,
                                            float (&out)[COUNT > 1 ? COUNT / 2 : 1], uint32_t phase) {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  constexpr int WORDS = S::kValues / 16;
  const int c = lane % 4, row = 16 * warp + lane / 4;
  hopper::barrier_wait(&s.full[stage], phase);
  uint32_t k0[WORDS], k1[WORDS];
  const uint8_t* at = &s.values[stage][row * S::kValues + c * (S::kValues / 4)];
#pragma unroll
  for (int i = 0; i < WORDS / 4; ++i) {
    uint4 x = *reinterpret_cast<const uint4*>(at + 16 * i);
    uint4 y = *reinterpret_cast<const uint4*>(at + 8 * S::kValues + 16 * i);
    k0[4 * i] = x.x, k0[4 * i + 1] = x.y, k0[4 * i + 2] = x.z, k0[4 * i + 3] = x.w;
    k1[4 * i] = y.x, k1[4 * i + 1] = y.y, k1[4 * i + 2] = y.z, k1[4 * i + 3] = y.w;
  }
  const uint32_t scale0 = s.scales[stage][row], scale1 = s.scales[stage][row + 8];
  const int mine = row + 8 * (c & 1);
  entry = s.entry[stage][mine / kQuad];
  __syncwarp();
  if (lane == 0) hopper::barrier_arrive(&s.empty[stage]);
  if (entry >= 0) entry += mine % kQuad;

  uint32_t a[4][4];
  bool bad0 = false, bad1 = false;
  if constexpr (FORMAT == kMXFP4) {
    // A group's power relative to the row's first group; `low` and `high` are its table of magnitudes.
    const int d0 = static_cast<int>(scale0 >> (8 * c) & 255) - static_cast<int>(scale0 & 255);
    const int d1 = static_cast<int>(scale1 >> (8 * c) & 255) - static_cast<int>(scale1 & 255);
    bad0 = static_cast<uint32_t>(d0 + 5) > 11 || (scale0 & 255) > 248;
    bad1 = static_cast<uint32_t>(d1 + 5) > 11 || (scale1 & 255) > 248;
    const uint32_t low0 = 0x3C383000u + d0 * 0x08080800u, high0 = 0x4C484440u + d0 * 0x08080808u;
    const uint32_t low1 = 0x3C383000u + d1 * 0x08080800u, high1 = 0x4C484440u + d1 * 0x08080808u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      decode(k0[i], low0, high0, a[i][0], a[i][2]);
      decode(k1[i], low1, high1, a[i][1], a[i][3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i][0] = k0[2 * i], a[i][2] = k0[2 * i + 1];
      a[i][1] = k1[2 * i], a[i][3] = k1[2 * i + 1];
    }
  }
  float d[COUNT * 16];
  const uint64_t b = hopper::tile_descriptor(hopper::smem_address(s.b[first]));
  hopper::keep(d);
  hopper::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) hopper::wgmma_e4m3_rs(d, a[i], b + 2 * i, i > 0);
  hopper::wgmma_commit();
  hopper::wgmma_wait<0>();
  hopper::keep(d);

  const uint32_t scale = c & 1 ? scale1 : scale0;
  float half[COUNT];
#pragma unroll
  for (int m = 0; m < COUNT; ++m) {
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 w = *reinterpret_cast<const float2*>(&s.weight[first + m][8 * j + 2 * c]);
      const float* x = &d[16 * m + 4 * j];
      sum0 = fmaf(w.x, x[0] + fabsf(x[0]), sum0);
      sum0 = fmaf(w.y, x[1] + fabsf(x[1]), sum0);
      sum1 = fmaf(w.x, x[2] + fabsf(x[2]), sum1);
      sum1 = fmaf(w.y, x[3] + fabsf(x[3]), sum1);
    }
    const float give = c & 1 ? sum0 : sum1, keep = c & 1 ? sum1 : sum0;
    half[m] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, 1);
  }
  constexpr int OUT = COUNT > 1 ? COUNT / 2 : 1;
#pragma unroll
  for (int i = 0; i < OUT; ++i) {
    // Queries i of the lower lanes and i + OUT of the upper ones.
    float keep = half[i], give = half[i];
    if (COUNT > 1) keep = c & 2 ? half[(COUNT > 1 ? OUT : 0) + i] : half[i], give = c & 2 ? half[i] : half[(COUNT > 1 ? OUT : 0) + i];
    float sum = keep + __shfl_xor_sync(0xFFFFFFFFu, give, 2);
    const int m = first + i + (COUNT > 1 && c & 2 ? OUT : 0), left_out = s.exponent[m];
    if (FORMAT == kMXFP4) out[i] = scaled(sum, static_cast<int>(scale & 255) - 127 + left_out);
    else out[i] = scaled(sum * __uint_as_float(scale), left_out);
  }

  // A row's form depends on the row and the query alone, so that its score does too.
  bool all = false;
  for (int m = 0; m < COUNT; ++m) all |= s.exponent[first + m] == kPlain;
  const uint32_t votes0 = __ballot_sync(~0u, bad0), votes1 = __ballot_sync(~0u, bad1);
  if (!all && (votes0 | votes1) == 0) return;
  for (int pair = 0; pair < 8; ++pair) {
    const bool key0 = votes0 >> (4 * pair) & 15, key1 = votes1 >> (4 * pair) & 15;
    if (!all && !key0 && !key1) continue;
    for (int m = 0; m < COUNT; ++m) {
      const int t = unit * NQ + first + m;
      if (t >= args.tokens) continue;
      const bool query = s.exponent[first + m] == kPlain;
      const bool row0 = query || key0, row1 = query || key1;
      float x0 = 0.0f, x1 = 0.0f;
      if (row0) x0 = plain_score<FORMAT>(args, t, k0, scale0, 4 * pair, lane);
      if (row1) x1 = plain_score<FORMAT>(args, t, k1, scale1, 4 * pair, lane);
#pragma unroll
      for (int i = 0; i < OUT; ++i)
        if (lane / 4 == pair && m == i + (COUNT > 1 && c & 2 ? OUT : 0) && (c & 1 ? row1 : row0)) out[i] = c & 1 ? x1 : x0;
    }
  }
}

// A group of warps takes every other tile of [0, tiles) of a run whose queries are `first` .. `first + COUNT`.
template <int COUNT, int FORMAT, int NQ, bool PUBLISH, bool SELECT>
__device__ void score_run(const Args& args, Shared<FORMAT, NQ, PUBLISH>& s, Ring<FORMAT, NQ, PUBLISH>& ring,
                          int unit, int first, int tiles, int& round, int (&base)[NQ], int (&block_base)[NQ],
                          int tid) {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  constexpr int OUT = COUNT > 1 ? COUNT / 2 : 1;
  const int group = tid / 128, warp = tid / 32 % 4, lane = tid % 32, c = lane % 4;
  for (int start = 0; start < tiles; start += kGroups * kBatch, ++round) {
    const int slot = round % 3;
    for (int i = 0; i < kBatch; ++i) {
      const int tile = start + i * kGroups + group;
      if (tile < tiles) {
        Ring<FORMAT, NQ, PUBLISH> own = ring;
        own.next(i * kGroups + group);
        int entry;
        float score[OUT];
        tile_scores<COUNT, FORMAT, NQ, PUBLISH>(args, s, own.stage, unit, first, warp, lane, entry, score, own.phase);
#pragma unroll
        for (int j = 0; j < OUT; ++j) {
          const int m = first + j + (COUNT > 1 && c & 2 ? OUT : 0);
          const bool live = entry >= 0 && entry < s.visible[m] && (COUNT > 1 || c < 2);
          if constexpr (!SELECT) {
            if (live) args.scores[static_cast<int64_t>(unit * NQ + m) * args.k + entry] = score[j];
          } else {
            const uint32_t order = choose::ordered(score[j]);
            const uint64_t key = choose::key_of(order, entry);
            const bool pass = live && choose::passes(order, key, s.bar[m]);
            if constexpr (COUNT == 1) {
              choose::append(s.list[m], base[NQ > 1 ? m : 0], &s.count[slot][m], pass, key, lane);
            } else if (__any_sync(0xFFFFFFFFu, pass)) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int n = j + half * OUT;
                choose::append(s.list[n], base[n], &s.count[slot][n], pass && (c >> 1) == half, key, lane);
              }
            }
            if constexpr (PUBLISH) {
              // The best of each candidate block: rows of one block are neighbours within eight.
              uint32_t best = live && order <= 0xFF800000u && order > 0x007FFFFFu ? order : 0;
              for (int step = 4; step < 4 * args.block_size && step < 32; step *= 2) {
                uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, best, step);
                best = other > best ? other : best;
              }
              const int block = entry / args.block_size;
              const bool head = live && entry % args.block_size == 0;
              if (head && block == (s.visible[m] - 1) / args.block_size) best = 0xFF800000u;
              const uint64_t block_key = choose::key_of(best, block);
              const bool block_pass = head && best != 0 && block_key > s.block_bar[m];
              if constexpr (COUNT == 1) {
                choose::append(s.block_list[m], block_base[NQ > 1 ? m : 0], &s.block_count[slot][m], block_pass, block_key, lane);
              } else if (__any_sync(0xFFFFFFFFu, block_pass)) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const int n = j + half * OUT;
                  choose::append(s.block_list[n], block_base[n], &s.block_count[slot][n],
                                 block_pass && (c >> 1) == half, block_key, lane);
                }
              }
            }
          }
        }
      }
    }
    const int took = tiles - start < kGroups * kBatch ? tiles - start : kGroups * kBatch;
    ring.next(took);
    if constexpr (SELECT) {
      choose::sync();
#pragma unroll
      for (int m = 0; m < NQ; ++m) {
        base[m] += s.count[slot][m];
        if (PUBLISH) block_base[m] += s.block_count[slot][m];
      }
      if (tid < NQ) s.count[(round + 2) % 3][tid] = 0, s.block_count[(round + 2) % 3][tid] = 0;
#pragma unroll
      for (int m = 0; m < NQ; ++m) {
        uint64_t bar;
        if (base[m] > S::kCap - kGroups * kBatch * kTile) {
          base[m] = choose::cut<S::kCap / 256>(s.list[m], base[m], args.k, 128, s.work, tid, bar);
          if (tid == 0) s.bar[m] = bar;
          choose::sync();
        }
        if (PUBLISH && block_base[m] > S::kBlockCap - kGroups * kBatch * (kTile / kQuad)) {
          block_base[m] = choose::cut<S::kBlockCap / 256>(s.block_list[m], block_base[m], args.num_blocks, 256, s.work, tid, bar);
          if (tid == 0) s.block_bar[m] = bar;
          choose::sync();
        }
      }
    }
  }
}

__device__ __forceinline__ void unpack(Args& args, const void* q, const void* q_scale, const void* weights,
                                       const void* requests, const void* visible, const void* pages,
                                       const void* table, const void* candidates, void* ids, void* blocks,
                                       void* scratch, int tokens, int heads, int num_requests, int table_width,
                                       int table_stride, int page_size, int num_pages, int64_t page_stride,
                                       int num_candidates, int num_blocks, int block_size, int k, int lists) {
  args.q = static_cast<const uint8_t*>(q), args.q_scale = static_cast<const uint8_t*>(q_scale);
  args.weights = static_cast<const float*>(weights), args.requests = static_cast<const int*>(requests);
  args.visible = static_cast<const int*>(visible), args.pages = static_cast<const uint8_t*>(pages);
  args.table = static_cast<const int*>(table), args.candidates = static_cast<const int*>(candidates);
  args.ids = static_cast<int*>(ids), args.blocks = static_cast<int*>(blocks), args.scores = static_cast<float*>(ids);
  args.lists = static_cast<uint64_t*>(scratch);
  args.tokens = tokens, args.heads = heads, args.num_requests = num_requests, args.table_width = table_width;
  args.table_stride = table_stride, args.page_size = page_size, args.num_pages = num_pages;
  args.page_stride = page_stride, args.num_candidates = num_candidates, args.num_blocks = num_blocks;
  args.block_size = block_size, args.k = k;
  // Scratch: lists, block lists, then the lengths of both.
  const int64_t room = static_cast<int64_t>(lists) * (kListRoom + (num_blocks > 0 ? kBlockRoom : 0));
  args.counts = reinterpret_cast<int*>(args.lists + room);
}

template <int FORMAT, int NQ, bool PUBLISH, bool RESTRICT, bool SELECT, int BYTES>
__device__ void scan(const void* q, const void* q_scale, const void* weights, const void* requests,
                     const void* visible, const void* pages, const void* table, const void* candidates, void* ids,
                     void* blocks, void* scratch, int tokens, int heads, int num_requests, int table_width,
                     int table_stride, int page_size, int num_pages, int64_t page_stride, int num_candidates,
                     int num_blocks, int block_size, int k, int grid, void* memory) {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  static_assert(sizeof(S) <= BYTES);
  Args args;
  const int lists = 2 * grid * NQ;
  unpack(args, q, q_scale, weights, requests, visible, pages, table, candidates, ids, blocks, scratch, tokens,
         heads, num_requests, table_width, table_stride, page_size, num_pages, page_stride, num_candidates,
         num_blocks, block_size, k, lists);
  S& s = *static_cast<S*>(memory);
  const int tid = threadIdx.x, lane = tid % 32, block = blockIdx.x;
  const Units<NQ, RESTRICT> units{args};
  if (tid == 0) {
    for (int i = 0; i < S::kStages; ++i) hopper::barrier_init(&s.full[i], 1), hopper::barrier_init(&s.empty[i], 4);
    hopper::fence_barrier_init();
  }
  choose::find_share(units, (tokens + NQ - 1) / NQ, block, grid, kLeast, s.sums, &s.share, tid, kThreads);
  const choose::Share share = s.share;
  if (share.unit < 0) return;
  Ring<FORMAT, NQ, PUBLISH> ring;
  int left = share.each, unit = share.unit, offset = share.offset, tiles = share.tiles, round = 0;
  const bool copies = tid >= choose::kThreads;
  while (left > 0 && unit * NQ < tokens) {
    if (unit != share.unit) offset = 0, tiles = units(unit);
    const int end = offset + left < tiles ? offset + left : tiles;  // this block's tiles of the unit
    int base[NQ], block_base[NQ];
    if (!copies) {
      choose::sync();
      if (tid < NQ) {
        const int t = unit * NQ + tid;
        s.bar[tid] = s.block_bar[tid] = choose::kNothing;
        s.visible[tid] = t < tokens ? units.seen(t) : 0;
        for (int i = 0; i < 3; ++i) s.count[i][tid] = s.block_count[i][tid] = 0;
      }
#pragma unroll
      for (int m = 0; m < NQ; ++m) base[m] = block_base[m] = 0;
      for (int m = tid / 32; m < NQ; m += choose::kThreads / 32)
        load_query<FORMAT>(args, unit * NQ + m, s.b[m], s.weight[m], &s.exponent[m], lane);
      hopper::fence_async();
      choose::sync();
    }
    int start = 0;  // first tile of the run within the unit
    for (int member = 0; member < NQ && unit * NQ + member < tokens;) {
      int most;
      const int length = units.run(unit, member, most), count = units.tiles(most);
      const int from = offset > start ? offset - start : 0, to = end - start < count ? end - start : count;
      if (from < to) {
        if (copies) {
          copy_run<FORMAT, NQ, PUBLISH, RESTRICT>(args, s, ring, unit * NQ + member, most, from, to, lane);
        } else if (NQ == 1 || length == 1) {
          score_run<1, FORMAT, NQ, PUBLISH, SELECT>(args, s, ring, unit, member, to - from, round, base, block_base, tid);
        } else {
          // Rows of other runs are computed along and see nothing.
          if (NQ > 1 && length < NQ) {
            choose::sync();
            if (tid < NQ) {
              const int t = unit * NQ + tid;
              s.visible[tid] = tid >= member && tid < member + length && t < tokens ? units.seen(t) : 0;
            }
            choose::sync();
          }
          score_run<NQ, FORMAT, NQ, PUBLISH, SELECT>(args, s, ring, unit, 0, to - from, round, base, block_base, tid);
          if (NQ > 1 && length < NQ) {
            choose::sync();
            if (tid < NQ) s.visible[tid] = unit * NQ + tid < tokens ? units.seen(unit * NQ + tid) : 0;
            choose::sync();
          }
        }
      }
      start += count, member += length;
    }
    if (!copies && SELECT) {
      const bool whole = offset == 0 && end == tiles;
      const int slot = 2 * block + (offset == 0 ? 1 : 0);
      for (int m = 0; m < NQ && unit * NQ + m < tokens; ++m) {
        const int64_t t = unit * NQ + m;
        int count = base[0], block_count = block_base[0];
#pragma unroll
        for (int i = 1; i < NQ; ++i)
          if (m == i) count = base[i], block_count = block_base[i];
        uint64_t bar;
        if (count > k) count = choose::cut<S::kCap / 256>(s.list[m], count, k, 0, s.work, tid, bar);
        if (PUBLISH && block_count > num_blocks)
          block_count = choose::cut<S::kBlockCap / 256>(s.block_list[m], block_count, num_blocks, 0, s.work, tid, bar);
        if (whole) {
          choose::write_sorted<kListRoom>(s.list[m], count, k, args.ids + t * k, tid);
          if (PUBLISH)
            choose::write_sorted<kBlockRoom>(s.block_list[m], block_count, num_blocks, args.blocks + t * num_blocks, tid);
          continue;
        }
        const int list = slot * NQ + m;
        for (int i = tid; i < count; i += choose::kThreads)
          args.lists[static_cast<int64_t>(list) * kListRoom + i] = s.list[m][i];
        if (PUBLISH)
          for (int i = tid; i < block_count; i += choose::kThreads)
            args.lists[static_cast<int64_t>(lists) * kListRoom + static_cast<int64_t>(list) * kBlockRoom + i] =
                s.block_list[m][i];
        if (tid == 0) args.counts[list] = count, args.counts[lists + list] = PUBLISH ? block_count : 0;
      }
    }
    left -= end - offset;
    ++unit;
  }
}

constexpr int kMergeCap = 4096, kBlockMergeCap = 8192;

template <bool PUBLISH>
struct MergeShared {
  uint64_t list[PUBLISH ? kBlockMergeCap : kMergeCap];
  choose::Work work;
  choose::Share share;
  int sums[16], counters[3];
};

// One block a boundary and member: the lists of a query that several blocks scanned.
template <int NQ, bool PUBLISH, bool RESTRICT, int BYTES>
__device__ void merge(const void* requests, const void* visible, void* ids, void* blocks, void* scratch, int tokens,
                      int num_requests, int table_width, int page_size, int num_candidates, int num_blocks,
                      int block_size, int k, int grid, void* memory) {
  static_assert(sizeof(MergeShared<PUBLISH>) <= BYTES);
  Args args;
  const int lists = 2 * grid * NQ, tid = threadIdx.x, block = blockIdx.x, member = blockIdx.y;
  unpack(args, nullptr, nullptr, nullptr, requests, visible, nullptr, nullptr, nullptr, ids, blocks, scratch,
         tokens, 0, num_requests, table_width, 0, page_size, 0, 0, num_candidates, num_blocks, block_size, k, lists);
  MergeShared<PUBLISH>& s = *static_cast<MergeShared<PUBLISH>*>(memory);
  const Units<NQ, RESTRICT> units{args};
  choose::find_share(units, (tokens + NQ - 1) / NQ, block, grid, kLeast, s.sums, &s.share, tid, choose::kThreads);
  const choose::Merge found = choose::find_merge(s.share, block);
  const int64_t t = static_cast<int64_t>(found.unit) * NQ + member;
  if (found.unit < 0 || t >= tokens) return;
  int count = choose::merge_lists<kMergeCap>(args.lists, args.counts, kListRoom, found.first, found.last, member, NQ,
                                             kListRoom, k, s.list, s.counters, s.work, tid);
  choose::write_sorted<kListRoom>(s.list, count, k, args.ids + t * k, tid);
  if constexpr (PUBLISH) {
    count = choose::merge_lists<kBlockMergeCap>(args.lists + static_cast<int64_t>(lists) * kListRoom,
                                                args.counts + lists, kBlockRoom, found.first, found.last, member, NQ,
                                                kBlockRoom, num_blocks, s.list, s.counters, s.work, tid);
    choose::write_sorted<kBlockRoom>(s.list, count, num_blocks, args.blocks + t * num_blocks, tid);
  }
}

}  // namespace index_topk
