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
uint8_t* l1();  // and of a cube core
uint8_t* l0c();
int unit();  // of a mixed kernel: 0 the cube core, 1 the vector core beside it
void begin(pipe_t pipe);  // work of a pipe until `end`
void end();
struct Pipe {
  explicit Pipe(pipe_t pipe) { begin(pipe); }
  ~Pipe() { end(); }
};
uint8_t peek(const uint8_t* p);  // a byte of L1, 255 where nobody wrote: scales of rows that a tile has no use for
void multiply(float* c, const float* a, const float* b, int m, int n, int k);  // c += a b^T
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
void asc_sync_intra_arrive(pipe_t pipe, event_t event);  // from one unit of a pair to the other
void asc_sync_intra_wait(pipe_t pipe, event_t event);
