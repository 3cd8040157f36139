// Hopper's own instructions behind small functions. Kernel sources use these and plain CUDA C++ only, so that
// tests/tools/cuda_emu can run the same sources on a CPU: with DSV41_EMULATE it supplies this file's functions.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#ifdef DSV41_EMULATE
#include "emu_hopper.h"
#else
namespace hopper {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers in shared memory ---------------------------------------------------------------------------
__device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals));
}
// Makes barrier_init visible to the copy engine; then __syncthreads().
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
// One arrival that also announces `bytes` of bulk copies.
__device__ __forceinline__ void barrier_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(bytes)
               : "memory");
}
// Waits until the phase with this parity has completed.
__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n bra again;\nready:\n}\n" ::"r"(smem_address(bar)),
      "r"(parity)
      : "memory");
}
// The barrier counts one arrival of this thread once its earlier copy_16 have landed.
__device__ __forceinline__ void barrier_arrive_copies(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(bar)) : "memory");
}
// Barrier `id` (1..15) among `threads` threads of the block.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies ----------------------------------------------------------------------------------------------
// The copy engine: `bytes` (a multiple of 16) from global to shared memory, counted by `bar`.
__device__ __forceinline__ void bulk_copy(void* dst, const void* src, uint32_t bytes, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          smem_address(dst)),
      "l"(src), "r"(bytes), "r"(smem_address(bar))
      : "memory");
}
// The copy engine: 128 bytes of each row of a box (its height is in the map) from byte `column` of row `row` on, to
// a tile as swizzle_128 lays it out; rows beyond the tensor's end become zeros. `map`: a two-dimensional
// CUtensorMap of bytes, a __grid_constant__ parameter.
template <class Map>
__device__ __forceinline__ void tile_copy(void* dst, const Map& map, int column, int row, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          smem_address(dst)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(smem_address(bar)), "r"(column), "r"(row)
      : "memory");
}
// 16 bytes, asynchronously; `valid` false writes zeros and reads nothing.
__device__ __forceinline__ void copy_16(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(dst)), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}
// 16 bytes, asynchronously; the L2 fetches the 256 bytes around them, which are wanted soon.
__device__ __forceinline__ void copy_16_ahead(void* dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(smem_address(dst)), "l"(src) : "memory");
}
// 4 bytes, asynchronously.
__device__ __forceinline__ void copy_4(void* dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(dst)), "l"(src) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Ordinary stores of this thread to shared memory become visible to the tensor cores and the copy engine.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers between warp groups -----------------------------------------------------------------------
template <int COUNT>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- tensor cores ----------------------------------------------------------------------------------------
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of an accumulator across a wait.
template <int N>
__device__ __forceinline__ void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// True in one lane of a converged warp. Of code behind it the compiler knows that one thread runs it: copies by the
// copy engine are otherwise loops over the lanes that may be there.
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(chosen));
  return chosen;
}
// Transposes a warp's 8 x 8 matrix of 16-bit values: lane holds row lane / 4, columns 2 * (lane % 4) + {0, 1}.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t v) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

// Byte i of the result is byte (selector >> 4 * i & 7) of `high`:`low`; where bit 3 of that selector nibble is set,
// eight copies of the byte's top bit.
__device__ __forceinline__ uint32_t byte_select(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

// D[16, 8] += A[16, 16] B[8, 16]^T of a warp in bf16: d[i] is row lane / 4 + 8 * (i / 2), column 2 * (lane % 4) + i % 2;
// a[i] two elements of row lane / 4 + 8 * (i % 2) from k = 2 * (lane % 4) + 8 * (i / 2) on; b0 and b1 of B's row
// lane / 4, likewise.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Whether a counter in global memory is at `count`. What other blocks made visible before they counted (__threadfence,
// then an atomic) is seen afterwards.
__device__ __forceinline__ bool count_reached(const int* p, int count) {
  int seen;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(p) : "memory");
  return seen >= count;
}
__device__ __forceinline__ void wait_for_count(const int* p, int count) {
  while (!count_reached(p, count)) __nanosleep(50);
}

// 2^x and 1 / x as the special function unit gives them, results below 2^-126 as 0: no code for the rest.
__device__ __forceinline__ float exp2_quick(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ __forceinline__ float reciprocal_quick(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
// The smaller and the larger of two, NaN where one is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float out;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// A named barrier that tells all of its threads whether one of them has said so.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return any != 0;
}

// Instructions go above this line, with a twin in tests/tools/cuda_emu/emu_hopper.h; plain C++ goes below.
}  // namespace hopper
#endif  // DSV41_EMULATE

namespace hopper {
// A value that the compiler knows nothing about: what is computed from it stays where it is used. Without this,
// addresses of every branch of a loop are computed before the loop and hold registers through it.
__device__ __forceinline__ int opaque(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
// Descriptor of an operand tile whose rows are 128 bytes, swizzled by 128 bytes in groups of eight rows (1,024
// bytes, aligned to 1,024). K-major: `leading` is unused; `stride` is the distance of the row groups (1,024).
// MN-major: `leading` is the distance of the 64-element column tiles, `stride` that of the groups of eight k.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t leading = 16,
                                                    uint32_t stride = 1024) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>((leading & 0x3FFFF) >> 4) << 16 |
         static_cast<uint64_t>((stride & 0x3FFFF) >> 4) << 32 | 1ull << 62;
}
// Where 16-byte piece `piece` (0..7) of row `row` of such a tile lies.
__device__ __forceinline__ int swizzle_128(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// wgmma_<type>_<rs|ss>(accumulators, a, b, accumulate) follow, written out by wgmma_source() for the widths a
// kernel uses: D[64, N] (+)= A[64, K] B[N, K]^T, K 32 bytes; accumulator i of a thread is row
// 16 * warp + lane / 4 + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 * (lane % 4) + i % 2.
}  // namespace hopper
