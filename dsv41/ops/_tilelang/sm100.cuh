// SM100's own instructions behind small functions, as hopper.cuh for Hopper's, which comes first: tensor memory and the
// tensor cores that add up there. With DSV41_EMULATE tests/tools/cuda_emu supplies them.
//
// Tensor memory: 128 lanes of 512 columns of 32 bits, an address is lane << 16 | column. A warp reads and writes the 32
// lanes from 32 * (warp % 4) on. What one thread did there is seen by another behind a barrier that both fence.
#pragma once
#include <cstdint>

#ifdef DSV41_EMULATE
#include "emu_sm100.h"
#else
namespace sm100 {

// A whole warp: takes `columns` (32, 64 .. 512) of all lanes for the block; the address goes to shared memory.
__device__ __forceinline__ void tensor_allocate(uint32_t* to, int columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(hopper::smem_address(to)),
               "r"(columns)
               : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");  // to other blocks
}
// The same warp, before the block ends.
__device__ __forceinline__ void tensor_free(uint32_t address, int columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns));
}
// A whole warp: one or four columns of its lanes, a lane a thread; there after tensor_wait_stores.
__device__ __forceinline__ void tensor_store(uint32_t address, uint32_t v) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void tensor_store(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}
__device__ __forceinline__ void tensor_wait_stores() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
// A whole warp: 32 columns of its lanes, a lane a thread; complete when it returns.
__device__ __forceinline__ void tensor_load(float (&d)[32], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];\n"
      "tcgen05.wait::ld.sync.aligned;"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]),
        "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), "=f"(d[16]), "=f"(d[17]),
        "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), "=f"(d[24]), "=f"(d[25]), "=f"(d[26]),
        "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
      : "r"(address)
      : "memory");
}
// On both sides of a barrier between threads: what was done in tensor memory before it is seen behind it.
__device__ __forceinline__ void fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// One thread: D[128, N] (+)= A[128, 64] B[N, 64]^T of E2M1, two values a byte, a UE8M0 scale a row and 32 values. `d`,
// `a_scale` and `b_scale` are addresses of tensor memory: D has a column a column, the scales of row r are in lane r % 32
// of column r / 32, four bytes for 128 values, the same in the lanes of all four warps. Asynchronous: see multiplied.
__device__ __forceinline__ void multiply_mxfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scale,
                                               uint32_t b_scale, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X [%0], %1, %2, %3, [%4], [%5], p;\n}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(a_scale), "r"(b_scale), "r"(static_cast<int>(accumulate))
      : "memory");
}
// The thread of earlier products: `bar` counts one arrival once they are in tensor memory.
__device__ __forceinline__ void multiplied(uint64_t* bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   hopper::smem_address(bar))
               : "memory");
}

// Instructions go above this line, with a twin in tests/tools/cuda_emu/emu_sm100.h; plain C++ goes below.
}  // namespace sm100
#endif  // DSV41_EMULATE

namespace sm100 {
// Descriptor of an operand tile of cores: eight rows of 16 bytes that lie together. `along` is the distance of neighbours
// along k, `down` that of groups of eight rows.
__device__ __forceinline__ uint64_t core_descriptor(uint32_t address, uint32_t along, uint32_t down) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(along >> 4) << 16 |
         static_cast<uint64_t>(down >> 4) << 32 | 1ull << 46;
}
// The instruction for D[128, columns] with scales 2 * half and 2 * half + 1 of the four that a row has.
__device__ __forceinline__ constexpr uint32_t mxfp4_instruction(int columns, int half) {
  constexpr uint32_t kE2M1 = 1, kUE8M0 = 1;
  const uint32_t scale = 2 * half, n = columns;
  return scale << 4 | kE2M1 << 7 | kE2M1 << 10 | n >> 3 << 17 | kUE8M0 << 23 | 128u >> 4 << 24 | scale << 29;
}
}  // namespace sm100
