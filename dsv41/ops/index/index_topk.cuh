// The scan: a warp that copies tiles into the ring, two groups of warps that score them (index_score.cuh) and keep
// the best (select.cuh); and the merge of what several blocks kept of one query.
#pragma once

namespace index_topk {

template <int FORMAT, int NQ, bool PUBLISH>
struct Ring {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int by = 1) {  // up to kStages
    stage += by;
    if (stage >= S::kStages) stage -= S::kStages, phase ^= 1;
  }
  __device__ __forceinline__ void skip(int by) {
    stage += by, phase ^= stage / S::kStages & 1, stage %= S::kStages;
  }
};

// The copying warp: tiles [from, to) of a run of rows of one request.
template <int FORMAT, int NQ, bool PUBLISH, bool RESTRICT>
__device__ void copy_run(const Args& args, Shared<FORMAT, NQ, PUBLISH>& s, Ring<FORMAT, NQ, PUBLISH>& ring, int t,
                         int most, int from, int to, int lane) {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  int chunk = 64;  // keys that lie together
  if (RESTRICT) chunk = args.block_size;
  else
    while (args.page_size % chunk != 0) chunk /= 2;
  const int each = kTile / chunk;        // chunks a tile
  const int batch = 32 / each;           // tiles that the lanes look up at once
  const int quads = 31 - __clz(chunk / kQuad);  // of a chunk, as a shift
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
      const int first = __shfl_sync(0xFFFFFFFFu, entry, i * each + (lane >> quads));
      s.entry[ring.stage][lane] = first < 0 ? -1 : first + (lane & ((1 << quads) - 1)) * kQuad;
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

// The two groups take the tiles of a run in turn; between two rounds they look at the lists.
template <int COUNT, int FORMAT, int NQ, bool PUBLISH, bool SELECT>
__device__ void score_run(const Args& args, Shared<FORMAT, NQ, PUBLISH>& s, Ring<FORMAT, NQ, PUBLISH>& ring,
                          int unit, int first, int tiles, int& round, int (&base)[NQ], int (&block_base)[NQ],
                          int tid) {
  using S = Shared<FORMAT, NQ, PUBLISH>;
  const int group = tid / 128;
  Run<COUNT, FORMAT, NQ, PUBLISH, SELECT> run(args, s, unit, first, tid, base, block_base);
  for (int start = 0, step; start < tiles; start += step, round = round == 2 ? 0 : round + 1) {
    const int slot = round;
    step = tiles - start;
    if constexpr (SELECT) {
      // What surely fits into the lists.
#pragma unroll
      for (int m = 0; m < NQ; ++m) {
        const int room = (S::kCap - base[m]) / kTile, blocks = (S::kBlockCap - block_base[m]) / (kTile / kQuad);
        step = room < step ? room : step;
        if (PUBLISH) step = blocks < step ? blocks : step;
      }
      run.bar_high = static_cast<uint32_t>(s.bar[first] >> 32);
    }
    Ring<FORMAT, NQ, PUBLISH> own = ring;
    own.next(group);
#pragma unroll 1
    for (int i = group; i < step; i += kGroups, own.next(kGroups)) run.tile(own.stage, own.phase, slot);
    ring.skip(step);
    if constexpr (SELECT) {
      choose::sync();
#pragma unroll
      for (int m = 0; m < NQ; ++m) {
        base[m] += s.count[slot][m];
        if (PUBLISH) block_base[m] += s.block_count[slot][m];
      }
      if (tid < NQ) {
        const int last = round == 0 ? 2 : round - 1;
        s.count[last][tid] = 0, s.block_count[last][tid] = 0;
      }
#pragma unroll
      for (int m = 0; m < NQ; ++m) {
        if (base[m] > S::kCap - kLook * kTile) {
          base[m] = choose::cut<S::kCap / 256>(s.list[m], base[m], args.k, 128, s.work, tid);
          if (tid == 0) s.bar[m] = s.work.bar;
          choose::sync();
        }
        if (PUBLISH && block_base[m] > S::kBlockCap - kLook * (kTile / kQuad)) {
          block_base[m] = choose::cut<S::kBlockCap / 256>(s.block_list[m], block_base[m], args.num_blocks, 256, s.work, tid);
          if (tid == 0) s.block_bar[m] = s.work.bar;
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
    s.signs = 0x40404040u, s.args = args;
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
      load_queries<FORMAT, NQ>(args, s, unit, tid);
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
        const int slack = whole ? 0 : kSlack, block_slack = whole ? 0 : kBlockSlack;
        if (count > k + slack) count = choose::cut<S::kCap / 256>(s.list[m], count, k, slack, s.work, tid);
        if (PUBLISH && block_count > num_blocks + block_slack)
          block_count = choose::cut<S::kBlockCap / 256>(s.block_list[m], block_count, num_blocks, block_slack, s.work, tid);
        if (whole) {
          choose::write_sorted<kMost>(s.list[m], count, k, args.ids + t * k, tid);
          if (PUBLISH)
            choose::write_sorted<kBlockMost>(s.block_list[m], block_count, num_blocks, args.blocks + t * num_blocks, tid);
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

struct MergeShared {
  uint64_t list[choose::kMergeCap];
  choose::Work work;
  choose::Share share;
  int sums[32], counters[3];
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
  choose::find_share(units, (tokens + NQ - 1) / NQ, block, grid, kLeast, s.sums, &s.share, tid, choose::kMergeThreads);
  const choose::Merge found = choose::find_merge(s.share, block);
  const int64_t t = static_cast<int64_t>(found.unit) * NQ + member;
  if (found.unit < 0 || t >= tokens) return;
  int count = choose::merge_lists(args.lists, args.counts, kListRoom, found.first, found.last, member, NQ,
                                             kListRoom, k, s.list, s.counters, s.work, tid);
  choose::write_sorted<kMost, choose::kMergeThreads>(s.list, count, k, args.ids + t * k, tid);
  if constexpr (PUBLISH) {
    count = choose::merge_lists(args.lists + static_cast<int64_t>(lists) * kListRoom,
                                                args.counts + lists, kBlockRoom, found.first, found.last, member, NQ,
                                                kBlockRoom, num_blocks, s.list, s.counters, s.work, tid);
    choose::write_sorted<kBlockMost, choose::kMergeThreads>(s.list, count, num_blocks, args.blocks + t * num_blocks, tid);
  }
}

}  // namespace index_topk
