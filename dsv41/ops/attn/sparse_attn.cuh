// Sparse attention over cache records: one block attends one query row (up to 64 heads) at a time.
//
// Four warp groups. Two producers fetch the records of a tile of 64 keys, decode them to bf16 (exact) and lay them
// out for the tensor cores. The first consumer makes the scores, the softmax and columns 0..255 of the output; the
// second takes the weights and makes columns 256..511, and its first warp, the scout, finds the tiles and their
// records for everybody. A decoded tile is key and value, handed over and given back in halves of 256 columns.
// Tiles without a key are skipped, but for the last of a row, which ends it.
namespace sparse_attn {
// The queries of all heads: address and strides in elements.
struct Queries {
  const uint8_t* at;
  long long row, head;
};

// Copies those of an item, if there is one, to shared memory in the tensor cores' layout; 128 threads.
__device__ __forceinline__ void copy_q(const Work& work, Shared& shared, const Queries& q, int item) {
  if (item >= work.items()) return;
  // A thread has a piece of every second head.
  const int piece = threadIdx.x & 63, odd = threadIdx.x >> 6 & 1, first = work.head(item) + odd;
  const uint8_t* from = q.at + 2 * (work.row(item) * q.row + first * q.head) + piece * 16;
  uint8_t* to = shared.q + (piece >> 3) * COLUMN_BYTES + odd * 128;
  const int place = ((piece & 7) ^ odd) << 4;  // in the row of the first; heads 2, 4 and 6 further differ in two bits
#pragma unroll 8
  for (int i = 0; i < HEADS / 2; ++i) {
    copy_16(to + i * 256 + (place ^ (i & 3) << 5), from, first + 2 * i < work.heads);
    from += 4 * q.head;
  }
  copy_commit();
}

// Scores, softmax, columns 0..255. Weights are rounded to bf16 relative to the running maximum (`top`, its log2),
// so that a key that outweighs the others is not rounded at all.
template <int CLUSTER>
__device__ __forceinline__ void consume_scores(const Work& work, Shared& shared, const Queries& q_from,
                                               const Result& result, const float* sink, float* lse, float scale) {
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, row = (thread >> 5) * 16 + (lane >> 2);
  const uint64_t q = tile_descriptor(smem_address(shared.q));
  const float scale_2 = scale * 1.44269504088896340736f;
  Out out;
  int buffer = 0, turn = 0, sent_turn = 0, number = 0, tiles = 0;
  copy_q(work, shared, q_from, blockIdx.x);
  for (int item = blockIdx.x; item < work.items(); item += gridDim.x) {
    ++number;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    bool first = true, last;
    copy_wait<0>();
    fence_async();
    named_barrier(1, 128);
    do {
      const uint64_t tile = tile_descriptor(smem_address(shared.kv[buffer]));
      float s[32];
      barrier_wait(&shared.full[buffer][0], turn);
      const unsigned long long keys = shared.tiles[tiles % TILES].keys;
      last = shared.tiles[tiles++ % TILES].last;
      wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half) barrier_wait(&shared.full[buffer][1], turn);
#pragma unroll
        for (int k = half * 16; k < half * 16 + 16; ++k) {
          const uint32_t at = ((k >> 2) * COLUMN_BYTES + (k & 3) * 32) >> 4;  // descriptors count in 16 bytes
          wgmma_bf16_ss(s, q + at, tile + at, k > 0);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      keep(s);
      if (last) {
        named_barrier(1, 128);  // all four warps are done with Q
        copy_q(work, shared, q_from, item + gridDim.x);
      }
      // Softmax: element i is key 8 * (i / 4) + 2 * (lane % 4) + i % 2 of row (i & 2 ? row + 8 : row).
      float new_top[2] = {-INFINITY, -INFINITY};
      if (keys != ~0ull) {
        const unsigned long long mine = keys >> 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (!(mine >> (8 * (i >> 2) + (i & 1)) & 1)) s[i] = -INFINITY;
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) new_top[i >> 1 & 1] = fmaxf(new_top[i >> 1 & 1], s[i]);
      float2 rescale;
      float base[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        new_top[r] = fmaxf(new_top[r], __shfl_xor_sync(~0u, new_top[r], 1));
        new_top[r] = fmaxf(new_top[r], __shfl_xor_sync(~0u, new_top[r], 2));
        new_top[r] *= scale_2;
        // A maximum that grows by less stays: weights up to 65536 instead of 1 are no less exact.
        if (!(new_top[r] > top[r] + 16)) new_top[r] = top[r];
        base[r] = new_top[r] == -INFINITY ? 0.f : new_top[r];
      }
      rescale.x = exp2f(top[0] - base[0]), rescale.y = exp2f(top[1] - base[1]);
      top[0] = new_top[0], top[1] = new_top[1];
      float added[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        s[i] = exp2f(fmaf(s[i], scale_2, -base[i >> 1 & 1]));
        added[i >> 1 & 1] += s[i];
      }
      sum[0] = sum[0] * rescale.x + added[0], sum[1] = sum[1] * rescale.y + added[1];
      uint32_t weights[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[k][i] = pair(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
      barrier_wait(&shared.taken, sent_turn ^ 1);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        shared.weights[k][thread] = make_uint4(weights[k][0], weights[k][1], weights[k][2], weights[k][3]);
      shared.factors[thread] = rescale;
      warp_arrive(&shared.sent);
      sent_turn ^= 1;
      if (!first && __any_sync(~0u, rescale.x != 1 || rescale.y != 1)) scale_rows(out, rescale);
      add_values(out, weights, smem_address(shared.kv[buffer]), first);
      warp_arrive(&shared.empty[buffer][0]);
      buffer ^= 1, turn ^= buffer == 0;
      first = false;
    } while (!last);

    const bool spoiled = shared.spoiled[number & 3] == number;
    const int head = work.head(item) + row;
    float2 factor = make_float2(1.f, 1.f);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      if (spoiled) sum[r] = NAN;
      if (CLUSTER > 1) continue;
      const int at = head + 8 * r;
      const bool mine = at < work.heads && (lane & 3) == 0;
      if (work.splits > 1) {
        if (mine) {
          const size_t part = static_cast<size_t>(work.row(item) * work.splits + item % work.splits) * work.heads + at;
          float* sums = result.sums(work, part);
          sums[0] = top[r], sums[1] = sum[r];
        }
        continue;
      }
      const float base = top[r] == -INFINITY ? 0.f : top[r];
      float total = sum[r];
      if (sink != nullptr && at < work.heads) total += exp2f(sink[at] * 1.44269504088896340736f - base);
      (r ? factor.y : factor.x) = total == 0 ? 0.f : 1 / total;
      if (mine && lse != nullptr)
        lse[static_cast<size_t>(work.row(item)) * work.heads + at] = logf(sum[r]) + base * 0.69314718055994530942f;
    }
    if constexpr (CLUSTER > 1) {
      const float4 sums = make_float4(top[0], sum[0], top[1], sum[1]);
      share<CLUSTER>(out, &sums, work, shared, result, sink, lse, item, 0);
    } else {
      barrier_wait(&shared.taken, sent_turn ^ 1);
      shared.factors[thread] = factor;
      warp_arrive(&shared.sent);
      sent_turn ^= 1;
      write_out(out, factor, work, result, item, 0);
    }
  }
}

// Columns 256..511, and the scout.
template <int WINDOW, int COMPRESSED, int CLUSTER>
__device__ __forceinline__ void consume_values(const Work& work, const Records& near, const Records& far, Shared& shared,
                                               const Result& result, const float* sink, float* lse) {
  const int thread = threadIdx.x & 127;
  Out out;
  int buffer = 0, turn = 0, sent_turn = 0, tiles = 0;
  Scout scout{work, near, far, shared, thread};
  if (thread < 32) {
    scout.number = 0;
    scout.start(blockIdx.x);
#pragma unroll 1
    for (int i = 0; i < AHEAD; ++i) scout.post<WINDOW, COMPRESSED>();
  }
  for (int item = blockIdx.x; item < work.items(); item += gridDim.x) {
    bool first = true, last;
    do {
      const uint32_t tile = smem_address(shared.kv[buffer]) + HALF_BYTES;
      barrier_wait(&shared.full[buffer][1], turn);
      last = shared.tiles[tiles++ % TILES].last;
      barrier_wait(&shared.sent, sent_turn);
      uint32_t weights[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 v = shared.weights[k][thread];
        weights[k][0] = v.x, weights[k][1] = v.y, weights[k][2] = v.z, weights[k][3] = v.w;
      }
      const float2 rescale = shared.factors[thread];
      warp_arrive(&shared.taken);
      sent_turn ^= 1;
      if (!first && __any_sync(~0u, rescale.x != 1 || rescale.y != 1)) scale_rows(out, rescale);
      add_values(out, weights, tile, first);
      warp_arrive(&shared.empty[buffer][1]);
      if (thread < 32) scout.post<WINDOW, COMPRESSED>();
      buffer ^= 1, turn ^= buffer == 0;
      first = false;
    } while (!last);
    if constexpr (CLUSTER > 1) {
      share<CLUSTER>(out, nullptr, work, shared, result, sink, lse, item, 1);
    } else {
      barrier_wait(&shared.sent, sent_turn);
      const float2 factor = shared.factors[thread];
      warp_arrive(&shared.taken);
      sent_turn ^= 1;
      write_out(out, factor, work, result, item, 1);
    }
  }
}

// Strides in elements of their tensors, page strides in bytes. `sink`, `lse` and the angles may be null. With splits > 1 the
// results are parts: [rows, splits, heads, 512] f32 sums, then (log2 of the maximum, sum) pairs. With CLUSTER > 1, which
// is the number of splits and of blocks in a cluster, there is a block for each item and `scratch` is not used.
template <int WINDOW, int COMPRESSED, int CLUSTER = 1>
__device__ __forceinline__ void attend(Address q, long long q_row, long long q_head, int rows, int heads,
                                       Address window, long long window_stride, int window_page, int window_slots,
                                       Address window_ids, long long window_ids_stride, int window_count,
                                       Address compressed, long long compressed_stride, int compressed_page,
                                       int compressed_slots, Address compressed_ids,
                                       long long compressed_ids_stride, int compressed_count, Address sink,
                                       Address cos, long long cos_row, Address sin, long long sin_row, float scale,
                                       int splits, Address out, long long out_row, long long out_head,
                                       Address lse, Address scratch, void* shared_memory) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  if (threadIdx.x == 0) {
    for (int b = 0; b < 2; ++b) {
      for (int half = 0; half < 2; ++half) init_warps(&shared.full[b][half], PRODUCERS), init_warps(&shared.empty[b][half], 4);
    }
    for (int i = 0; i < TILES; ++i) init_warps(&shared.posted[i], 1);
    init_warps(&shared.sent, 4), init_warps(&shared.taken, 4);
    for (int i = 0; i < 4; ++i) shared.spoiled[i] = 0;
    fence_barrier_init();
  }
  __syncthreads();
  const Records near = {window.as<const uint8_t>(), window_stride, static_cast<uint32_t>(window_page),
                        static_cast<uint32_t>(window_slots), window_ids.as<const int>(), window_ids_stride,
                        window_count};
  const Records far = {compressed.as<const uint8_t>(), compressed_stride,
                       static_cast<uint32_t>(compressed_page), static_cast<uint32_t>(compressed_slots),
                       compressed_ids.as<const int>(), compressed_ids_stride, compressed_count};
  Work work;
  work.rows = rows, work.heads = heads, work.head_tiles = (heads + HEADS - 1) / HEADS, work.splits = splits;
  work.window_tiles = (window_count + KEYS - 1) / KEYS;
  work.tiles = work.window_tiles + (compressed_count + KEYS - 1) / KEYS;
  if (work.tiles == 0) work.tiles = 1;
  Result result;
  result.out = out.as<uint8_t>(), result.out_row = out_row, result.out_head = out_head;
  result.angles = {cos.as<const float>(), sin.as<const float>(), cos_row, sin_row};
  result.partial = scratch.as<float>();
  const int group = threadIdx.x >> 7;
  // The counts add up to what 512 threads are launched with, 4 x 128; more would wait for ever.
  if (group == 0) {
    registers_grow<208>();
    const Queries queries = {q.as<const uint8_t>(), q_row, q_head};
    consume_scores<CLUSTER>(work, shared, queries, result, sink.as<const float>(), lse.as<float>(), scale);
  } else if (group == 1) {
    registers_grow<176>();
    consume_values<WINDOW, COMPRESSED, CLUSTER>(work, near, far, shared, result, sink.as<const float>(), lse.as<float>());
  } else {
    registers_shrink<64>();
    Producer<WINDOW, COMPRESSED> producer{work, near, far, shared};
    producer.run();
  }
}
}  // namespace sparse_attn
