// From a row's sums to the output: written by one block, as parts for combine.cuh, or shared by the blocks of a cluster.
// After tiles.cuh.
namespace sparse_attn {
__device__ __forceinline__ uint32_t pair(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}

// A thread's output: two accumulators of 128 columns. (One of 256 does not compile for blocks of 512 threads.)
typedef float Out[2][64];

// Adds weights (a thread's A fragments of four k steps) times this half of a tile's values to the output.
__device__ __forceinline__ void add_values(Out& out, uint32_t (&weights)[4][4], uint32_t tile, bool first) {
  const uint64_t values = tile_descriptor(tile, COLUMN_BYTES, 1024);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int part = 0; part < 2; ++part)
      wgmma_bf16_rs_t(out[part], weights[k], values + (k * 2048 + part * 2 * COLUMN_BYTES >> 4), k > 0 || !first);
  }
  wgmma_commit();
  wgmma_wait<0>();
  keep(out[0]), keep(out[1]);
}

__device__ __forceinline__ void scale_rows(Out& out, float2 by) {
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i >> 6][i & 63] *= i & 2 ? by.y : by.x;
}

// Angles that the last 64 columns of a row are rotated back by, or null.
struct Angles {
  const float *cos, *sin;
  long long cos_row, sin_row;
};

// Cosine and sine of angle `at` of a row, where there are angles.
__device__ __forceinline__ float2 angle(const Angles& angles, int row, int at) {
  if (angles.cos == nullptr) return make_float2(0, 0);
  return make_float2(__ldg(angles.cos + row * angles.cos_row + at), __ldg(angles.sin + row * angles.sin_row + at));
}
// Two neighbouring columns of the output, rounded, and rotated back where there are angles.
__device__ __forceinline__ uint32_t rotated(float a, float b, const Angles& angles, float2 by) {
  const uint32_t two = pair(a, b);
  if (angles.cos == nullptr) return two;
  const float c = by.x, s = -by.y;
  a = __uint_as_float(two << 16), b = __uint_as_float(two & 0xFFFF0000u);
  return pair(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)), __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
}
__device__ __forceinline__ uint32_t rotated(float a, float b, const Angles& angles, int row, int at) {
  return rotated(a, b, angles, angle(angles, row, at));
}

struct Result {
  uint8_t* out;
  long long out_row, out_head;
  Angles angles;
  float* partial;
  // Behind the parts: the maximum and the sum of part `part` of all.
  __device__ __forceinline__ float* sums(const Work& work, size_t part) const {
    return partial + static_cast<size_t>(work.rows) * work.splits * work.heads * WIDTH + 2 * part;
  }
};

// This thread's part of the output: rows `row` and `row + 8` of the head tile, columns of one half.
__device__ __forceinline__ void write_out(Out& out, float2 factor, const Work& work, const Result& result,
                                          int item, int half) {
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2), quad = lane & 3;
  const int head = work.head(item);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = head + row + 8 * r;
    const float by = r ? factor.y : factor.x;
    if (work.splits > 1) {
      if (at >= work.heads) continue;
      const size_t part = static_cast<size_t>(work.row(item) * work.splits + item % work.splits) * work.heads + at;
      float* to = result.partial + part * WIDTH + half * HALF + 2 * quad;
#pragma unroll
      for (int j = 0; j < 32; ++j)
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(out[j >> 4][4 * (j & 15) + 2 * r], out[j >> 4][4 * (j & 15) + 2 * r + 1]);
      continue;
    }
    uint8_t* to = result.out + 2 * (work.row(item) * result.out_row + at * result.out_head) + half * 512;
    to += (quad & 1) * 16 + (quad >> 1) * 8;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      // Four threads hold 16 bytes of two column groups in pieces of 4: each gathers half of one.
      uint32_t a[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * ((j & 15) + i) + 2 * r;
        const float low = out[j >> 4][at] * by, high = out[j >> 4][at + 1] * by;
        // Columns 448 and up: eight groups of four angles.
        a[i] = half == 1 && j >= 24 ? rotated(low, high, result.angles, work.row(item), 4 * (j + i - 24) + quad)
                                    : pair(low, high);
      }
      const uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? a[0] : a[1], 1);
      (lane & 1 ? a[0] : a[1]) = other;
      if (at < work.heads) *reinterpret_cast<uint2*>(to + 16 * j) = make_uint2(a[0], a[1]);
    }
  }
}

// ---- a row that the blocks of a cluster share ---------------------------------------------------------------
// Each has the sums over its keys. Of the 32 pairs of column groups (8 columns each), block `owner` of the cluster adds
// up those whose number is `owner` modulo CLUSTER: the others store theirs into its shared memory, where the tiles were.
constexpr int PIECE = 128 * 16;  // of a column group: 16 bytes of each thread of a consumer

