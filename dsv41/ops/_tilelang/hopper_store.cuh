// The copy engine from shared to global memory: follows hopper.cuh, with twins in tests/tools/cuda_emu/emu_hopper.h.
#pragma once
#ifndef DSV41_EMULATE
namespace hopper {

// The reverse of tile_copy, without what lies beyond the tensor's end. Part of the thread's next group of stores.
template <class Map>
__device__ __forceinline__ void tile_store(const Map& map, const void* src, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(smem_address(src)), "r"(column), "r"(row)
               : "memory");
}
__device__ __forceinline__ void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the thread's stores, but for PENDING groups, have read shared memory.
template <int PENDING>
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

}  // namespace hopper
#endif  // DSV41_EMULATE
