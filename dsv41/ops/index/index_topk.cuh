// The scan: groups of warps that copy tiles into rings of their own, score them (`Run`, of Hopper or of SM100) and keep
// the best (select.cuh); and the merge of what several blocks kept of one query.
#pragma once

namespace index_topk {

// The tiles of a run on their way into a group's ring: its tile j is tile `group + kGroups * j` of the block's. A warp
// copies kShare keys of a round; all threads keep count of the slots, of which each holds a round.
template <int FORMAT, int NQ, bool PUBLISH, bool RESTRICT>
struct Feed {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  static constexpr int kTile = S::kTile, kGroups = Plan<NQ>::kGroups, kRound = S::kRound, kSlots = S::kRing / kRound;
  // Pieces of 16 bytes: where chunks are small, for which the copy engine is slow, or do not stay together.
  static constexpr bool kPieces = RESTRICT || FORMAT == kScaled;
  static constexpr int kShare = kPieces ? 64 * kRound / 2 : 64, kQuads = kShare / kQuad;
  const Args& args;
  S& s;
  int group, lane, part;  // part: of a round, that the warp copies
  int shift, parts;  // chunks are 1 << shift keys that lie together, and the warp copies 1 << parts of them for a round
  int slot = 0;      // of the round that is scored next
  uint32_t phase = 0;
  // Of the run:
  int t, most, from, count, next;  // a row, what its rows see, the first tile, the group's tiles, the round that is copied next
  int entry, page, offset;         // of the lane's chunk: 32 chunks are looked up at once

  __device__ Feed(const Args& args, S& s, int tid)
      : args(args), s(s), group(tid / 128), lane(tid % 32), part((tid / 32 - group) & 3) {
    shift = kShare == 64 ? 6 : 5;
    if (RESTRICT) shift = args.block_size == 8 ? 3 : 2;
    else
      while (args.page_size % (1 << shift) != 0) --shift;
    parts = (kShare == 64 ? 6 : 5) - shift;
  }

  // A run of a row's request: the block's tiles [from, to).
  __device__ __forceinline__ void begin(int row, int sees, int first, int to) {
    t = row, most = sees, from = first, next = 0;
    const int tiles = to - first;
    count = tiles > group ? (tiles - group + kGroups - 1) / kGroups : 0;
#pragma unroll 1
    for (int i = 0; i < kSlots - 1; ++i) copy((slot + i) % kSlots);
  }

  __device__ __forceinline__ void look_up() {
    // Keys of the group's rounds, then of the block's tiles.
    const int key = ((next + (lane >> parts)) * kRound * kTile) + part * kShare + ((lane & ((1 << parts) - 1)) << shift);
    const int number = ((from + group + key / kTile * kGroups) * kTile + key % kTile) >> shift;
    entry = -1;
    if (key / kTile >= count) {
    } else if (!RESTRICT) {
      if (number < 0x7FFFFFFF >> shift && number << shift < most) entry = number << shift;
    } else if (number < args.num_candidates) {
      const int* own = args.candidates + static_cast<int64_t>(t) * args.num_candidates;
      const int block = own[number];
      const bool again = number > 0 && own[number - 1] == block;
      if (block >= 0 && !again && block < (most + args.block_size - 1) / args.block_size) entry = block << shift;
    }
    page = -1, offset = 0;
    if (entry >= 0) {
      const int* row = args.table + static_cast<int64_t>(args.requests[t]) * args.table_stride;
      page = row[entry / args.page_size], offset = entry % args.page_size;
    }
    if (page < 0 || page >= args.num_pages) entry = -1;
  }

