// Runs one block of CUDA threads as fibers on one CPU thread and watches its shared memory.
//
// A fiber runs until it blocks; the order is fixed, so every run is the same. Asynchronous work is as late as
// the program allows: copies land when a thread waits for their barrier and (in the late schedule) nothing else
// can run; accumulators of wgmma are NaN until the wait. Each byte of shared memory knows whether it was ever
// written, whether a copy is in flight to it, its last writer and its last reader of every warp; vector clocks
// of the threads say whether two accesses are ordered by barriers, so a missing barrier is found in any schedule.
#include "runtime.h"

#include <dlfcn.h>
#include <execinfo.h>
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
  uint64_t generation = 0;
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
bool moved;  // a copy landed in this pass
std::function<void()> entry;
pthread_t owner;
struct sigaction old_segv, old_alarm;
char signal_stack[64 << 10];

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
    void* frames[24];
    Dl_info info;
    const int depth = backtrace(frames, 24);
    for (int i = 0; i < depth; ++i)
      if (dladdr(frames[i], &info) && info.dli_fbase) {
        snprintf(where, sizeof where, "\n@%#zx", static_cast<char*>(frames[i]) - static_cast<char*>(info.dli_fbase) - 1);
        error += where;
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

// ---- barriers --------------------------------------------------------------------------------------------
Barrier& barrier(uint64_t* bar, const char* what) {
  shared_offset(bar, 8, what);
  auto found = barriers.find(bar);
  if (found == barriers.end()) fail("%s: the barrier at shared memory + %td was not initialised", what, reinterpret_cast<uint8_t*>(bar) - shared);
  const Byte& b = bytes[reinterpret_cast<uint8_t*>(bar) - shared];
  if (b.writer != current && !ordered(current, b.writer, b.clock))
    fail("%s: the barrier's initialisation by %s is not ordered before this", what, who(b.writer).c_str());
  return found->second;
}
void settle(Barrier& b) {
  if (b.pending < 0) fail("barrier: more arrivals than it was initialised for (%ld)", static_cast<long>(b.expected));
  if (b.pending || b.bytes) return;
  b.completed = b.arriving;
  ++b.phase;
  b.pending = b.expected;
}
bool phase_done(const Barrier& b, uint32_t parity) { return (b.phase & 1) != (parity & 1); }
bool deliver(Barrier& b) {  // the next asynchronous arrival
  if (b.queue.empty()) return false;
  Arrival a = b.queue.front();
  b.queue.erase(b.queue.begin());
  if (a.copy) {
    land(a.copy);
    b.bytes -= a.copy->bytes;
    if (b.arriving.size() <= static_cast<size_t>(engine())) b.arriving.resize(engine() + 1);
    b.arriving[engine()] = std::max(b.arriving[engine()], engine_clock);
  } else {
    for (const CopyPtr& c : a.group) land(c);
    join(b.arriving, a.clocks);
    --b.pending;
  }
  settle(b);
  moved = true;
  return true;
}

void run_block() {
  const int n = static_cast<int>(threads.size());
  std::vector<int> order(n);
  for (int i = 0; i < n; ++i) order[i] = late ? i : n - 1 - i;
  for (;;) {
    bool progress = false, alive = false;
    moved = false;
    for (int t : order) {
      Thread& thread = threads[t];
      if (thread.finished) continue;
      alive = true;
      current = t;
      if (thread.ready && !thread.ready()) continue;
      thread.ready = nullptr;
      progress = true;
      threadIdx_ = thread.index;
      if (!_setjmp(scheduler)) {
        if (thread.started) _longjmp(thread.env, 1);
        thread.started = true;
        setcontext(&thread.context);
      }
    }
    current = -1;
    if (!alive) break;
    if (progress || moved) continue;
    bool delivered = false;  // nobody can run: now the asynchronous work completes, one step
    for (auto& [address, b] : barriers) {
      bool awaited = false;
      for (auto& t : threads) awaited |= !t.finished && t.awaits == address;
      if (awaited && deliver(b)) delivered = true;
    }
    if (delivered) continue;
    std::map<std::string, std::vector<int>> groups;
    for (int t = 0; t < n; ++t) groups[threads[t].finished ? "has ended" : "waits for " + threads[t].waits_for].push_back(t);
    std::string text = "deadlock:";
    for (auto& [what, list] : groups) {
      text += "\n  " + std::to_string(list.size()) + " threads";
      text += list.size() == 1 ? " (" + std::to_string(list[0]) + ") " : " (" + std::to_string(list.front()) + ".." + std::to_string(list.back()) + ") ";
      text += what;
    }
    for (auto& [address, b] : barriers)
      if (std::any_of(threads.begin(), threads.end(), [a = address](auto& t) { return !t.finished && t.awaits == a; }))
        text += "\n  barrier at shared memory + " + std::to_string(reinterpret_cast<uint8_t*>(address) - shared) + ": phase " +
                std::to_string(b.phase) + ", " + std::to_string(b.pending) + " of " + std::to_string(b.expected) + " arrivals and " +
                std::to_string(b.bytes) + " bytes missing";
    stop(text);
  }
  for (size_t i = 0; i < shared_size; ++i)
    if (bytes[i].state == kInFlight) stop("the block ended while a copy to shared memory byte " + std::to_string(i) + " was in flight");
  for (auto& t : threads)
    for (auto& group : t.stores)
      for (auto& c : group)
        if (!c->done) stop("the block ended before bulk_store_wait");
}

void fiber() {
  entry();
  Thread& t = me();
  if (!t.accumulators.empty()) fail("the thread ended before wgmma_wait");
  t.finished = true;
  _longjmp(scheduler, 1);
}

void on_signal(int number, siginfo_t* info, void*) {
  if (!pthread_equal(pthread_self(), owner)) {
    pthread_kill(owner, number);
    return;
  }
  char text[160];
  if (number == SIGALRM)
    snprintf(text, sizeof text, "time limit: a thread spins, or the case is too large");
  else
    snprintf(text, sizeof text, "segmentation fault at %p", info->si_addr);
  stop(text);
}

// ---- tensor cores ----------------------------------------------------------------------------------------
float decode_e4m3(uint32_t code) {
  const int e = code >> 3 & 15, m = code & 7;
  if (e == 15 && m == 7) return NAN;
  const float f = e ? std::ldexp(8.0f + m, e - 10) : std::ldexp(static_cast<float>(m), -9);
  return code & 128 ? -f : f;
}
float decode(uint32_t code, bool fp8) {
  static const std::vector<float> table = [] {
    std::vector<float> t(256);
    for (int i = 0; i < 256; ++i) t[i] = decode_e4m3(i);
    return t;
  }();
  if (fp8) return table[code];
  const uint32_t bits = code << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// Reads an operand [rows, 32 bytes of k] through its descriptor, as floats [rows][k].
void read_operand(uint64_t d, int first, int rows, bool fp8, bool transposed, float* out, int row_step, int k_step,
                  Product& record) {
  if (d >> 62 != 1) fail("wgmma: descriptor %#lx is not of the 128-byte swizzle", static_cast<unsigned long>(d));
  if (d >> 49 & 7) fail("wgmma: base offset %d; tiles must be aligned to 1,024 bytes", static_cast<int>(d >> 49 & 7));
  const uint32_t start = (d & 0x3FFF) << 4, leading = (d >> 16 & 0x3FFF) << 4, stride = (d >> 32 & 0x3FFF) << 4;
  const int k = fp8 ? 32 : 16, size = fp8 ? 1 : 2;
  if (transposed && fp8) fail("wgmma: only bf16 operands may be MN-major");
  uint32_t piece = ~0u;
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < k; ++j) {
      const uint32_t r = first + i;
      uint32_t at = transposed ? start + r / 64 * leading + j / 8 * stride + j % 8 * 128 + r % 64 * 2
                               : start + r / 8 * stride + r % 8 * 128 + j * size;
      at ^= at >> 3 & 0x70;
      const uint32_t offset = at - kWindow;
      if (at < kWindow || offset + size > shared_size) fail("wgmma: operand byte %d outside shared memory of %zu bytes", static_cast<int>(offset), shared_size);
      if (offset / 16 != piece) {
        piece = offset / 16;
        for (uint32_t b = piece * 16; b < std::min<size_t>(piece * 16 + 16, shared_size); ++b) {
          const Byte& byte = bytes[b];
          if (byte.state == kWritten && byte.generic && byte.writer != kAtomic) {
            bool fenced = threads[byte.writer].fence_time > byte.time;
            if (!fenced) fenced = me().fence_time > byte.time;
            if (!fenced) fail("wgmma reads shared memory byte %u, stored by %s, without fence_async", b, who(byte.writer).c_str());
          }
        }
        check_readable(piece * 16, 16);
        record.operands.push_back({piece * 16, 16});
      }
      uint32_t code = shared[offset];
      if (!fp8) code |= shared[offset + 1] << 8;
      out[i * row_step + j * k_step] = decode(code, fp8);
    }
}

struct Request {
  float* d;
  int count;
  const uint32_t* a_regs;
  uint64_t a, b;
  int accumulate;
};
}  // namespace

