// Scores of paged index keys on the tensor cores of SM100: keys and queries as they are stored, four bits a value and a
// scale a group, which the tensor cores apply. 128 keys are the rows of a product, the 32 heads of a query its columns;
// its sums lie in tensor memory, a key a lane, so that a thread adds up the heads of its key.
#pragma once
#include <cstdint>

namespace index_topk {

template <>
struct alignas(128) Extra<kScaled> {  // the operands behind it are aligned, too
  uint64_t multiplied[2][4];  // the product of a stage of a group is done
  uint32_t columns;           // where the block's tensor memory begins
};

// Columns of tensor memory: the groups' products, the scales of their keys, those of the query.
constexpr int kColumns = 128, kKeyScales = 64, kQueryScales = 72;

template <int NQ, bool PUBLISH, bool SELECT>
struct Run<kScaled, NQ, PUBLISH, SELECT> : Choice<kScaled, NQ, PUBLISH, SELECT> {
  using Base = Choice<kScaled, NQ, PUBLISH, SELECT>;
  using S = typename Base::S;
  using Base::s, Base::group, Base::warp, Base::lane;
  static_assert(NQ == 1 && S::kRound == 1 && S::kTile == 128 && S::kRing <= 4 && S::kGroups == 2);
  static constexpr int kHalf = 2 * 128;  // bytes from one half of a row's values to the other: two cores
  uint32_t columns, lanes;               // of the warp

  __device__ Run(const Args& args, S& s, int unit, int first, int end, int group, uint32_t tid)
      : Base(args, s, unit, first, end, group, tid), columns(s.columns), lanes(32 * warp << 16) {}

  // One thread, before the block's threads meet.
  static __device__ __forceinline__ void init(S& s) {
    for (int i = 0; i < S::kGroups; ++i)
      for (int j = 0; j < S::kRing; ++j) hopper::barrier_init(&s.multiplied[i][j], 1);
  }
  static __device__ __forceinline__ void open(S& s, int tid) {
    if (tid < 32) sm100::tensor_allocate(&s.columns, kColumns);
  }
  static __device__ __forceinline__ void close(S& s, int tid) {
    choose::sync();  // the address is there even if the block had no tile
    if (tid < 32) sm100::tensor_free(s.columns, kColumns);
  }

  // A query's heads as operand B, their scales and weights. Eight threads a head, eight bytes each.
  static __device__ __forceinline__ void load(const Args& args, S& s, int unit, int tid) {
    const int head = tid / 8, part = tid % 8, lane = tid % 32;
    const int64_t first = static_cast<int64_t>(unit) * args.heads;
    uint2 q = make_uint2(0, 0);
    if (head < args.heads) q = *reinterpret_cast<const uint2*>(args.q + (first + head) * 64 + part * 8);
    *reinterpret_cast<uint2*>(s.b[0] + S::place(head, part / 2) + part % 2 * 8) = q;
    if (tid < 128) {  // the same in the lanes of every warp
      sm100::fence_after();  // products with the query before
      uint32_t codes = 0;
      if (lane < args.heads) codes = *reinterpret_cast<const uint32_t*>(args.q_scale + (first + lane) * 4);
      sm100::tensor_store(s.columns + kQueryScales + (tid / 32 << 21), codes);
      sm100::tensor_wait_stores();
      sm100::fence_before();
    }
    if (tid < 32) (&s.weight[0][0][0])[lane] = lane < args.heads ? args.weights[first + lane] : 0.0f;
  }

  __device__ __forceinline__ void tile(int stage, uint32_t phase) {
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = s.scales[group][stage][32 * i + lane];
    const uint32_t key_scales = columns + kKeyScales + 4 * group, product = columns + 32 * group;
    sm100::tensor_store(key_scales + lanes, codes);
    sm100::tensor_wait_stores();
    sm100::fence_before();
    hopper::fence_async();  // the keys came by ordinary copies
    hopper::named_barrier(9 + group, 128);
    if (warp == 0) {
      if (hopper::elect()) {
        sm100::fence_after();
        const uint32_t keys = hopper::smem_address(s.values[group][stage]), heads = hopper::smem_address(s.b[0]);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          sm100::multiply_mxfp4(product, sm100::core_descriptor(keys + half * kHalf, 128, 512),
                                sm100::core_descriptor(heads + half * kHalf, 128, 512),
                                sm100::mxfp4_instruction(kHeads, half), key_scales, columns + kQueryScales, half > 0);
        sm100::multiplied(&s.multiplied[group][stage]);
      }
      __syncwarp();
    }
    const int entry = this->entry_of(stage, 32 * warp + lane);
    hopper::barrier_wait(&s.multiplied[group][stage], phase);
    sm100::fence_after();
    float d[32], score = 0.0f;
    sm100::tensor_load(d, product + lanes);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 w = reinterpret_cast<const float4*>(&s.weight[0][0][0])[i];
      score = fmaf(w.x, hopper::max_or_nan(d[4 * i], 0.0f), score);
      score = fmaf(w.y, hopper::max_or_nan(d[4 * i + 1], 0.0f), score);
      score = fmaf(w.z, hopper::max_or_nan(d[4 * i + 2], 0.0f), score);
      score = fmaf(w.w, hopper::max_or_nan(d[4 * i + 3], 0.0f), score);
    }
    this->take(score, 0, entry);
  }
};

}  // namespace index_topk
