// Launches that begin before the one in front of them has ended: follows hopper.cuh, with twins in
// tests/tools/cuda_emu/emu_hopper.h.
#pragma once
#ifndef DSV41_EMULATE
namespace hopper {

// Waits until the launch in front of this one has ended, whose results can then be read and its memory be written.
__device__ __forceinline__ void wait_for_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The launch behind this one may begin once all blocks have come here.
__device__ __forceinline__ void let_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace hopper
#endif  // DSV41_EMULATE
