// Clusters of blocks: follows hopper.cuh, with twins in tests/tools/cuda_emu/emu_hopper.h.
#pragma once
#ifndef DSV41_EMULATE
namespace hopper {

// Among all threads of the cluster that have not ended; what they stored before is seen behind it.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The place of block `rank` of the cluster that `p` is of this block; counts on like an address.
__device__ __forceinline__ uint32_t cluster_address(const void* p, uint32_t rank) {
  uint32_t out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(smem_address(p)), "r"(rank));
  return out;
}
__device__ __forceinline__ void cluster_store(uint32_t to, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

}  // namespace hopper
#endif  // DSV41_EMULATE
