// What the emulated CUDA language (emu.h, emu_hopper.h) asks of the runtime.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

[[noreturn]] void fail(const char* format, ...);

// Warp collectives: every lane of `mask` deposits a value and gets the table of all of them.
struct Meeting {
  uint64_t value[32];
  uint32_t mask;
};
const Meeting& meet(uint32_t mask, const char* what, uint64_t value);
int lane();

void sync_block(const char* what, int id, int count, bool blocking);
int sync_count(int predicate, int* all);
bool sync_any(const char* what, int id, int count, bool mine);
void yield_now();
void wait_for_count(const int* p, int count);

// Explicit checks of accesses that the compiler's instrumentation does not see.
void touch(const void* p, size_t bytes, bool write);
void atomic_access(const void* p, size_t bytes);

uint32_t shared_address(const void* p);
void cluster_barrier();
uint32_t cluster_address(const void* p, uint32_t rank);
void cluster_store(uint32_t to, const void* data);  // 16 bytes
void fence_async();
void barrier_init(uint64_t* bar, uint32_t arrivals);
void fence_barrier_init();
void barrier_arrive(uint64_t* bar, uint32_t count, uint32_t bytes);
void barrier_wait(uint64_t* bar, uint32_t parity);
bool barrier_test(uint64_t* bar, uint32_t parity);
void barrier_arrive_copies(uint64_t* bar);
void bulk_copy(void* dst, const void* src, uint32_t bytes, uint64_t* bar);
void bulk_store(void* dst, const void* src, uint32_t bytes);
void bulk_store_commit();
void bulk_store_wait(int pending, bool read_only);
void copy_async(void* dst, const void* src, int bytes, bool valid);
void copy_commit();
void copy_wait(int pending);

void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);
// D[64, 2 * count] (+)= A B^T of one warp group. a_regs is null when A lies in shared memory.
enum Type { kBf16, kF16, kE4M3, kE5M2 };  // of an operand
void wgmma(float* d, int count, const uint32_t* a_regs, uint64_t a, uint64_t b, int accumulate, Type a_type,
           Type b_type, bool a_transposed, bool b_transposed);

void tensor_allocate(uint32_t* to, int columns);
void tensor_free(uint32_t address, int columns);
void tensor_store(uint32_t address, const uint32_t* v, int count);
void tensor_wait_stores();
void tensor_load(float* d, uint32_t address, int count);
void tensor_fence_before();
void tensor_fence_after();
void multiply_mxfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scale, uint32_t b_scale,
                    int accumulate);
void multiplied(uint64_t* bar);

}  // namespace emu
