// The state of the running block and the checks of its memory; part of runtime.cpp.
#pragma once
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emu {
Dim threadIdx_, blockIdx_, blockDim_, gridDim_;

namespace {
constexpr size_t kStack = 512 << 10;
constexpr uint32_t kWindow = 1024;  // address of the first byte of shared memory in its window

using Clocks = std::vector<uint32_t>;
void join(Clocks& into, const Clocks& from) {
  if (into.size() < from.size()) into.resize(from.size());
  uint32_t* a = into.data();
  const uint32_t* b = from.data();
  for (size_t i = 0; i < from.size(); ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
}

enum State : uint8_t { kUnwritten, kWritten, kInFlight };
constexpr uint16_t kAtomic = 0xFFFF;
struct Byte {
  State state = kUnwritten;
  bool generic = false;  // written by an ordinary store: the tensor cores need a fence
  uint16_t writer = kAtomic;
  uint32_t clock = 0;    // the writer's clock
  uint32_t time = 0;     // of the write, in events of the block
};

struct Copy {
  uint8_t* dst;
  const uint8_t* src;
  uint32_t bytes;
  int thread;
  bool valid, done = false, engine;
  uint32_t clock = 0;  // published by barrier_arrive_copies
};
using CopyPtr = std::shared_ptr<Copy>;

struct Arrival {  // something that a barrier receives later: a bulk copy, or an arrival behind copies
  CopyPtr copy;
  std::vector<CopyPtr> group;
  Clocks clocks;
  std::function<void()> work;  // products of SM100 that are done with it
};

struct Barrier {
  int64_t expected = 0, pending = 0, bytes = 0;
  uint64_t phase = 0;
  bool fenced = false;
  Clocks arriving, completed;
  std::vector<Arrival> queue;
};

struct Operand {
  uint32_t offset, bytes;
};
struct Product {
  int group;
  uint32_t time;
  std::vector<Operand> operands;
};
struct TensorProduct {  // of SM100: what it reads, and where its sums go
  uint32_t time;
  std::vector<Operand> operands;
  std::vector<uint32_t> scales, sums;
};
struct Accumulator {
  int count, group;
  std::vector<float> value;
};

struct Thread {
  jmp_buf env;
  ucontext_t context;
  char* stack = nullptr;
  bool started, finished;
  std::function<bool()> ready;  // blocked while it says no
  std::string waits_for;
  uint64_t* awaits = nullptr;  // a barrier
  Dim index;
  Clocks clocks;
  uint32_t fence_time;
  std::vector<std::vector<CopyPtr>> groups;
  std::vector<CopyPtr> open;
  std::vector<CopyPtr> stores_open;
  std::vector<std::vector<CopyPtr>> stores;
  int wgmma_group = 0;
  bool wgmma_fenced = false, wgmma_open = false;
  std::map<float*, Accumulator> accumulators;
  std::vector<Product> products;
  uint32_t tensor_after = 0;  // of the last fence
  std::vector<std::pair<uint32_t, uint32_t>> tensor_stores;
  std::vector<std::pair<uint32_t, bool>> tensor_open;  // touched since the last fence; whether written
  std::vector<TensorProduct> tensor_products;
};

struct Rendezvous {
  uint32_t arrived = 0;
  uint64_t generation = 0;
  const char* what = nullptr;
  Meeting table[2];
  Clocks clocks;
};
struct BlockBarrier {
  int arrived = 0, needed = 0, sum = 0, total = 0, seen = 0;
  uint64_t generation = 0, turn = 0;  // turn: of the last meeting
  Clocks arriving, completed;
};
struct Region {
  const uint8_t *begin, *end;
  std::string name;
};

jmp_buf scheduler, bail;
std::string error;
std::vector<Thread> threads;
int current = -1;
bool running = false;
uint32_t now;
uint32_t engine_clock;
uint8_t *shared, *arena, *shared_map;
size_t shared_size, arena_size, shared_map_size;
std::vector<Region> regions;
std::vector<Byte> bytes;
std::vector<uint32_t> readers;  // [warp][byte], clock << 5 | lane
std::map<uint64_t*, Barrier> barriers;
std::map<std::pair<int, uint32_t>, Rendezvous> meetings;
std::map<int, BlockBarrier> block_barriers;
int late, allow_uninitialised;
int by_warp;    // warps go one by one, in this order (1 or -1); 0: all threads take turns
uint64_t turn;  // of all threads or warps
bool moved;     // a copy landed in this pass
std::function<void()> entry;
pthread_t owner;
struct sigaction old_segv, old_alarm;
char signal_stack[64 << 10];

// Blocks of a cluster take turns: the state above is that of block `active`, the others' is kept here.
struct Store {  // to the shared memory of another block; lands at the barrier of the cluster
  uint32_t offset;
  uint8_t data[16];
};
struct Block {
  Dim index;
  std::vector<Thread> threads;
  uint32_t now, engine_clock;
  uint8_t *shared, *shared_map;
  std::vector<Byte> bytes;
  std::vector<uint32_t> readers;
  std::map<uint64_t*, Barrier> barriers;
  std::map<std::pair<int, uint32_t>, Rendezvous> meetings;
  std::map<int, BlockBarrier> block_barriers;
  // Of this block whether it is active or not.
  std::vector<Store> stores;
  Clocks arriving, completed;  // at the barrier of the cluster
};
std::vector<Block> blocks;
int active = 0;
size_t cluster_arrived;
uint64_t cluster_generation;

void exchange(Block& b) {
  std::swap(blockIdx_, b.index), std::swap(threads, b.threads), std::swap(now, b.now);
  std::swap(engine_clock, b.engine_clock), std::swap(shared, b.shared), std::swap(shared_map, b.shared_map);
  std::swap(bytes, b.bytes), std::swap(readers, b.readers), std::swap(barriers, b.barriers);
  std::swap(meetings, b.meetings), std::swap(block_barriers, b.block_barriers);
}
void activate(int block) {
  if (block == active) return;
  exchange(blocks[active]);
  exchange(blocks[block]);
  active = block;
}

Thread& me() { return threads[current]; }
int warp_of(int t) { return t / 32; }
int engine() { return static_cast<int>(threads.size()); }

std::string who(int t) {
  char text[160];
  if (t == engine()) return "the copy engine";
  const Dim& i = threads[t].index;
  snprintf(text, sizeof text, "thread (%u, %u, %u) = warp %d lane %d", i.x, i.y, i.z, t / 32, t % 32);
  return text;
}

[[noreturn]] void stop(const std::string& text) {
  error = text;
  char where[160];
  if (current >= 0 && current < static_cast<int>(threads.size())) {
    snprintf(where, sizeof where, " [block (%u, %u, %u), ", blockIdx_.x, blockIdx_.y, blockIdx_.z);
    error += where + who(current) + "]";
  }
  if (current >= 0) {  // where: offsets in this library, for addr2line
    // Frame pointers, not backtrace(): libgcc's unwinder may abort on the stack of a fiber.
    const auto within = [](void** frame, const void* stack, size_t size) {
      const auto at = reinterpret_cast<uintptr_t>(frame) - reinterpret_cast<uintptr_t>(stack);
      return at + 2 * sizeof(void*) <= size && at % sizeof(void*) == 0;
    };
    const ucontext_t& fiber = threads[current].context;
    auto** frame = static_cast<void**>(__builtin_frame_address(0));
    Dl_info info;
    for (int i = 0; i < 24; ++i) {  // {frame of the caller, return address}
      if (!within(frame, fiber.uc_stack.ss_sp, kStack) && !within(frame, signal_stack, sizeof signal_stack)) break;
      if (dladdr(frame[1], &info) && info.dli_fbase) {
        snprintf(where, sizeof where, "\n@%#zx", static_cast<char*>(frame[1]) - static_cast<char*>(info.dli_fbase) - 1);
        error += where;
      }
      frame = static_cast<void**>(*frame);
    }
  }
  current = -1;
  _longjmp(bail, 1);
}

void to_scheduler() {
  if (!_setjmp(me().env)) _longjmp(scheduler, 1);
}
void block(std::string what, std::function<bool()> ready) {
  if (ready()) return;
  me().waits_for = std::move(what);
  me().ready = std::move(ready);
  to_scheduler();
}

// ---- vector clocks ---------------------------------------------------------------------------------------
bool ordered(int reader, int writer, uint32_t clock) { return threads[reader].clocks[writer] >= clock; }
void release(Clocks& into) {
  join(into, me().clocks);
  ++me().clocks[current];
}

// ---- shared memory ---------------------------------------------------------------------------------------
void race(const char* kind, uint32_t offset, int other) {
  fail("shared memory byte %u: %s %s without a barrier between", offset, kind, who(other).c_str());
}
void check_writable(uint32_t offset, uint32_t count) {
  for (uint32_t i = offset; i < offset + count; ++i) {
    const Byte& b = bytes[i];
    if (b.state == kInFlight) fail("shared memory byte %u: written while a copy to it is in flight", i);
    if (b.state == kWritten && b.writer != kAtomic && b.writer != current && !ordered(current, b.writer, b.clock))
      race("written after a write by", i, b.writer);
  }
  const int warps = static_cast<int>((threads.size() + 31) / 32);
  for (int w = 0; w < warps; ++w) {
    const uint32_t* r = readers.data() + w * shared_size;
    for (uint32_t i = offset; i < offset + count; ++i) {
      const int reader = w * 32 + (r[i] & 31);
      if (r[i] && reader != current && !ordered(current, reader, r[i] >> 5)) race("written after a read by", i, reader);
    }
  }
}
void mark_written(uint32_t offset, uint32_t count, int writer, uint32_t clock, bool generic) {
  ++now;
  for (uint32_t i = offset; i < offset + count; ++i)
    bytes[i] = {kWritten, generic, static_cast<uint16_t>(writer), clock, now};
}
void check_readable(uint32_t offset, uint32_t count) {
  for (uint32_t i = offset; i < offset + count; ++i) {
    const Byte& b = bytes[i];
    if (b.state == kInFlight) fail("shared memory byte %u: read while a copy to it is in flight (missing wait)", i);
    if (b.state == kUnwritten && !allow_uninitialised) fail("shared memory byte %u: read, but never written", i);
    if (b.state == kWritten && b.writer != kAtomic && b.writer != current && !ordered(current, b.writer, b.clock))
      race("read after a write by", i, b.writer);
  }
}
void mark_read(uint32_t offset, uint32_t count) {
  uint32_t* r = readers.data() + warp_of(current) * shared_size;
  const uint32_t stamp = me().clocks[current] << 5 | (current & 31);
  for (uint32_t i = offset; i < offset + count; ++i) r[i] = stamp;
}
uint32_t shared_offset(const void* p, size_t count, const char* what) {
  const auto* a = static_cast<const uint8_t*>(p);
  if (a < shared || a + count > shared + shared_size)
    fail("%s: %zu bytes at shared memory + %td, which has %zu bytes", what, count, a - shared, shared_size);
  return static_cast<uint32_t>(a - shared);
}
void check_global(const void* p, size_t count, const char* what) {
  const auto* a = static_cast<const uint8_t*>(p);
  for (const Region& r : regions)
    if (a >= r.begin && a + count <= r.end) return;
  std::string near = "no tensor";
  int64_t best = 1ll << 60;
  for (const Region& r : regions) {
    const int64_t gap = a < r.begin ? r.begin - a : a + count - r.end;
    if (gap < best) {
      best = gap;
      near = r.name + (a < r.begin ? ", " + std::to_string(r.begin - a) + " bytes before its start"
                                   : ", ending " + std::to_string(gap) + " bytes past its end");
    }
  }
  fail("%s of %zu bytes outside global memory; nearest: %s", what, count, near.c_str());
}

void access(const void* p, size_t count, bool write) {
  if (!running || current < 0) return;
  const auto* a = static_cast<const uint8_t*>(p);
  const bool power = count <= 16 && !(count & (count - 1));
  if (a + count > shared_map && a < shared_map + shared_map_size) {
    const uint32_t offset = shared_offset(p, count, write ? "write" : "read");
    if (power && reinterpret_cast<uintptr_t>(a) % count) fail("misaligned access of %zu bytes at shared memory + %u", count, offset);
    if (write) {
      check_writable(offset, count);
      mark_written(offset, count, current, me().clocks[current], true);
    } else {
      check_readable(offset, count);
      mark_read(offset, count);
    }
  } else if (a >= arena && a < arena + arena_size) {
    check_global(p, count, write ? "write" : "read");
    if (power && reinterpret_cast<uintptr_t>(a) % count) fail("misaligned access of %zu bytes to global memory", count);
  }
}

void issue_copy(const CopyPtr& c) {  // the destination is lost from the issue on
  const uint32_t offset = shared_offset(c->dst, c->bytes, "asynchronous copy");
  check_writable(offset, c->bytes);
  ++now;
  for (uint32_t i = offset; i < offset + c->bytes; ++i) {
    bytes[i].state = kInFlight;
    bytes[i].time = now;
  }
  memset(c->dst, 0xFF, c->bytes);
}
void land(const CopyPtr& c) {
  if (c->done) return;
  c->done = true;
  if (c->valid)
    memcpy(c->dst, c->src, c->bytes);
  else
    memset(c->dst, 0, c->bytes);
  const int writer = c->engine ? engine() : c->thread;
  const uint32_t clock = c->engine ? ++engine_clock : c->clock ? c->clock : threads[c->thread].clocks[c->thread];
  mark_written(static_cast<uint32_t>(c->dst - shared), c->bytes, writer, clock, !c->engine);
}
}  // namespace
}  // namespace emu