void fail(const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  stop(text);
}

int lane() { return current & 31; }
void yield_now() {
  bool first = true;
  block("its turn", [first]() mutable { return first ? (first = false) : true; });
}

const Meeting& meet(uint32_t mask, const char* what, uint64_t value) {
  const int warp = warp_of(current), l = lane();
  const int live = std::min<int>(32, static_cast<int>(threads.size()) - warp * 32);
  if (live < 32) mask &= (1u << live) - 1;
  if (!(mask >> l & 1)) fail("%s: lane %d is not in its own mask %#x", what, l, mask);
  Rendezvous& r = meetings[{warp, mask}];
  if (r.arrived && strcmp(r.what, what)) fail("lanes of a warp disagree: %s and %s", r.what, what);
  r.what = what;
  const uint64_t generation = r.generation;
  Meeting& table = r.table[generation & 1];
  table.value[l] = value;
  table.mask = mask;
  r.arrived |= 1u << l;
  release(r.clocks);
  if (r.arrived == mask) {
    r.arrived = 0;
    ++r.generation;
  } else {
    block(std::string(what) + " of the other lanes of warp " + std::to_string(warp), [&r, generation] { return r.generation != generation; });
  }
  join(me().clocks, r.clocks);
  return table;
}

void sync_block(const char* what, int id, int count, bool blocking) {
  BlockBarrier& b = block_barriers[id];
  if (b.arrived && b.needed != count) fail("barrier %d: %d threads here, %d elsewhere", id, count, b.needed);
  if (count > static_cast<int>(threads.size()) || (count > 0 && count % 32)) fail("barrier %d: %d threads, the block has %zu", id, count, threads.size());
  b.needed = count;
  ++b.arrived;
  release(b.arriving);
  const uint64_t generation = b.generation;
  auto complete = [&b, generation] {
    if (b.generation != generation) return true;
    int needed = b.needed;
    if (!needed)  // the whole block: threads that have ended do not count
      for (auto& t : threads) needed += !t.finished;
    if (b.arrived < needed) return false;
    b.total = b.sum;
    b.seen = b.arrived;
    b.sum = b.arrived = 0;
    ++b.generation;
    b.completed = b.arriving;
    return true;
  };
  if (!blocking) {
    complete();
    return;
  }
  block(std::string(what) + " " + std::to_string(id), complete);
  join(me().clocks, b.completed);
}
int sync_count(int predicate, int* all) {
  BlockBarrier& b = block_barriers[0];
  b.sum += predicate != 0;
  sync_block("__syncthreads", 0, 0, true);
  *all = b.seen;
  return b.total;
}

