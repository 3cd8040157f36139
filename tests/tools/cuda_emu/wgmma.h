// Tensor cores: part of runtime.cpp.
#pragma once
#include "state.h"

namespace emu {
namespace {
float decode_e4m3(uint32_t code) {
  const int e = code >> 3 & 15, m = code & 7;
  if (e == 15 && m == 7) return NAN;
  const float f = e ? std::ldexp(8.0f + m, e - 10) : std::ldexp(static_cast<float>(m), -9);
  return code & 128 ? -f : f;
}
float decode_e5m2(uint32_t code) {
  const int e = code >> 2 & 31, m = code & 3;
  if (e == 31) return m ? NAN : code & 128 ? -INFINITY : INFINITY;
  const float f = e ? std::ldexp(4.0f + m, e - 17) : std::ldexp(static_cast<float>(m), -16);
  return code & 128 ? -f : f;
}
float decode_f16(uint32_t code) {
  const int e = code >> 10 & 31, m = code & 1023;
  if (e == 31) return m ? NAN : code & 32768 ? -INFINITY : INFINITY;
  const float f = e ? std::ldexp(1024.0f + m, e - 25) : std::ldexp(static_cast<float>(m), -24);
  return code & 32768 ? -f : f;
}
float decode(uint32_t code, Type type) {
  static const std::vector<float> table = [] {
    std::vector<float> t(512);
    for (int i = 0; i < 256; ++i) t[i] = decode_e4m3(i), t[256 + i] = decode_e5m2(i);
    return t;
  }();
  if (type == kF16) return decode_f16(code);
  if (type != kBf16) return table[code + (type == kE5M2 ? 256 : 0)];
  const uint32_t bits = code << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// The tensor cores read 16 bytes of shared memory.
void check_operand(uint32_t offset, std::vector<Operand>& operands) {
  for (uint32_t b = offset; b < std::min<size_t>(offset + 16, shared_size); ++b) {
    const Byte& byte = bytes[b];
    if (byte.state == kWritten && byte.generic && byte.writer != kAtomic && threads[byte.writer].fence_time <= byte.time && me().fence_time <= byte.time)
      fail("the tensor cores read shared memory byte %u, stored by %s, without fence_async", b, who(byte.writer).c_str());
  }
  check_readable(offset, 16);
  operands.push_back({offset, 16});
}

// Reads an operand [rows, 32 bytes of k] through its descriptor, as floats [rows][k].
void read_operand(uint64_t d, int first, int rows, Type type, bool transposed, float* out, int row_step, int k_step,
                  Product& record) {
  if (d >> 62 != 1) fail("wgmma: descriptor %#lx is not of the 128-byte swizzle", static_cast<unsigned long>(d));
  if (d >> 49 & 7) fail("wgmma: base offset %d; tiles must be aligned to 1,024 bytes", static_cast<int>(d >> 49 & 7));
  const uint32_t start = (d & 0x3FFF) << 4, leading = (d >> 16 & 0x3FFF) << 4, stride = (d >> 32 & 0x3FFF) << 4;
  const bool fp8 = type != kBf16 && type != kF16;
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
        check_operand(piece * 16, record.operands);
      }
      uint32_t code = shared[offset];
      if (!fp8) code |= shared[offset + 1] << 8;
      out[i * row_step + j * k_step] = decode(code, type);
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

void wgmma_fence() { me().wgmma_fenced = true; }
void wgmma_commit() {
  Thread& t = me();
  ++t.wgmma_group;
  t.wgmma_fenced = t.wgmma_open = false;
}
void wgmma_wait(int pending) {
  Thread& t = me();
  if (t.wgmma_open) fail("wgmma_wait before wgmma_commit");
  meet(~0u, "wgmma_wait", 0);  // of a whole warp: what lanes did before is done
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

void wgmma(float* d, int count, const uint32_t* a_regs, uint64_t a, uint64_t b, int accumulate, Type a_type,
           Type b_type, bool a_transposed, bool b_transposed) {
  Thread& t = me();
  const bool fp8 = a_type != kBf16 && a_type != kF16;
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
            A[row * k + column] = decode(bits & (fp8 ? 0xFF : 0xFFFF), a_type);
          }
    } else {
      read_operand(a, 16 * warp, 16, a_type, a_transposed, A, k, 1, product);
    }
    read_operand(b, 0, n, b_type, b_transposed, B, 1, n, product);
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
