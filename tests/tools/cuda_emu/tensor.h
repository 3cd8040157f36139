// Tensor memory and the products of SM100: part of runtime.cpp.
//
// A product is computed when it is asked for; nobody may read its sums, and nobody may change what it reads, until the
// barrier that it is committed to counts it. Whether one thread sees what another did in tensor memory: a barrier
// between them, fence_before on its near side, fence_after on its far side.
#pragma once
#include "wgmma.h"

namespace emu {
namespace {
constexpr int kLanes = 128, kColumns = 512;
struct Touch {  // who touched a cell, and since when that may be seen (0: not fenced yet)
  int by = -1;
  uint32_t clock = 0, fenced = 0;
};
struct Cell {
  uint32_t value = 0, time = 0;
  State state = kUnwritten;
  Touch writer, reader;
};
std::vector<Cell> tensor;  // [lane][column]
uint32_t tensor_first, tensor_columns;

Cell& cell(uint32_t lane, uint32_t column, const char* what) {
  if (column < tensor_first || column >= tensor_first + tensor_columns || lane >= kLanes)
    fail("%s: lane %u, column %u of tensor memory; the block has columns %u to %u", what, lane, column, tensor_first, tensor_first + tensor_columns);
  return tensor[lane * kColumns + column];
}
void check_touch(const Touch& t, const char* what, const char* kind, uint32_t lane, uint32_t column) {
  if (t.by < 0 || t.by == current) return;
  const std::string other = t.by == engine() ? "the tensor cores" : who(t.by);
  if (!ordered(current, t.by, t.clock)) fail("%s: tensor memory lane %u, column %u, %s %s without a barrier between", what, lane, column, kind, other.c_str());
  if (!t.fenced) fail("%s: tensor memory lane %u, column %u, %s %s without fence_before", what, lane, column, kind, other.c_str());
  if (me().tensor_after <= t.fenced) fail("%s: tensor memory lane %u, column %u, %s %s without fence_after", what, lane, column, kind, other.c_str());
}
uint32_t read_cell(uint32_t lane, uint32_t column, const char* what) {
  Cell& c = cell(lane, column, what);
  if (c.state != kWritten) fail("%s: tensor memory lane %u, column %u: %s", what, lane, column, c.state == kUnwritten ? "never written" : "not there yet (missing wait)");
  check_touch(c.writer, what, "written by", lane, column);
  return c.value;
}
void check_overwrite(const Cell& c, const char* what, uint32_t lane, uint32_t column) {
  check_touch(c.writer, what, "written by", lane, column);
  check_touch(c.reader, what, "read by", lane, column);
}
uint32_t same_in_warp(const char* what, uint64_t value) {  // the lane of the warp's first thread
  const Meeting& m = meet(~0u, what, value);
  for (int l = 0; l < 32; ++l)
    if (m.value[l] != value) fail("%s: lane %d of the warp has another operand", what, l);
  return 32 * (warp_of(current) % 4);
}

float power_of(uint32_t code) { return code == 255 ? NAN : std::ldexp(1.0f, static_cast<int>(code) - 127); }
// An operand [rows, 64] of E2M1 as doubles, and the scales of its rows.
void read_packed(uint64_t d, int rows, uint32_t scales, int id, const char* name, std::vector<double>& out, TensorProduct& record) {
  if ((d >> 46 & 7) != 1 || d >> 61 != 0 || d >> 49 & 0xFFF) fail("multiply_mxfp4: descriptor %#lx of %s is not of cores without a swizzle", static_cast<unsigned long>(d), name);
  static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const uint32_t start = (d & 0x3FFF) << 4, along = (d >> 16 & 0x3FFF) << 4, down = (d >> 32 & 0x3FFF) << 4;
  out.assign(rows * 64, 0.0);
  for (int r = 0; r < rows; ++r) {
    const uint32_t column = (scales & 0xFFFF) + r / 32;
    const uint32_t word = read_cell(r % 32, column, "multiply_mxfp4");
    for (int q = 0; q < 4; ++q) {
      if (read_cell(32 * q + r % 32, column, "multiply_mxfp4") != word) fail("multiply_mxfp4: the scale of row %d of %s differs in the lanes of warp %d", r, name, q);
      record.scales.push_back((32 * q + r % 32) * kColumns + column);
    }
    for (int piece = 0; piece < 2; ++piece) {
      const uint32_t at = start + r / 8 * down + r % 8 * 16 + piece * along - kWindow;
      if (at + 16 > shared_size) fail("multiply_mxfp4: byte %d of %s is outside shared memory of %zu bytes", static_cast<int>(at), name, shared_size);
      check_operand(at, record.operands);
      const float scale = power_of(word >> 8 * (id + piece) & 255);
      for (int k = 0; k < 32; ++k) {
        const uint32_t code = shared[at + k / 2] >> 4 * (k % 2) & 15;
        out[r * 64 + piece * 32 + k] = static_cast<double>(code & 8 ? -values[code & 7] : values[code & 7]) * scale;
      }
    }
  }
}
}  // namespace

void tensor_allocate(uint32_t* to, int columns) {
  same_in_warp("tensor_allocate", columns);
  if (lane() == 0) {
    if (blocks.size() > 1) fail("tensor_allocate: not emulated in clusters");
    if (columns < 32 || columns > kColumns || columns & (columns - 1)) fail("tensor_allocate: %d columns", columns);
    if (tensor_columns) fail("tensor_allocate: the block has columns already");
    tensor_columns = columns, tensor_first = kColumns - columns;
    tensor.assign(kLanes * kColumns, Cell{});
    access(to, 4, true);
    *to = tensor_first;
  }
  meet(~0u, "tensor_allocate done", 0);
}
void tensor_free(uint32_t address, int columns) {
  same_in_warp("tensor_free", static_cast<uint64_t>(address) << 32 | columns);
  if (lane() == 0) {
    if (address != tensor_first || static_cast<uint32_t>(columns) != tensor_columns) fail("tensor_free: %d columns from %u on, the block has %u from %u on", columns, address, tensor_columns, tensor_first);
    for (int i = 0; i < kLanes * kColumns; ++i) {
      const Cell& c = tensor[i];
      if (c.state == kInFlight) fail("tensor_free: lane %d, column %d is still written", i / kColumns, i % kColumns);
      if (c.reader.by >= 0 && !ordered(current, c.reader.by, c.reader.clock)) fail("tensor_free: lane %d, column %d may still be read by %s", i / kColumns, i % kColumns, who(c.reader.by).c_str());
    }
    tensor_columns = 0;
  }
  meet(~0u, "tensor_free done", 0);
}
void tensor_store(uint32_t address, const uint32_t* v, int count) {
  const uint32_t first = same_in_warp("tensor_store", address);
  if (address >> 16 != first) fail("tensor_store: to lane %u, a warp has the 32 lanes from %u on", address >> 16, first);
  for (int i = 0; i < count; ++i) {
    const uint32_t l = first + lane(), column = (address & 0xFFFF) + i;
    Cell& c = cell(l, column, "tensor_store");
    if (c.state == kInFlight) fail("tensor_store: lane %u, column %u is being written", l, column);
    check_overwrite(c, "tensor_store", l, column);
    c.state = kInFlight, c.time = ++now;
    me().tensor_stores.push_back({l * kColumns + column, v[i]});
  }
}
void tensor_wait_stores() {
  meet(~0u, "tensor_wait_stores", 0);
  for (auto& [at, value] : me().tensor_stores) {
    Cell& c = tensor[at];
    c.value = value, c.state = kWritten, c.writer = {current, me().clocks[current], 0}, c.reader = Touch{};
    me().tensor_open.push_back({at, true});
  }
  me().tensor_stores.clear();
}
void tensor_load(float* d, uint32_t address, int count) {
  const uint32_t first = same_in_warp("tensor_load", address);
  if (address >> 16 != first) fail("tensor_load: from lane %u, a warp has the 32 lanes from %u on", address >> 16, first);
  for (int i = 0; i < count; ++i) {
    const uint32_t l = first + lane(), column = (address & 0xFFFF) + i, bits = read_cell(l, column, "tensor_load");
    memcpy(d + i, &bits, 4);
    cell(l, column, "tensor_load").reader = {current, me().clocks[current], 0};
    me().tensor_open.push_back({l * kColumns + column, false});
  }
}
void tensor_fence_before() {
  ++now;
  for (auto& [at, written] : me().tensor_open) {
    Touch& t = written ? tensor[at].writer : tensor[at].reader;
    if (t.by == current) t.fenced = now;
  }
  me().tensor_open.clear();
}
void tensor_fence_after() { me().tensor_after = ++now; }

void multiply_mxfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scale, uint32_t b_scale,
                    int accumulate) {
  const int n = (instruction >> 17 & 0x3F) << 3, m = (instruction >> 24 & 0x1F) << 4;
  const int a_id = instruction >> 29 & 3, b_id = instruction >> 4 & 3;
  const uint32_t rest = instruction & ~(0x3Fu << 17 | 0x1Fu << 24 | 3u << 29 | 3u << 4);
  if (rest != (1u << 7 | 1u << 10 | 1u << 23)) fail("multiply_mxfp4: instruction %#x is not E2M1 times E2M1 with UE8M0 scales", instruction);
  if (m != 128 || n < 8 || n > 256 || a_id % 2 || b_id % 2) fail("multiply_mxfp4: instruction %#x: %d rows, %d columns, scales %d and %d", instruction, m, n, a_id, b_id);
  if (d >> 16 || a_scale >> 16 || b_scale >> 16) fail("multiply_mxfp4: sums and scales begin in lane 0");
  TensorProduct product;
  std::vector<double> left, right;
  read_packed(a, m, a_scale, a_id, "a", left, product);
  read_packed(b, n, b_scale, b_id, "b", right, product);
  product.time = ++now;
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      Cell& c = cell(i, d + j, "multiply_mxfp4");
      const bool chained = c.state == kInFlight && c.writer.by == current;
      if (c.state == kInFlight && !chained) fail("multiply_mxfp4: lane %d, column %u is being written by another", i, d + j);
      if (accumulate && c.state == kUnwritten) fail("multiply_mxfp4: adds to lane %d, column %u, never written", i, d + j);
      if (!chained) check_overwrite(c, "multiply_mxfp4", i, d + j);
      double sum = 0;
      for (int k = 0; k < 64; ++k) sum += left[i * 64 + k] * right[j * 64 + k];
      float before = 0;
      if (accumulate) memcpy(&before, &c.value, 4);
      const float after = before + static_cast<float>(sum);
      memcpy(&c.value, &after, 4);
      c.state = kInFlight, c.writer = {current, me().clocks[current], 0}, c.reader = Touch{};
      product.sums.push_back(i * kColumns + d + j);
    }
  me().tensor_products.push_back(std::move(product));
}
void multiplied(uint64_t* bar) {
  Barrier& b = barrier(bar, "multiplied");
  if (!b.fenced) fail("multiplied: no fence_barrier_init after barrier_init");
  Arrival a;
  a.work = [products = std::move(me().tensor_products)] {
    ++engine_clock, ++now;
    for (const TensorProduct& p : products) {
      for (const Operand& o : p.operands)
        for (uint32_t i = o.offset; i < o.offset + o.bytes; ++i)
          if (bytes[i].time > p.time) fail("shared memory byte %u: changed by %s before the product that reads it was done", i, bytes[i].state == kInFlight ? "a copy" : "a store");
      for (uint32_t at : p.scales) {
        if (tensor[at].time > p.time) fail("tensor memory lane %u, column %u: changed before the product that reads it was done", at / kColumns, at % kColumns);
        tensor[at].reader = {engine(), engine_clock, now};
      }
      for (uint32_t at : p.sums) tensor[at].state = kWritten, tensor[at].writer = {engine(), engine_clock, now}, tensor[at].time = now;
    }
  };
  me().tensor_products.clear();
  b.queue.push_back(a);
}
}  // namespace emu