void touch(const void* p, size_t count, bool write) { access(p, count, write); }
void atomic_access(const void* p, size_t count) {
  const auto* a = static_cast<const uint8_t*>(p);
  if (a >= shared_map && a < shared_map + shared_map_size) {
    const uint32_t offset = shared_offset(p, count, "atomic");
    for (uint32_t i = offset; i < offset + count; ++i) {
      if (bytes[i].state == kUnwritten && !allow_uninitialised) fail("shared memory byte %u: atomic on memory never written", i);
      if (bytes[i].writer != kAtomic && bytes[i].writer != current && !ordered(current, bytes[i].writer, bytes[i].clock)) race("atomic after a write by", i, bytes[i].writer);
    }
    mark_written(offset, count, kAtomic, 0, true);
  } else if (a >= arena && a < arena + arena_size) {
    check_global(p, count, "atomic");
  }
}

uint32_t shared_address(const void* p) { return shared_offset(p, 0, "shared address") + kWindow; }
void fence_async() { me().fence_time = ++now; }

void barrier_init(uint64_t* bar, uint32_t arrivals) {
  const uint32_t offset = shared_offset(bar, 8, "barrier_init");
  if (offset % 8) fail("barrier_init: shared memory + %u is not aligned to 8", offset);
  if (!arrivals) fail("barrier_init: 0 arrivals");
  check_writable(offset, 8);
  mark_written(offset, 8, current, me().clocks[current], true);
  *bar = ~0ull;
  barriers[bar] = Barrier{};
  barriers[bar].expected = barriers[bar].pending = arrivals;
}
void fence_barrier_init() {
  for (auto& [address, b] : barriers) b.fenced = true;
}
void barrier_arrive(uint64_t* bar, uint32_t count, uint32_t tx) {
  Barrier& b = barrier(bar, "barrier_arrive");
  b.bytes += tx;
  b.pending -= count;
  release(b.arriving);
  settle(b);
}
bool barrier_test(uint64_t* bar, uint32_t parity) {
  Barrier& b = barrier(bar, "barrier_test");
  if (!phase_done(b, parity)) return false;
  join(me().clocks, b.completed);
  return true;
}
void barrier_wait(uint64_t* bar, uint32_t parity) {
  Barrier& b = barrier(bar, "barrier_wait");
  me().awaits = bar;
  block("phase of parity " + std::to_string(parity) + " of shared memory + " +
            std::to_string(reinterpret_cast<uint8_t*>(bar) - shared),
        [&b, parity] {
          if (!late)
            while (!phase_done(b, parity) && deliver(b)) {
            }
          return phase_done(b, parity);
        });
  me().awaits = nullptr;
  join(me().clocks, b.completed);
}
void barrier_arrive_copies(uint64_t* bar) {
  Barrier& b = barrier(bar, "barrier_arrive_copies");
  Arrival a;
  for (auto& group : me().groups)
    for (auto& c : group)
      if (!c->done) a.group.push_back(c);
  for (auto& c : me().open) a.group.push_back(c);
  for (auto& c : a.group) c->clock = me().clocks[current];
  release(a.clocks);
  b.queue.push_back(a);
}

