// Runs one block of CUDA threads, or those of a cluster, as fibers on one CPU thread and watches their shared memory.
//
// A fiber runs until it blocks; the order of a schedule is fixed, so every run is the same. Asynchronous work is as late as
// the program allows: copies land when a thread waits for their barrier and (in the late schedule) nothing else
// can run; accumulators of wgmma are NaN until the wait. Each byte of shared memory knows whether it was ever
// written, whether a copy is in flight to it, its last writer and its last reader of every warp; vector clocks
// of the threads say whether two accesses are ordered by barriers, so a missing barrier is found in any schedule.
#include "state.h"
#include "wgmma.h"

namespace emu {
namespace {
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
void engine_arrives(Barrier& b) {
  if (b.arriving.size() <= static_cast<size_t>(engine())) b.arriving.resize(engine() + 1);
  b.arriving[engine()] = std::max(b.arriving[engine()], engine_clock);
}
bool deliver(Barrier& b) {  // the next asynchronous arrival
  if (b.queue.empty()) return false;
  Arrival a = b.queue.front();
  b.queue.erase(b.queue.begin());
  if (a.copy) {
    land(a.copy);
    b.bytes -= a.copy->bytes;
    engine_arrives(b);
  } else {
    for (const CopyPtr& c : a.group) land(c);
    if (a.work) a.work();
    if (a.work) engine_arrives(b);
    join(b.arriving, a.clocks);
    --b.pending;
  }
  settle(b);
  moved = true;
  return true;
}

}  // namespace
}  // namespace emu
#include "tensor.h"
namespace emu {
namespace {
// Runs each of these threads until it blocks. Whether one could run.
bool run_threads(const int* first, const int* last) {
  bool progress = false;
  for (const int* t = first; t != last; ++t) {
    Thread& thread = threads[*t];
    if (thread.finished) continue;
    current = *t;
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
  return progress;
}
// Threads in the order of the schedule. Where warps go one by one, the first of every four is before all second ones.
std::vector<int> thread_order() {
  const int n = static_cast<int>(threads.size());
  std::vector<int> order(n);
  for (int i = 0; i < n; ++i) order[i] = late ? i : n - 1 - i;
  if (!by_warp) return order;
  std::stable_sort(order.begin(), order.end(), [](int a, int b) {
    const auto rank = [](int t) { return std::pair(warp_of(t) % 4, warp_of(t)); };
    return by_warp > 0 ? rank(a) < rank(b) : rank(b) < rank(a);
  });
  return order;
}

void run_blocks() {
  const int n = static_cast<int>(threads.size()), count = static_cast<int>(blocks.size());
  const std::vector<int> order = thread_order();
  for (;;) {
    moved = false;
    ++turn;
    bool progress = false, alive = false;
    for (int i = 0; i < count; ++i) {
      activate(late ? i : count - 1 - i);
      if (!by_warp) progress |= run_threads(order.data(), order.data() + n);
      for (int at = 0; by_warp && at < n; at += 32)  // each warp as far as it can go
        while (run_threads(order.data() + at, order.data() + std::min(at + 32, n))) progress = true;
      alive |= std::any_of(threads.begin(), threads.end(), [](const Thread& t) { return !t.finished; });
    }
    current = -1;
    if (!alive) break;
    if (progress || moved) continue;
    bool delivered = false;  // nobody can run: now the asynchronous work completes, one step
    for (int i = 0; i < count; ++i) {
      activate(i);
      for (auto& [address, b] : barriers) {
        bool awaited = false;
        for (auto& t : threads) awaited |= !t.finished && t.awaits == address;
        if (awaited && deliver(b)) delivered = true;
      }
    }
    if (delivered) continue;
    for (int i = 0; i < count; ++i) {  // of the first block that has not ended
      activate(i);
      if (!std::all_of(threads.begin(), threads.end(), [](const Thread& t) { return t.finished; })) break;
    }
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
  for (int i = 0; i < count; ++i) {
    activate(i);
    for (size_t i = 0; i < shared_size; ++i)
      if (bytes[i].state == kInFlight) stop("the block ended while a copy to shared memory byte " + std::to_string(i) + " was in flight");
    if (tensor_columns) stop("the block ended with tensor memory");
    for (auto& t : threads)
      for (auto& group : t.stores)
        for (auto& c : group)
          if (!c->done) stop("the block ended before bulk_store_wait");
  }
}

void fiber() {
  entry();
  Thread& t = me();
  if (!t.accumulators.empty()) fail("the thread ended before wgmma_wait");
  if (!t.tensor_stores.empty()) fail("the thread ended before tensor_wait_stores");
  if (!t.tensor_products.empty()) fail("the thread ended with products that no barrier counts");
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

void wait_for_count(const int* p, int count) {
  block("a count of " + std::to_string(count) + " in global memory", [p, count] { return *p >= count; });
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
    b.turn = turn;
    return true;
  };
  if (!blocking) {
    complete();
    return;
  }
  // Warps that go one by one go on in the next turn: who comes last does not run ahead of the others.
  block(std::string(what) + " " + std::to_string(id), [&b, complete] { return complete() && !(by_warp && b.turn == turn); });
  join(me().clocks, b.completed);
}
int sync_count(int predicate, int* all) {
  BlockBarrier& b = block_barriers[0];
  b.sum += predicate != 0;
  sync_block("__syncthreads", 0, 0, true);
  *all = b.seen;
  return b.total;
}

bool sync_any(const char* what, int id, int count, bool mine) {
  BlockBarrier& b = block_barriers[id];
  b.sum += mine;
  sync_block(what, id, count, true);
  return b.total != 0;
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

// ---- clusters --------------------------------------------------------------------------------------------
constexpr uint32_t kBlock = 1 << 24;  // from block to block in the window of the cluster

void cluster_barrier() {
  ++cluster_arrived;
  release(blocks[active].arriving);
  const uint64_t generation = cluster_generation;
  block("the barrier of the cluster", [generation] {
    if (cluster_generation != generation) return true;
    const int before = active;
    size_t needed = 0;  // threads that have ended do not count
    for (size_t i = 0; i < blocks.size(); ++i) {
      activate(static_cast<int>(i));
      for (auto& t : threads) needed += !t.finished;
    }
    const bool complete = cluster_arrived == needed;
    for (size_t i = 0; complete && i < blocks.size(); ++i) {
      activate(static_cast<int>(i));
      Block& b = blocks[i];
      for (const Store& s : b.stores) {
        memcpy(shared + s.offset, s.data, 16);
        mark_written(s.offset, 16, engine(), ++engine_clock, false);
      }
      b.stores.clear();
      b.completed = b.arriving;
      b.completed.resize(engine() + 1);
      b.completed[engine()] = engine_clock;
    }
    activate(before);
    if (complete) cluster_arrived = 0, ++cluster_generation;
    return complete;
  });
  join(me().clocks, blocks[active].completed);
}
uint32_t cluster_address(const void* p, uint32_t rank) {
  if (rank >= blocks.size()) fail("cluster_address: block %u of %zu", rank, blocks.size());
  return shared_offset(p, 0, "cluster_address") + rank * kBlock;
}
void cluster_store(uint32_t to, const void* data) {
  const uint32_t rank = to / kBlock, offset = to % kBlock;
  if (offset % 16 || offset + 16 > shared_size) fail("cluster_store: shared memory + %u, 16 bytes", offset);
  // What that block did with these bytes must lie before the last barrier of the cluster.
  Block& there = blocks[rank];
  const int before = active, thread = current;
  const auto seen = [&there](int by, uint32_t clock) { return static_cast<size_t>(by) < there.completed.size() && there.completed[by] >= clock; };
  activate(static_cast<int>(rank));
  std::string problem;
  for (uint32_t i = offset; i < offset + 16; ++i) {
    const Byte& b = bytes[i];
    if (b.state == kInFlight) problem = "written while a copy to it is in flight";
    if (b.state == kWritten && b.writer != kAtomic && !seen(b.writer, b.clock)) problem = "written by another block after a write by " + who(b.writer);
    for (size_t w = 0; w * 32 < threads.size(); ++w) {
      const uint32_t r = readers[w * shared_size + i];
      const int reader = static_cast<int>(w * 32 + (r & 31));
      if (r && !seen(reader, r >> 5)) problem = "written by another block after a read by " + who(reader);
    }
  }
  for (uint32_t i = offset; i < offset + 16; ++i) bytes[i].state = kInFlight;
  memset(shared + offset, 0xFF, 16);
  there.stores.push_back({offset, {}});
  memcpy(there.stores.back().data, data, 16);
  activate(before);
  current = thread;
  if (!problem.empty()) fail("shared memory byte %u of block %u of the cluster: %s without a barrier between", offset, rank, problem.c_str());
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
  for (auto& c : a.group)
    if (!c->clock) c->clock = me().clocks[current];  // the first arrival behind a copy publishes it
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
                               const size_t* begin, const size_t* size, int schedule, int uninitialised,
                               int seconds, unsigned cluster) {
  using namespace emu;
  late = schedule == 1;
  by_warp = schedule < 2 ? 0 : schedule == 2 ? 1 : -1;
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
  auto* maps = static_cast<uint8_t*>(mmap(nullptr, cluster * shared_map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  shared_size = shared_bytes;
  auto* stacks = static_cast<char*>(mmap(nullptr, kStack * n * cluster, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
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
    for (unsigned step = 0; step < total; step += cluster) {
      blocks.clear();
      blocks.resize(cluster);
      active = 0;
      cluster_arrived = 0;
      for (unsigned rank = 0; rank < cluster; ++rank) {
        activate(rank);
        const unsigned at = (late ? step : total - cluster - step) + rank;
        blockIdx_ = {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
        shared_map = maps + rank * shared_map_size;
        shared = shared_map + guard;
        memset(shared, 0xFF, body);
        bytes.assign(shared_bytes, Byte{});
        readers.assign(shared_bytes * ((n + 31) / 32), 0);
        barriers.clear();
        meetings.clear();
        block_barriers.clear();
        tensor_columns = 0;
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
          thread.context.uc_stack.ss_sp = stacks + kStack * (rank * n + t);
          thread.context.uc_stack.ss_size = kStack;
          thread.context.uc_link = nullptr;
          makecontext(&thread.context, fiber, 0);
        }
      }
      running = true;
      run_blocks();
      running = false;
    }
  }
  running = false;
  setitimer(ITIMER_REAL, &off, nullptr);
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGALRM, &old_alarm, nullptr);
  sigaltstack(&old_stack, nullptr);
  munmap(maps, cluster * shared_map_size);
  munmap(stacks, kStack * n * cluster);
  return error.empty() ? nullptr : error.c_str();
}
