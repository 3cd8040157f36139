// What an emulated Ascend C kernel calls; runtime.cpp has the rest.
#pragma once
#include <cstddef>
#include <cstdint>

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };
namespace emu {
struct Index {
  unsigned x = 0, y = 0, z = 0;
};
uint8_t* ub();  // the unified buffer of the core that runs
[[noreturn]] void fail(const char* format, ...);
void run_threads(Index threads, void (*body)(void*), void* data);  // one SIMT vector function
uint64_t exchange(uint64_t value, unsigned lane);                  // a lane's value, after all 32 gave theirs
unsigned lane();
unsigned warp_lanes();  // how many lanes this thread's warp has
void copy(pipe_t pipe, uint8_t* to, const uint8_t* from, int bursts, int bytes, int64_t to_stride, int64_t from_stride);
}  // namespace emu

extern emu::Index threadIdx, blockDim;
extern int block_idx;
using event_t = int;
void asc_syncthreads();
void asc_sync_notify(pipe_t from, pipe_t to, event_t event);
void asc_sync_wait(pipe_t from, pipe_t to, event_t event);