void bulk_copy(void* dst, const void* src, uint32_t count, uint64_t* bar) {
  Barrier& b = barrier(bar, "bulk_copy");
  if (!b.fenced) fail("bulk_copy: no fence_barrier_init after barrier_init");
  if (!count || count % 16) fail("bulk_copy: %u bytes, not a positive multiple of 16", count);
  if (shared_offset(dst, count, "bulk_copy") % 16 || reinterpret_cast<uintptr_t>(src) % 16) fail("bulk_copy: source or destination is not aligned to 16");
  check_global(src, count, "bulk_copy");
  Arrival a;
  a.copy = std::make_shared<Copy>(Copy{static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), count, current, true, false, true});
  issue_copy(a.copy);
  b.queue.push_back(a);
}
void copy_async(void* dst, const void* src, int count, bool valid) {
  if (shared_offset(dst, count, "copy_16") % count || (valid && reinterpret_cast<uintptr_t>(src) % count)) fail("copy_16: source or destination is not aligned to %d", count);
  if (valid) check_global(src, count, "copy_16");
  auto c = std::make_shared<Copy>(Copy{static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), static_cast<uint32_t>(count), current, valid, false, false});
  issue_copy(c);
  me().open.push_back(c);
}
void copy_commit() {
  me().groups.push_back(std::move(me().open));
  me().open.clear();
}
void copy_wait(int pending) {
  auto& groups = me().groups;
  while (static_cast<int>(groups.size()) > pending) {
    for (auto& c : groups.front()) land(c);
    groups.erase(groups.begin());
  }
}
void bulk_store(void* dst, const void* src, uint32_t count) {
  const uint32_t offset = shared_offset(src, count, "bulk_store");
  if (!count || count % 16 || offset % 16 || reinterpret_cast<uintptr_t>(dst) % 16) fail("bulk_store: size, source or destination is not a multiple of 16");
  check_global(dst, count, "bulk_store");
  check_readable(offset, count);
  for (uint32_t i = offset; i < offset + count; ++i)
    if (bytes[i].generic && bytes[i].writer != kAtomic && threads[bytes[i].writer].fence_time <= bytes[i].time && me().fence_time <= bytes[i].time)
      fail("bulk_store reads shared memory byte %u, stored by %s, without fence_async", i, who(bytes[i].writer).c_str());
  me().stores_open.push_back(std::make_shared<Copy>(Copy{static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), count, current, true, false, true}));
}
void bulk_store_commit() {
  me().stores.push_back(std::move(me().stores_open));
  me().stores_open.clear();
}
void bulk_store_wait(int pending, bool) {
  auto& groups = me().stores;
  while (static_cast<int>(groups.size()) > pending) {
    for (auto& c : groups.front()) {
      memcpy(c->dst, c->src, c->bytes);
      mark_read(static_cast<uint32_t>(c->src - shared), c->bytes);
      c->done = true;
    }
    groups.erase(groups.begin());
  }
}