template <int CLUSTER>
__device__ __forceinline__ void hand_out(Out& out, Shared& shared, int rank, int half) {
  static_assert((32 + CLUSTER - 1) / CLUSTER * CLUSTER * 2 * PIECE <= 3 * TILE_BYTES, "q and both tiles");
  uint8_t* const own = shared.q + 2 * rank * PIECE + (threadIdx.x & 127) * 16;
  uint32_t places[CLUSTER];
#pragma unroll
  for (int owner = 0; owner < CLUSTER; ++owner) places[owner] = cluster_address(own, owner);
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int number = half * 16 + j / 2, at = 4 * (j & 15);
    const float(&v)[64] = out[j >> 4];
    const float4 four = make_float4(v[at], v[at + 1], v[at + 2], v[at + 3]);
    const int to = (number / CLUSTER * 2 * CLUSTER + (j & 1)) * PIECE;
    if (number % CLUSTER == rank)
      *reinterpret_cast<float4*>(own + to) = four;
    else
      cluster_store(places[number % CLUSTER] + to, four);
  }
}

// Maximum (log2) and sum of a thread's two rows, which its three neighbours have too, to all blocks.
template <int CLUSTER>
__device__ __forceinline__ void hand_sums(Shared& shared, int rank, float4 sums) {
  for (int to = threadIdx.x & 3; to < CLUSTER; to += 4)
    cluster_store(cluster_address(&shared.weights[0][rank * 32 + (threadIdx.x & 127) / 4], to), sums);
}

// Adds up and writes this block's columns; each consumer every second pair of column groups.
template <int CLUSTER>
__device__ __forceinline__ void finish(const Work& work, Shared& shared, const Result& result, float2 sinks,
                                       const float2 (&turn)[2], float* lse, int item, int half) {
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, quad = lane & 3, rank = item % CLUSTER;
  const int head = work.head(item) + (thread >> 5) * 16 + (lane >> 2), row = work.row(item);
  float4 sums[CLUSTER];  // then (weight, sum) of both rows
  float factor[2];
#pragma unroll
  for (int s = 0; s < CLUSTER; ++s) sums[s] = *reinterpret_cast<const float4*>(&shared.weights[0][s * 32 + thread / 4]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = -INFINITY, sum = 0;
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) top = fmaxf(top, r ? sums[s].z : sums[s].x);
    const float base = top == -INFINITY ? 0.f : top;
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) {
      float& weight = r ? sums[s].z : sums[s].x;
      weight = exp2f(weight - base);
      sum += weight * (r ? sums[s].w : sums[s].y);
    }
    const int at = head + 8 * r;
    const float total = sum + exp2f((r ? sinks.y : sinks.x) * 1.44269504088896340736f - base);
    factor[r] = total == 0 ? 0.f : 1 / total;
    if (lse != nullptr && rank == 0 && half == 0 && quad == 0 && at < work.heads)
      lse[static_cast<size_t>(row) * work.heads + at] = logf(sum) + base * 0.69314718055994530942f;
  }
#pragma unroll 2
  for (int local = half; local * CLUSTER + rank < 32; local += 2) {
    const int number = local * CLUSTER + rank;
    float4 v[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint8_t* from = shared.q + ((local * CLUSTER + s) * 2 + i) * PIECE + thread * 16;
        const float4 x = *reinterpret_cast<const float4*>(from);
        v[i].x += sums[s].x * x.x, v[i].y += sums[s].x * x.y, v[i].z += sums[s].z * x.z, v[i].w += sums[s].z * x.w;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = head + 8 * r;
      uint32_t a[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = (r ? v[i].z : v[i].x) * factor[r], high = (r ? v[i].w : v[i].y) * factor[r];
        a[i] = number >= 28 ? rotated(low, high, result.angles, turn[i]) : pair(low, high);
      }
      const uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? a[0] : a[1], 1);
      (lane & 1 ? a[0] : a[1]) = other;
      uint8_t* to = result.out + 2 * (row * result.out_row + at * result.out_head) + 32 * number;
      to += (quad & 1) * 16 + (quad >> 1) * 8;
      if (at < work.heads) *reinterpret_cast<uint2*>(to) = make_uint2(a[0], a[1]);
    }
  }
}

// From sums over the keys of each block to the output; `sums` from the consumer that has them.
template <int CLUSTER>
__device__ __forceinline__ void share(Out& out, const float4* sums, const Work& work, Shared& shared,
                                      const Result& result, const float* sink, float* lse, int item, int half) {
  const int head = work.head(item) + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7);
  float2 sinks = make_float2(-INFINITY, -INFINITY);  // read ahead
  if (sink != nullptr && head < work.heads) sinks.x = sink[head];
  if (sink != nullptr && head + 8 < work.heads) sinks.y = sink[head + 8];
  cluster_barrier();  // no block needs its tiles any more
  if (sums != nullptr) hand_sums<CLUSTER>(shared, item % CLUSTER, *sums);
  hand_out<CLUSTER>(out, shared, item % CLUSTER, half);
  // Read ahead too: the angles of the one pair of column groups, of 28 to 31, that this consumer finishes, if any.
  int turned = 28 + (item + CLUSTER - 28 % CLUSTER) % CLUSTER;
  if ((turned / CLUSTER & 1) != half) turned += CLUSTER;
  float2 turn[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    turn[i] = angle(result.angles, work.row(item), 4 * (2 * min(turned, 31) + i - 56) + static_cast<int>(threadIdx.x & 3));
  cluster_barrier();  // everything has arrived
  finish<CLUSTER>(work, shared, result, sinks, turn, lse, item, half);
}
}  // namespace sparse_attn
