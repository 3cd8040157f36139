// The functions of sm100.cuh that are instructions of the GPU, by the runtime of the emulator.
#pragma once
#include "emu.h"

namespace sm100 {

inline void tensor_allocate(uint32_t* to, int columns) { emu::tensor_allocate(to, columns); }
inline void tensor_free(uint32_t address, int columns) { emu::tensor_free(address, columns); }
inline void tensor_store(uint32_t address, uint32_t v) { emu::tensor_store(address, &v, 1); }
inline void tensor_store(uint32_t address, const uint32_t (&v)[4]) { emu::tensor_store(address, v, 4); }
inline void tensor_wait_stores() { emu::tensor_wait_stores(); }
inline void tensor_load(float (&d)[32], uint32_t address) { emu::tensor_load(d, address, 32); }
inline void fence_before() { emu::tensor_fence_before(); }
inline void fence_after() { emu::tensor_fence_after(); }
inline void multiply_mxfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scale, uint32_t b_scale,
                           bool accumulate) {
  emu::multiply_mxfp4(d, a, b, instruction, a_scale, b_scale, accumulate);
}
inline void multiplied(uint64_t* bar) { emu::multiplied(bar); }

}  // namespace sm100