void wgmma_fence() { me().wgmma_fenced = true; }
void wgmma_commit() {
  Thread& t = me();
  ++t.wgmma_group;
  t.wgmma_fenced = t.wgmma_open = false;
}
void wgmma_wait(int pending) {
  Thread& t = me();
  if (t.wgmma_open) fail("wgmma_wait before wgmma_commit");
  const int done = t.wgmma_group - pending;  // groups below this one are complete
  for (auto p = t.products.begin(); p != t.products.end();) {
    if (p->group >= done) {
      ++p;
      continue;
    }
    for (const Operand& o : p->operands) {
      for (uint32_t i = o.offset; i < o.offset + o.bytes; ++i)
        if (bytes[i].time > p->time) fail("shared memory byte %u: changed by %s before wgmma_wait", i, bytes[i].state == kInFlight ? "a copy" : "a store");
      mark_read(o.offset, o.bytes);
    }
    p = t.products.erase(p);
  }
  for (auto a = t.accumulators.begin(); a != t.accumulators.end();)
    if (a->second.group < done) {
      memcpy(a->first, a->second.value.data(), 4 * a->second.count);
      a = t.accumulators.erase(a);
    } else {
      ++a;
    }
}

void wgmma(float* d, int count, const uint32_t* a_regs, uint64_t a, uint64_t b, int accumulate, bool fp8,
           bool a_transposed, bool b_transposed) {
  Thread& t = me();
  const bool chained = t.accumulators.count(d) != 0;
  if (!t.wgmma_fenced && (a_regs || !chained)) fail("wgmma without wgmma_fence before it");
  if (count % 4 || count > 128) fail("wgmma: %d accumulators", count);
  t.wgmma_open = true;
  Request own{d, count, a_regs, a, b, accumulate};
  if (!chained) {
    auto& acc = t.accumulators[d];
    acc.count = count;
    acc.value.assign(d, d + count);
    std::fill(d, d + count, NAN);
  }
  t.accumulators[d].group = t.wgmma_group;
  meet(~0u, "wgmma", 0);  // all have their accumulators in place
  const Meeting& table = meet(~0u, "wgmma operands", reinterpret_cast<uint64_t>(&own));
  if (lane() == 0) {
    const Request* lanes[32];
    for (int l = 0; l < 32; ++l) {
      lanes[l] = reinterpret_cast<const Request*>(table.value[l]);
      const Request& r = *lanes[l];
      if (r.count != count || r.b != b || r.a != a || !r.a_regs != !a_regs || !r.accumulate != !accumulate) fail("wgmma: lane %d has other operands than lane 0", l);
    }
    const int n = 2 * count, k = fp8 ? 32 : 16, warp = warp_of(current) % 4, first = current;
    static float A[16 * 32], B[256 * 32];
    static double S[16 * 256];
    Product product{t.wgmma_group, 0, {}};
    if (a_regs) {
      for (int l = 0; l < 32; ++l)
        for (int r = 0; r < 4; ++r)
          for (int e = 0; e < k / 8; ++e) {
            const int row = l / 4 + 8 * (r & 1), column = k / 8 * (l % 4) + e + k / 2 * (r >> 1);
            const uint32_t bits = lanes[l]->a_regs[r] >> (fp8 ? 8 * e : 16 * e);
            A[row * k + column] = decode(bits & (fp8 ? 0xFF : 0xFFFF), fp8);
          }
    } else {
      read_operand(a, 16 * warp, 16, fp8, a_transposed, A, k, 1, product);
    }
    read_operand(b, 0, n, fp8, b_transposed, B, 1, n, product);
    std::fill(S, S + 16 * n, 0.0);
    for (int i = 0; i < 16; ++i)
      for (int x = 0; x < k; ++x) {
        const double factor = A[i * k + x];
        for (int j = 0; j < n; ++j) S[i * n + j] += factor * B[x * n + j];
      }
    product.time = ++now;
    t.products.push_back(std::move(product));
    for (int l = 0; l < 32; ++l) {
      auto& acc = threads[first + l].accumulators[lanes[l]->d];
      for (int i = 0; i < count; ++i) {
        const int row = l / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (l % 4) + i % 2;
        acc.value[i] = (accumulate ? acc.value[i] : 0.0f) + static_cast<float>(S[row * n + column]);
      }
    }
  }
  meet(~0u, "wgmma done", 0);  // the requests live on the lanes' stacks
}
}  // namespace emu

