// Runs the cores of an Ascend C vector kernel one after the other; the threads of a SIMT function are fibers.
//
// Pipes run in program order here and at the same time on a device: clocks say what a pipe knows of the others
// through notifications that it waited for. Every byte of the unified buffer and of the tensors knows its last
// writer and reader. Errors are two threads of a function that touch a byte without a barrier between them, two
// pipes without a notification, two cores at all (where one of both writes), a wait that nothing notified,
// accesses outside of both memories, and reads of unified buffer that nobody wrote.
#include "runtime.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <vector>

emu::Index threadIdx, blockDim;
int block_idx;

namespace emu {
namespace {
constexpr size_t kUnified = 248 * 1024, kStack = 64 * 1024, kThreads = 2048;
constexpr int kNobody = -1, kMany = -2, kPipe = 65535;  // kPipe: a copy or the scalar unit, not a thread
using Clock = std::array<uint32_t, PIPE_ALL>;

struct Touch {  // of one byte
  int core = kNobody, thread = kNobody;
  uint32_t epoch = 0;
  pipe_t pipe = PIPE_S;
  uint32_t time = 0;  // of that pipe
};
struct Byte {
  Touch written, read;
};
struct Range {
  const char* name;
  size_t begin, size;
};
struct Fiber {
  enum { kReady, kBlock, kWarp, kDone } state = kReady;
  bool started = false;
  Index index;
  uint64_t value = 0;
  ucontext_t context;
  jmp_buf env;
};

alignas(4096) uint8_t unified[kUnified];
std::vector<Byte> unified_bytes(kUnified), tensor_bytes;
size_t used = kUnified;  // of the unified buffer, by the core before
uint8_t* arena;
size_t arena_size;
std::vector<Range> ranges;
std::map<std::tuple<int, int, int>, std::deque<Clock>> notified;
std::array<Clock, PIPE_ALL> known;  // known[p][q]: how much of pipe q is over when pipe p goes on
pipe_t running = PIPE_S;
std::vector<Fiber> fibers;
uint8_t* stacks;
int current = kPipe;
uint32_t epoch = 1;  // grows at every barrier: what lies between two of them is not ordered
void (*body_)(void*);
void* data_;
jmp_buf scheduler, outside;
std::string message;

std::string who(int thread) { return thread == kPipe ? "a copy" : "thread " + std::to_string(thread); }

void touch(Byte& byte, bool write, const char* name, size_t at) {
  auto clash = [&](const Touch& t, const char* did) {
    if (t.core == kNobody) return;
    if (t.core != block_idx)
      fail("core %d %s %s byte %zu that core %d %s", block_idx, write ? "writes" : "reads", name, at, t.core, did);
    if (t.pipe != running && known[running][t.pipe] < t.time)
      fail("pipe %d %s %s byte %zu that pipe %d %s, which it did not wait for", running, write ? "writes" : "reads", name, at, t.pipe, did);
    if (t.epoch == epoch && t.thread != current)
      fail("%s %s %s byte %zu that %s %s without a barrier between them", who(current).c_str(),
           write ? "writes" : "reads", name, at, t.thread == kMany ? "others" : who(t.thread).c_str(), did);
  };
  clash(byte.written, "wrote");
  if (write) {
    clash(byte.read, "read");
    byte.written = {block_idx, current, epoch, running, known[running][running]};
  } else if (byte.read.core == block_idx && byte.read.epoch == epoch && byte.read.thread != current) {
    byte.read.thread = kMany;
  } else {
    byte.read = {byte.read.core != kNobody && byte.read.core != block_idx ? kMany : block_idx, current, epoch, running, known[running][running]};
  }
}

void access(const void* address, size_t size, bool write) {
  const auto* p = static_cast<const uint8_t*>(address);
  const char* verb = write ? "write" : "read";
  if (p >= unified && p < unified + kUnified) {
    const size_t at = p - unified;
    if (at + size > kUnified) fail("%s past the end of the unified buffer", verb);
    used = std::max(used, at + size);
    for (size_t i = at; i < at + size; ++i) {
      if (!write && unified_bytes[i].written.core == kNobody) fail("read of unified buffer + %zu, never written", i);
      touch(unified_bytes[i], write, "unified buffer", i);
    }
  } else if (p >= arena && p < arena + arena_size) {
    const size_t at = p - arena;
    for (const Range& r : ranges)
      if (at >= r.begin && at + size <= r.begin + r.size) {
        for (size_t i = at; i < at + size; ++i) touch(tensor_bytes[i], write, r.name, i - r.begin);
        return;
      }
    const Range* near = nullptr;
    for (const Range& r : ranges)
      if (at + size > r.begin || !near) near = &r;
    fail("%s of %zu bytes outside of the tensors; nearest: %s, %zu bytes, offset %td", verb, size,
         near ? near->name : "none", near ? near->size : 0, near ? static_cast<ptrdiff_t>(at - near->begin) : 0);
  } else if (size && reinterpret_cast<uintptr_t>(p) < 65536) {
    fail("%s at a null pointer + %zu", verb, reinterpret_cast<uintptr_t>(p));
  }
}

void fiber() {
  body_(data_);
  fibers[current].state = Fiber::kDone;
  _longjmp(scheduler, 1);
}
void pause(decltype(Fiber::state) state) {
  fibers[current].state = state;
  if (!_setjmp(fibers[current].env)) _longjmp(scheduler, 1);
}
void start(Fiber& f, int thread) {
  getcontext(&f.context);
  f.context.uc_stack = {stacks + thread * kStack, 0, kStack};
  f.context.uc_link = nullptr;
  makecontext(&f.context, fiber, 0);
}
}  // namespace

uint8_t* ub() { return unified; }
void fail(const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  message = "core " + std::to_string(block_idx) + (current == kPipe ? "" : ", " + who(current)) + ": " + text;
  _longjmp(outside, 1);
}
struct On {  // work of a pipe; the scalar unit starts it and does not wait for it
  pipe_t before = running;
  explicit On(pipe_t pipe) {
    for (int q = 0; q < PIPE_ALL; ++q) known[pipe][q] = std::max(known[pipe][q], known[PIPE_S][q]);
    ++known[pipe][pipe], running = pipe, ++epoch;
  }
  ~On() { running = before, ++known[PIPE_S][PIPE_S], ++epoch; }
};
unsigned lane() { return current % 32; }
unsigned warp_lanes() { return std::min<unsigned>(32, fibers.size() - current / 32 * 32); }

void run_threads(Index threads, void (*body)(void*), void* data) {
  const size_t count = size_t{threads.x} * threads.y * threads.z;
  if (count == 0 || count > kThreads) fail("a vector function of %zu threads", count);
  if (!stacks)
    stacks = static_cast<uint8_t*>(mmap(nullptr, kStack * kThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  body_ = body, data_ = data, blockDim = threads;
  const On on(PIPE_V);
  fibers.assign(count, {});
  for (size_t t = 0; t < count; ++t) {
    fibers[t].index = {unsigned(t % threads.x), unsigned(t / threads.x % threads.y), unsigned(t / threads.x / threads.y)};
    start(fibers[t], t);
  }
  for (;;) {
    for (size_t t = 0; t < count; ++t) {
      if (fibers[t].state != Fiber::kReady) continue;
      current = t, threadIdx = fibers[t].index;
      if (!_setjmp(scheduler)) {
        if (fibers[t].started) _longjmp(fibers[t].env, 1);
        fibers[t].started = true;
        setcontext(&fibers[t].context);
      }
    }
    current = kPipe;
    size_t done = 0, at_barrier = 0, released = 0;
    for (const Fiber& f : fibers) done += f.state == Fiber::kDone, at_barrier += f.state == Fiber::kBlock;
    if (done == count) break;
    if (at_barrier == count) {
      ++epoch;
      for (Fiber& f : fibers) f.state = Fiber::kReady;
      continue;
    }
    for (size_t warp = 0; warp < count; warp += 32) {
      const auto end = fibers.begin() + std::min(count, warp + 32);
      if (std::any_of(fibers.begin() + warp, end, [](const Fiber& f) { return f.state != Fiber::kWarp; })) continue;
      for (auto f = fibers.begin() + warp; f != end; ++f) f->state = Fiber::kReady, ++released;
    }
    if (!released) fail("deadlock: of %zu threads %zu have ended and %zu wait at a barrier", count, done, at_barrier);
  }
}

uint64_t exchange(uint64_t value, unsigned lane) {
  fibers[current].value = value;
  pause(Fiber::kWarp);
  const size_t from = current / 32 * 32 + lane % 32;
  const uint64_t got = from < fibers.size() ? fibers[from].value : value;
  pause(Fiber::kWarp);
  return got;
}

void copy(pipe_t pipe, uint8_t* to, const uint8_t* from, int bursts, int bytes, int64_t to_stride, int64_t from_stride) {
  if (bursts < 0 || bytes < 0) fail("a copy of %d x %d bytes", bursts, bytes);
  const On on(pipe);
  for (int i = 0; i < bursts; ++i) {
    access(from + i * from_stride, bytes, false);
    access(to + i * to_stride, bytes, true);
    memcpy(to + i * to_stride, from + i * from_stride, bytes);
  }
}
}  // namespace emu

void asc_syncthreads() { emu::pause(emu::Fiber::kBlock); }
void asc_sync_notify(pipe_t from, pipe_t to, event_t event) { emu::notified[{from, to, event}].push_back(emu::known[from]); }
void asc_sync_wait(pipe_t from, pipe_t to, event_t event) {
  auto& queue = emu::notified[{from, to, event}];
  if (queue.empty()) emu::fail("pipe %d waits for pipe %d, event %d, which nothing notified", to, from, event);
  for (int q = 0; q < PIPE_ALL; ++q) emu::known[to][q] = std::max(emu::known[to][q], queue.front()[q]);
  queue.pop_front();
}

namespace emu {
namespace {
void checked(const void* p, size_t size, bool write) {
  if (reinterpret_cast<uintptr_t>(p) % size) fail("access of %zu bytes at an address that is no multiple of it", size);
  access(p, size, write);
}
}  // namespace
}  // namespace emu
#define HOOK(n)                                                                                      \
  extern "C" void __asan_load##n##_noabort(const void* p) { emu::checked(p, n, false); }             \
  extern "C" void __asan_store##n##_noabort(const void* p) { emu::checked(p, n, true); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
extern "C" void __asan_loadN_noabort(const void* p, size_t n) { emu::access(p, n, false); }
extern "C" void __asan_storeN_noabort(const void* p, size_t n) { emu::access(p, n, true); }
extern "C" void __asan_handle_no_return() {}

extern "C" void dsv41_kernel(void* const* slots);

// Run all cores; null, or what went wrong. Tensors lie in the arena at begins[i], sizes[i] bytes long.
extern "C" const char* emu_run(int cores, void* const* slots, uint8_t* arena, size_t arena_size, int tensors,
                               const char* const* names, const size_t* begins, const size_t* sizes) {
  emu::arena = arena, emu::arena_size = arena_size;
  emu::tensor_bytes.assign(arena_size, {});
  emu::ranges.clear();
  for (int i = 0; i < tensors; ++i) emu::ranges.push_back({names[i], begins[i], sizes[i]});
  if (_setjmp(emu::outside)) return emu::message.c_str();
  for (block_idx = 0; block_idx < cores; ++block_idx) {
    emu::current = emu::kPipe;
    emu::notified.clear();
    emu::known = {};
    emu::running = PIPE_S;
    std::fill_n(emu::unified_bytes.begin(), emu::used, emu::Byte());
    memset(emu::unified, 0xFF, emu::used);
    emu::used = 0;
    ++emu::epoch;
    dsv41_kernel(slots);
    for (auto& [key, queue] : emu::notified)
      if (queue.size()) emu::fail("the core ends with a notification of pipe %d, event %d, too many", std::get<0>(key), std::get<2>(key));
  }
  return nullptr;
}