  // Starts the copy of the group's next round, if there is one.
  __device__ __forceinline__ void copy(int into) {
    if (part * kShare >= kRound * kTile || next * kRound >= count) return;
    const int to = into * kRound + part * kShare / kTile, at = part * kShare % kTile;  // stage, first key
    const int first = next << parts & 31, place = lane - first;  // its chunks among the lanes
    if (first == 0) look_up();
    const bool mine = place >> parts == 0 && entry >= 0;
    const int quads = shift - 2;  // of a chunk, as a shift
    const int start = __shfl_sync(~0u, entry, first + (lane >> quads));
    if (lane < kQuads) s.entry[group][to][at / kQuad + lane] = start < 0 ? -1 : start + (lane & ((1 << quads) - 1)) * kQuad;
    uint64_t* full = &s.full[group][to];
    const uint8_t* base = args.pages + (entry >= 0 ? page : 0) * args.page_stride;
    if constexpr (kPieces) {
      const int64_t values = entry >= 0 ? base - args.pages + offset * S::kValues : -1;
      const int64_t scales = base - args.pages + static_cast<int64_t>(args.page_size) * S::kValues + offset * 4;
#pragma unroll
      for (int i = 0; i < kShare * S::kValues / 512; ++i) {
        constexpr int EACH = S::kValues / 16;  // pieces a key
        const int key = (32 * i + lane) / EACH, within = (key & ((1 << shift) - 1)) * S::kValues + lane % EACH * 16;
        const int64_t from = __shfl_sync(~0u, values, first + (key >> shift));
        hopper::copy_16(&s.values[group][to][S::place(at + key, lane % EACH)], args.pages + (from < 0 ? 0 : from + within),
                        from >= 0);
      }
      const int key = 4 * lane % kShare;
      const int64_t from = __shfl_sync(~0u, scales, first + (key >> shift));
      const bool real = __shfl_sync(~0u, entry, first + (key >> shift)) >= 0;
      if (lane < kQuads) hopper::copy_16(&s.scales[group][to][at + key], args.pages + from + (key & ((1 << shift) - 1)) * 4, real);
      hopper::barrier_arrive_copies(full);
    } else {
      const uint32_t votes = __ballot_sync(~0u, mine);
      if (lane == 0) hopper::barrier_expect(full, (__popc(votes) << shift) * (S::kValues + 4));
      __syncwarp();
      if (mine) {
        const int key = at + (place << shift);
        hopper::bulk_copy(&s.values[group][to][key * S::kValues], base + offset * S::kValues, S::kValues << shift, full);
        hopper::bulk_copy(&s.scales[group][to][key], base + static_cast<int64_t>(args.page_size) * S::kValues + offset * 4,
                          4 << shift, full);
      }
    }
    ++next;
  }
  // All warps of the group are done with the round before: its slot is free.
  __device__ __forceinline__ void refill() { copy(slot == 0 ? kSlots - 1 : slot - 1); }
  __device__ __forceinline__ void step() {
    if (++slot == kSlots) slot = 0, phase ^= 1;
  }
};

// A list of one query, of entries or of candidate blocks: what a team cuts, sorts or stores.
template <class S, bool PUBLISH>
struct List {
  S& s;
  int m;
  bool blocks;
  template <int THREADS>
  __device__ void cut(int k, int slack, int team, int tid) const {
    const int count = blocks ? s.block_count[m] : s.count[m];
    if (count <= k + slack) return;
    choose::Work& work = s.work[team];
    int left;
    if (PUBLISH && blocks)
      left = choose::cut<S::kBlockCap / THREADS, THREADS>(s.block_list[m], count, k, slack, work, tid, team);
    else
      left = choose::cut<S::kCap / THREADS, THREADS>(s.list[m], count, k, slack, work, tid, team);
    if (tid == 0) {
      if (blocks) s.block_count[m] = left, s.block_bar[m] = work.bar, s.look[m].block_bar = choose::score_of(work.bar);
      else s.count[m] = left, s.bar[m] = work.bar, s.look[m].bar = choose::score_of(work.bar);
    }
    choose::sync<THREADS>(team);
  }
};

// The group's warps are done with their round. Whether a list may not hold what all groups add before they look again:
// the same in all threads of the group.
template <bool SELECT, int FORMAT, int NQ, bool PUBLISH>
__device__ __forceinline__ bool look(Shared<FORMAT, NQ, PUBLISH>& s, int group, int tid) {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  const int lane = tid % 32;
  bool full = false;
  if (!SELECT) {
  } else if (lane < NQ) {
    full = atomicAdd(&s.count[lane], 0) > S::kFull;  // others add to it meanwhile
  } else if (PUBLISH && lane >= 16 && lane < 16 + NQ) {
    full = atomicAdd(&s.block_count[lane - 16], 0) > S::kBlockFull;
  }
  return hopper::named_barrier_any(5 + group, 128, full);
}

// The groups take the tiles of a run in turn. When a list is full they meet, and teams cut the lists.
template <int FORMAT, int NQ, bool PUBLISH, bool RESTRICT, bool SELECT>
__device__ void score_run(const Args& args, Shared<FORMAT, NQ, PUBLISH>& s, Feed<FORMAT, NQ, PUBLISH, RESTRICT>& feed,
                          int unit, int first, int end, int tid) {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  using P = Plan<NQ>;
  const int group = feed.group, team = tid / P::kTeam;
  Run<FORMAT, NQ, PUBLISH, SELECT> run(args, s, unit, first, end, group, tid);
  int tile = 0;
  while (true) {
#pragma unroll 1
    for (; tile < feed.count; feed.step()) {
      if (look<SELECT>(s, group, tid)) break;
      feed.refill();
#pragma unroll 1
      for (int i = 0; i < S::kRound; ++i, ++tile) {
        const int stage = feed.slot * S::kRound + i;
        hopper::barrier_wait(&s.full[group][stage], feed.phase);
        if (tile < feed.count) run.tile(stage, feed.phase);
      }
    }
    if (tid % 128 == 0) s.ended[group] = tile >= feed.count;
    choose::sync<P::kThreads>();
    if constexpr (!SELECT) break;
    bool ended = true;
#pragma unroll
    for (int i = 0; i < P::kGroups; ++i) ended &= s.ended[i];
    if (!ended)
      for (int job = team; job < NQ * (PUBLISH ? 2 : 1); job += P::kTeams) {
        // What is half full is cut, too: others would soon follow it.
        const List<S, PUBLISH> list{s, job % NQ, job >= NQ};
        const int k = list.blocks ? args.num_blocks : args.k, most = list.blocks ? S::kBlockCap : S::kCap;
        if ((list.blocks ? s.block_count[list.m] : s.count[list.m]) > k + (most - k) / 3)
          list.template cut<P::kTeam>(k, list.blocks ? 256 : 128, team, tid % P::kTeam);
      }
    choose::sync<P::kThreads>();
    if (ended) break;
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

// What a team does with a list at the end of a block's part of a unit: writes its best in order, or stores it for
// the merge.
template <int FORMAT, int NQ, bool PUBLISH>
__device__ void finish(const Args& args, Shared<FORMAT, NQ, PUBLISH>& s, int job, int64_t t, bool whole, int slot,
                       int lists, int team, int tid) {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  constexpr int THREADS = Plan<NQ>::kTeam;
  const List<S, PUBLISH> own{s, job % NQ, job >= NQ};
  const int m = own.m, k = own.blocks ? args.num_blocks : args.k;
  own.template cut<THREADS>(k, whole ? 0 : own.blocks ? kBlockSlack : kSlack, team, tid);
  const int count = own.blocks ? s.block_count[m] : s.count[m];
  uint64_t* list = PUBLISH && own.blocks ? s.block_list[m] : s.list[m];
  int* out = own.blocks ? args.blocks + t * k : args.ids + t * k;
  if (whole) {
    choose::write_sorted<THREADS>(list, count, k, out, s.work[team], tid, team);
    return;
  }
  const int64_t at = slot * NQ + m;
  uint64_t* to = own.blocks ? args.lists + static_cast<int64_t>(lists) * kListRoom + at * kBlockRoom : args.lists + at * kListRoom;
  for (int i = tid; i < count; i += THREADS) to[i] = list[i];
  if (tid == 0) args.counts[(own.blocks ? lists : 0) + at] = count;
}

template <int FORMAT, int NQ, bool PUBLISH, bool RESTRICT, bool SELECT, int BYTES>
__device__ void scan(const void* q, const void* q_scale, const void* weights, const void* requests,
                     const void* visible, const void* pages, const void* table, const void* candidates, void* ids,
                     void* blocks, void* scratch, int tokens, int heads, int num_requests, int table_width,
                     int table_stride, int page_size, int num_pages, int64_t page_stride, int num_candidates,
                     int num_blocks, int block_size, int k, int grid, void* memory) {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  using P = Plan<NQ>;
  using R = Run<FORMAT, NQ, PUBLISH, SELECT>;
  using F = Feed<FORMAT, NQ, PUBLISH, RESTRICT>;
  static_assert(sizeof(S) <= BYTES);
  static_assert(!RESTRICT || NQ == 1);
  Args args;
  const int lists = 2 * grid * NQ;
  unpack(args, q, q_scale, weights, requests, visible, pages, table, candidates, ids, blocks, scratch, tokens,
         heads, num_requests, table_width, table_stride, page_size, num_pages, page_stride, num_candidates,
         num_blocks, block_size, k, lists);
  S& s = *static_cast<S*>(memory);
  const int tid = threadIdx.x, lane = tid % 32, block = blockIdx.x, team = tid / P::kTeam;
  const Units<NQ, RESTRICT> units{args};
  if (tid == 0) {
    s.args = args;
    R::init(s);
    for (int i = 0; i < P::kGroups * S::kRing; ++i) hopper::barrier_init(&s.full[0][i], F::kPieces ? 128 / S::kRound : S::kTile / 64);
    hopper::fence_barrier_init();
  }
  choose::find_share(units, (tokens + NQ - 1) / NQ, block, grid, P::kLeast, s.sums, &s.share, tid, P::kThreads);
  const choose::Share share = s.share;
  if (share.unit < 0) return;
  R::open(s, tid);
  F feed(args, s, tid);
  int left = share.each, offset = share.offset;
  for (int unit = share.unit; left > 0 && unit * NQ < tokens; ++unit, offset = 0) {
    const Rows rows(units, unit, lane);
    const int behind = rows.tiles + units.kExtra, stop = offset + left < behind ? offset + left : behind;
    const int end = stop < rows.tiles ? stop : rows.tiles;  // of this block's tiles
    left -= stop - offset;
    if (offset >= end) continue;  // all its tiles were another block's
    const int members = tokens - unit * NQ < NQ ? tokens - unit * NQ : NQ;
    bool loaded = false;
    int start = 0;  // first tile of the run within the unit
    for (int member = 0, after; member < members; member = after) {
      const int most = rows.run(member, members, after), count = units.tiles(most);
      const int from = offset > start ? offset - start : 0, to = end - start < count ? end - start : count;
      if (from < to) feed.begin(unit * NQ + member, most, from, to);
      if (!loaded) {  // while the first tiles are on their way
        loaded = true;
        choose::sync<P::kThreads>();
        if (tid < NQ) {
          s.bar[tid] = s.block_bar[tid] = choose::kNothing;
          s.look[tid].bar = s.look[tid].block_bar = choose::score_of(choose::kNothing);
          s.look[tid].visible = rows.sees;
          s.count[tid] = s.block_count[tid] = 0;
        }
        R::load(args, s, unit, tid);
        hopper::fence_async();
        choose::sync<P::kThreads>();
      }
      if (from < to) score_run<FORMAT, NQ, PUBLISH, RESTRICT, SELECT>(args, s, feed, unit, member, after, tid);
      start += count;
    }
    if constexpr (SELECT) {
      const int slot = 2 * block + (offset == 0 ? 1 : 0);
      for (int job = team; job < NQ * (PUBLISH ? 2 : 1); job += P::kTeams)
        if (job % NQ < members)
          finish<FORMAT, NQ, PUBLISH>(args, s, job, unit * NQ + job % NQ, offset == 0 && end == rows.tiles, slot,
                                      lists, team, tid % P::kTeam);
    }
  }
  R::close(s, tid);
}

struct MergeShared {
  uint64_t list[choose::kMergeCap];
  choose::Work work;
  choose::Share share;
  int sums[2 * choose::kWarps], counters[3];
};

// One block a boundary and member: the lists of a query that several blocks scanned.
template <int NQ, bool PUBLISH, bool RESTRICT, int BYTES>
__device__ void merge(const void* requests, const void* visible, void* ids, void* blocks, void* scratch, int tokens,
                      int num_requests, int table_width, int page_size, int num_candidates, int num_blocks,
                      int block_size, int k, int grid, void* memory) {
  static_assert(sizeof(MergeShared) <= BYTES);
  Args args;
  const int lists = 2 * grid * NQ, tid = threadIdx.x, block = blockIdx.x, member = blockIdx.y;
  unpack(args, nullptr, nullptr, nullptr, requests, visible, nullptr, nullptr, nullptr, ids, blocks, scratch,
         tokens, 0, num_requests, table_width, 0, page_size, 0, 0, num_candidates, num_blocks, block_size, k, lists);
  MergeShared& s = *static_cast<MergeShared*>(memory);
  const Units<NQ, RESTRICT> units{args};
  choose::find_share(units, (tokens + NQ - 1) / NQ, block, grid, Plan<NQ>::kLeast, s.sums, &s.share, tid, choose::kMergeThreads);
  cudaGridDependencySynchronize();  // the scan has ended
  const choose::Merge found = choose::find_merge(s.share, block);
  const int64_t t = static_cast<int64_t>(found.unit) * NQ + member;
  if (found.unit < 0 || t >= tokens) return;
  int count = choose::merge_lists(args.lists, args.counts, kListRoom, found.first, found.last, member, NQ,
                                             kListRoom, k, s.list, s.counters, s.work, tid);
  choose::write_sorted<choose::kMergeThreads>(s.list, count, k, args.ids + t * k, s.work, tid);
  if constexpr (PUBLISH) {
    count = choose::merge_lists(args.lists + static_cast<int64_t>(lists) * kListRoom,
                                                args.counts + lists, kBlockRoom, found.first, found.last, member, NQ,
                                                kBlockRoom, num_blocks, s.list, s.counters, s.work, tid);
    choose::write_sorted<choose::kMergeThreads>(s.list, count, num_blocks, args.blocks + t * num_blocks, s.work, tid);
  }
}

}  // namespace index_topk
