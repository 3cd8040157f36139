// What a scan works with, whatever scores the keys: its arguments, its shared memory, which tiles there are, and what
// becomes of a score.
//
// A block is groups of four warps that take tiles of keys in turn: two groups for one query at a time, four for
// several queries of one request.
#pragma once
#include <cstdint>

namespace index_topk {

constexpr int kHeads = 32;   // fewer are padded with heads of weight 0
constexpr int kQuad = 4;     // keys that always lie together: the least page and the least candidate block
constexpr int kMost = 512, kBlockMost = 2048;  // entries and blocks of a query
constexpr int kSlack = 256, kBlockSlack = 512;  // more of them in lists that are merged later
constexpr int kListRoom = kMost + kSlack, kBlockRoom = kBlockMost + kBlockSlack;

// Of keys. kScaled: MXFP4 keys that the tensor cores of SM100 take as they are stored, scales and all.
enum Format { kMXFP4 = 0, kFP8 = 1, kScaled = 2 };

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

// What only one kind of scoring keeps in shared memory.
template <int FORMAT>
struct Extra {};

template <int FORMAT, int NQ, bool PUBLISH>
struct Shared : Extra<FORMAT> {
  static constexpr int kTile = Plan<NQ>::kTile;
  static constexpr int kValues = FORMAT == kFP8 ? 128 : 64;
  static constexpr int kGroups = Plan<NQ>::kGroups;
  // Tiles that a group takes between two looks at the lists, and stages of its ring: a round is scored while the next
  // ones are copied.
  static constexpr int kRound = FORMAT == kMXFP4 && !PUBLISH ? 2 : 1;
  static constexpr int kRing = FORMAT == kFP8 || (NQ > 1 && PUBLISH) ? 2 : PUBLISH ? 3 : 4;
  static constexpr int kCap = NQ > 1 && PUBLISH ? 1536 : 2048, kBlockCap = NQ > 1 ? 3072 : 4096;
  // Lists are cut before they hold more. All warps of a group look after they have added, and the group goes by what any
  // of them saw: one whose last look was before a list was full adds one more round to it.
  static constexpr int kAhead = kGroups * kRound * kTile;
  static constexpr int kFull = kCap - kAhead, kBlockFull = kBlockCap - kAhead / kQuad;
  static_assert(kMost + (kCap - kMost) / 3 <= kFull, "lists that stop the groups are cut");
  // Where 16-byte piece `piece` of a key lies in a tile. kScaled: eight rows of a piece together, as a core of operands.
  static __device__ __forceinline__ int place(int key, int piece) {
    return FORMAT == kScaled ? key / 8 * 512 + piece * 128 + key % 8 * 16 : key * kValues + piece * 16;
  }
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
  bool ended[4];   // a group has no tile left
};
constexpr float kInfinite = __builtin_huge_valf();

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

// What a group of warps knows in a run (of the unit's queries [first, end)), and what it does with scores.
template <int FORMAT, int NQ, bool PUBLISH, bool SELECT>
struct Choice {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  // Queries of one product on Hopper. Its sums over heads meet in four lanes; of their four results (two rows of two
  // queries, or of one query and two halves of the tile) each lane takes one.
  static constexpr int PAIR = NQ == 1 || FORMAT == kScaled ? 1 : 2;
  static constexpr int kApart = FORMAT == kScaled ? 1 : 4;  // lanes from one row to the next
  const Args& args;
  S& s;
  int unit, first, end, group;
  uint32_t warp, lane, c;  // of the group
  int block_shift;         // of 4 or 8 entries

  __device__ Choice(const Args& args, S& s, int unit, int first, int end, int group, uint32_t tid)
      : args(args), s(s), unit(unit), first(first), end(end), group(group), warp(tid / 32 % 4), lane(hopper::opaque(tid % 32)),
        c(hopper::opaque(tid % 4)), block_shift(args.block_size == 8 ? 3 : 2) {}

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
      // The best of each candidate block: its rows are neighbours.
      float best = live ? score : -kInfinite;
      best = best == best ? best : -kInfinite;
      for (int step = kApart; step < kApart << block_shift; step *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
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

  __device__ __forceinline__ int entry_of(int stage, uint32_t row) const {
    const int entry = s.entry[group][stage][row / kQuad];
    return entry >= 0 ? entry + static_cast<int>(row % kQuad) : -1;
  }
};

// What a group of warps does with the tiles of a run: of Hopper, or of SM100.
template <int FORMAT, int NQ, bool PUBLISH, bool SELECT>
struct Run;

}  // namespace index_topk