// The compiler calls these before every access of the kernel (-fsanitize=kernel-address).
#define ACCESS(n)                                                                              \
  extern "C" void __asan_load##n##_noabort(const void* p) { emu::access(p, n, false); }        \
  extern "C" void __asan_store##n##_noabort(const void* p) { emu::access(p, n, true); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
extern "C" void __asan_loadN_noabort(const void* p, size_t n) { emu::access(p, n, false); }
extern "C" void __asan_storeN_noabort(const void* p, size_t n) { emu::access(p, n, true); }
extern "C" void __asan_handle_no_return() {}

extern "C" void dsv41_entry(void* shared, void* const* slots);

// Runs the whole grid; returns the problem found, or null.
extern "C" const char* emu_run(const unsigned* grid, const unsigned* block, size_t shared_bytes, void* const* slots,
                               void* arena_base, size_t arena_bytes, int count, const char* const* names,
                               const size_t* begin, const size_t* size, int late_schedule, int uninitialised,
                               int seconds) {
  using namespace emu;
  late = late_schedule;
  allow_uninitialised = uninitialised;
  arena = static_cast<uint8_t*>(arena_base);
  arena_size = arena_bytes;
  regions.clear();
  for (int i = 0; i < count; ++i) regions.push_back({arena + begin[i], arena + begin[i] + size[i], names[i]});
  gridDim_ = {grid[0], grid[1], grid[2]};
  blockDim_ = {block[0], block[1], block[2]};
  const int n = block[0] * block[1] * block[2];
  const size_t body = (shared_bytes + 1023) / 1024 * 1024, guard = 64 << 10;
  shared_map_size = body + 2 * guard;
  shared_map = static_cast<uint8_t*>(mmap(nullptr, shared_map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  shared = shared_map + guard;
  shared_size = shared_bytes;
  auto* stacks = static_cast<char*>(mmap(nullptr, kStack * n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  stack_t alternative = {}, old_stack = {};
  alternative.ss_sp = signal_stack;
  alternative.ss_size = sizeof signal_stack;
  sigaltstack(&alternative, &old_stack);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGALRM, &action, &old_alarm);
  itimerval timer = {{0, 0}, {seconds, 0}}, off = {};
  setitimer(ITIMER_REAL, &timer, nullptr);
  error.clear();
  owner = pthread_self();
  if (!_setjmp(bail)) {
    const unsigned total = grid[0] * grid[1] * grid[2];
    for (unsigned step = 0; step < total; ++step) {
      const unsigned at = late ? step : total - 1 - step;
      blockIdx_ = {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
      memset(shared, 0xFF, body);
      bytes.assign(shared_bytes, Byte{});
      readers.assign(shared_bytes * ((n + 31) / 32), 0);
      barriers.clear();
      meetings.clear();
      block_barriers.clear();
      now = 1;
      engine_clock = 0;
      threads.clear();
      threads.resize(n);
      entry = [slots] { dsv41_entry(shared, slots); };
      for (int t = 0; t < n; ++t) {
        Thread& thread = threads[t];
        thread.started = thread.finished = false;
        thread.fence_time = 0;
        thread.clocks.assign(n + 1, 0);
        thread.clocks[t] = 1;
        const unsigned u = t;
        thread.index = {u % block[0], u / block[0] % block[1], u / block[0] / block[1]};
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stacks + kStack * t;
        thread.context.uc_stack.ss_size = kStack;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, fiber, 0);
      }
      running = true;
      run_block();
      running = false;
    }
  }
  running = false;
  setitimer(ITIMER_REAL, &off, nullptr);
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGALRM, &old_alarm, nullptr);
  sigaltstack(&old_stack, nullptr);
  munmap(shared_map, shared_map_size);
  munmap(stacks, kStack * n);
  return error.empty() ? nullptr : error.c_str();
}
