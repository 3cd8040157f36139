// Runs the cores of an Ascend C vector kernel one after the other; the threads of a SIMT function are fibers.
//
// Pipes run in program order here and at the same time on a device: clocks say what a pipe knows of the others
// through notifications that it waited for. Every byte of the unified buffer and of the tensors knows its last
// writer and reader. Errors are two threads of a function that touch a byte without a barrier between them, two
// pipes without a notification, two cores at all (where one of both writes), a wait that nothing notified,
// accesses outside of all memories, and reads of unified buffer, L1 or L0C that nobody wrote.
//
// A mixed kernel runs as two contexts, of the cube core and of its vector core, that take turns at the waits for
// one another; each has pipes of its own. Products are loops over the layouts that TileLang's sources state.
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
#include <optional>
#include <string>
#include <tuple>
#include <vector>

emu::Index threadIdx, blockDim;
int block_idx;

namespace emu {
namespace {
constexpr size_t kUnified = 248 * 1024, kStack = 64 * 1024, kThreads = 2048;
constexpr int kNobody = -1, kMany = -2, kPipe = 65535;  // kPipe: a copy or the scalar unit, not a thread
constexpr int kPipes = 2 * PIPE_ALL;                    // of the cube core and of the vector core
using Clock = std::array<uint32_t, kPipes>;

struct Touch {  // of one byte
  int core = kNobody, thread = kNobody;
  uint32_t epoch = 0;
  int pipe = PIPE_S;
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

struct Space {  // a memory of a core
  const char* name;
  size_t size;
  uint8_t* memory = static_cast<uint8_t*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::vector<Byte> bytes = std::vector<Byte>(size);
  size_t used = size;  // by the core before

  void reset() {
    std::fill_n(bytes.begin(), used, Byte());
    memset(memory, 0xFF, used);
    used = 0;
  }
};
Space spaces[] = {{"unified buffer", kUnified}, {"L1", 512 * 1024}, {"L0C", 256 * 1024}};
std::vector<Byte> tensor_bytes;
uint8_t* arena;
size_t arena_size;
std::vector<Range> ranges;
std::map<std::tuple<int, int, int>, std::deque<Clock>> notified, arrived;
std::array<Clock, kPipes> known;  // known[p][q]: how much of pipe q is over when pipe p goes on
int running = PIPE_S, running_unit = 0;
int own(int pipe) { return pipe + running_unit * PIPE_ALL; }
struct Unit {
  ucontext_t context;
  bool done;
  uint8_t* stack = nullptr;
} units[2];
ucontext_t turn;
bool moved;  // whether a unit that had its turn did anything
void* const* slots_;
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
  for (Space& s : spaces) {
    if (p < s.memory || p >= s.memory + s.size) continue;
    const size_t at = p - s.memory;
    if (at + size > s.size) fail("%s past the end of the %s", verb, s.name);
    s.used = std::max(s.used, at + size);
    for (size_t i = at; i < at + size; ++i) {
      if (!write && s.bytes[i].written.core == kNobody) fail("read of %s + %zu, never written", s.name, i);
      touch(s.bytes[i], write, s.name, i);
    }
    return;
  }
  if (p >= arena && p < arena + arena_size) {
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

uint8_t* ub() { return spaces[0].memory; }
uint8_t* l1() { return spaces[1].memory; }
uint8_t* l0c() { return spaces[2].memory; }
int unit() { return running_unit; }
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
  int before = running;
  explicit On(int of_unit) {
    const int pipe = own(of_unit), scalar = own(PIPE_S);
    for (int q = 0; q < kPipes; ++q) known[pipe][q] = std::max(known[pipe][q], known[scalar][q]);
    ++known[pipe][pipe], running = pipe, ++epoch;
  }
  ~On() { running = before, ++known[own(PIPE_S)][own(PIPE_S)], ++epoch; }
};
std::optional<On> work;
void begin(pipe_t pipe) { work.emplace(pipe); }
void end() { work.reset(); }
uint8_t peek(const uint8_t* p) {
  if (spaces[1].bytes[p - l1()].written.core == kNobody) return 255;
  access(p, 1, false);
  return *p;
}
void multiply(float* c, const float* a, const float* b, int m, int n, int k) {
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      float sum = c[i * n + j];
      for (int l = 0; l < k; ++l) sum += a[i * k + l] * b[j * k + l];
      c[i * n + j] = sum;
    }
}
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
namespace emu {
namespace {
void learn(int pipe, std::deque<Clock>& queue) {
  for (int q = 0; q < kPipes; ++q) known[pipe][q] = std::max(known[pipe][q], queue.front()[q]);
  queue.pop_front();
}
}  // namespace
}  // namespace emu
void asc_sync_notify(pipe_t from, pipe_t to, event_t event) {
  emu::notified[{emu::own(from), emu::own(to), event}].push_back(emu::known[emu::own(from)]);
}
void asc_sync_wait(pipe_t from, pipe_t to, event_t event) {
  auto& queue = emu::notified[{emu::own(from), emu::own(to), event}];
  if (queue.empty()) emu::fail("pipe %d waits for pipe %d, event %d, which nothing notified", to, from, event);
  emu::learn(emu::own(to), queue);
}
void asc_sync_intra_arrive(pipe_t pipe, event_t event) {
  emu::arrived[{1 - emu::unit(), 0, event}].push_back(emu::known[emu::own(pipe)]);
  emu::moved = true;
}
void asc_sync_intra_wait(pipe_t pipe, event_t event) {
  const int self = emu::unit();
  auto& queue = emu::arrived[{self, 0, event}];
  while (queue.empty()) swapcontext(&emu::units[self].context, &emu::turn);
  emu::learn(emu::own(pipe), queue);
  emu::moved = true;
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
extern "C" const int dsv41_units;  // 2 of a mixed kernel

namespace emu {
namespace {
void run_unit() {
  const int self = running_unit;
  dsv41_kernel(slots_);
  units[self].done = moved = true;
  swapcontext(&units[self].context, &turn);
}

// Both units of a pair, in turns, the cube core first.
void run_pair(void* const* slots) {
  constexpr size_t kBytes = 1 << 20;
  slots_ = slots;
  for (Unit& u : units) {
    if (!u.stack)
      u.stack = static_cast<uint8_t*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    u.done = false;
    getcontext(&u.context);
    u.context.uc_stack = {u.stack, 0, kBytes};
    u.context.uc_link = nullptr;
    makecontext(&u.context, run_unit, 0);
  }
  while (!units[0].done || !units[1].done) {
    moved = false;
    for (int u = 0; u < 2; ++u) {
      if (units[u].done) continue;
      running_unit = u, running = own(PIPE_S), ++epoch;
      swapcontext(&turn, &units[u].context);
    }
    if (!moved) fail("both cores of the pair wait for one another");
  }
  running_unit = 0;
}
}  // namespace
}  // namespace emu

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
    emu::notified.clear(), emu::arrived.clear();
    emu::known = {};
    emu::running = PIPE_S, emu::running_unit = 0;
    for (emu::Space& s : emu::spaces) s.reset();
    ++emu::epoch;
    dsv41_units == 2 ? emu::run_pair(slots) : dsv41_kernel(slots);
    for (auto& [key, queue] : emu::arrived)
      if (queue.size()) emu::fail("the core ends with an arrival for unit %d, event %d, too many", std::get<0>(key), std::get<2>(key));
    for (auto& [key, queue] : emu::notified)
      if (queue.size()) emu::fail("the core ends with a notification of pipe %d, event %d, too many", std::get<0>(key), std::get<2>(key));
  }
  return nullptr;
}
