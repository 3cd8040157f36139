// The functions of hopper.cuh that are instructions of the GPU, by the runtime of the emulator.
#pragma once
#include "emu.h"

namespace hopper {

inline uint32_t smem_address(const void* p) { return emu::shared_address(p); }
inline void barrier_init(uint64_t* bar, uint32_t arrivals) { emu::barrier_init(bar, arrivals); }
inline void fence_barrier_init() { emu::fence_barrier_init(); }
inline void barrier_arrive(uint64_t* bar) { emu::barrier_arrive(bar, 1, 0); }
inline void barrier_expect(uint64_t* bar, uint32_t bytes) { emu::barrier_arrive(bar, 1, bytes); }
inline void barrier_wait(uint64_t* bar, uint32_t parity) { emu::barrier_wait(bar, parity); }
inline void barrier_arrive_copies(uint64_t* bar) { emu::barrier_arrive_copies(bar); }
inline void named_barrier(int id, int threads) { emu::sync_block("named_barrier", id, threads, true); }
inline bool named_barrier_any(int id, int threads, bool mine) { return emu::sync_any("named_barrier_any", id, threads, mine); }
inline void named_barrier_arrive(int id, int threads) { emu::sync_block("named_barrier_arrive", id, threads, false); }

inline void bulk_copy(void* dst, const void* src, uint32_t bytes, uint64_t* bar) { emu::bulk_copy(dst, src, bytes, bar); }
// The map of an emulation is a tensor of bytes (see tensor_map): rows, bytes a row, rows of a box as 64-bit numbers,
// zeros, and from byte 1,024 on the data.
inline void tile_copy(void* dst, const void* map, int column, int row, uint64_t* bar) {
  const long long* header = static_cast<const long long*>(map);
  for (int r = 0; r < header[2]; ++r)
    for (int piece = 0; piece < 8; ++piece) {
      const uint8_t* data = static_cast<const uint8_t*>(map) + 512;
      if (row + r < header[0]) data += 512 + (row + r) * header[1] + column + 16 * piece;
      emu::bulk_copy(static_cast<uint8_t*>(dst) + r * 128 + ((piece ^ (r & 7)) << 4), data, 16, bar);
    }
}
inline void tile_store(const void* map, const void* src, int column, int row) {
  const long long* header = static_cast<const long long*>(map);
  uint8_t* data = const_cast<uint8_t*>(static_cast<const uint8_t*>(map)) + 1024 + row * header[1] + column;
  for (int r = 0; r < header[2] && row + r < header[0]; ++r)
    for (int piece = 0; piece < 8 && column + 16 * piece < header[1]; ++piece)
      emu::bulk_store(data + r * header[1] + 16 * piece, static_cast<const uint8_t*>(src) + r * 128 + ((piece ^ (r & 7)) << 4), 16);
}
inline void bulk_store_commit() { emu::bulk_store_commit(); }
template <int PENDING>
inline void bulk_store_wait_read() { emu::bulk_store_wait(PENDING, true); }
inline void copy_16(void* dst, const void* src, bool valid) { emu::copy_async(dst, src, 16, valid); }
inline void copy_16_ahead(void* dst, const void* src) { emu::copy_async(dst, src, 16, true); }
inline void copy_4(void* dst, const void* src) { emu::copy_async(dst, src, 4, true); }
inline void copy_commit() { emu::copy_commit(); }
template <int PENDING>
inline void copy_wait() { emu::copy_wait(PENDING); }
inline void fence_async() { emu::fence_async(); }

template <int COUNT>
inline void registers_grow() { static_assert(COUNT % 8 == 0 && COUNT <= 256); }
template <int COUNT>
inline void registers_shrink() { static_assert(COUNT % 8 == 0 && COUNT >= 24); }

inline void wgmma_fence() { emu::wgmma_fence(); }
inline void wgmma_commit() { emu::wgmma_commit(); }
template <int PENDING>
inline void wgmma_wait() { emu::wgmma_wait(PENDING); }
template <int N>
inline void keep(float (&)[N]) {}

inline void wait_for_launch() {}
inline void let_next_launch() {}

inline void cluster_barrier() { emu::cluster_barrier(); }
inline uint32_t cluster_address(const void* p, uint32_t rank) { return emu::cluster_address(p, rank); }
inline void cluster_store(uint32_t to, float4 v) { emu::cluster_store(to, &v); }

inline bool elect() { return emu::lane() == 0; }
// Lane l holds row l / 4, columns 2 * (l % 4) + {0, 1} of the matrix and of its transpose.
inline uint32_t transpose_8x8(uint32_t v) {
  const int row = emu::lane() / 4, column = 2 * (emu::lane() % 4);
  const emu::Meeting& m = emu::meet(~0u, "transpose_8x8", v);
  uint32_t out = 0;
  for (int i = 0; i < 2; ++i) out |= (m.value[(column + i) * 4 + row / 2] >> 16 * (row & 1) & 0xFFFF) << 16 * i;
  return out;
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    const uint32_t* a;
    uint32_t b[2];
  } own{a, {b0, b1}};
  const emu::Meeting& m = emu::meet(~0u, "mma_bf16", reinterpret_cast<uint64_t>(&own));
  const auto of = [&](int lane) { return reinterpret_cast<const Operands*>(m.value[lane]); };
  for (int i = 0; i < 4; ++i) {
    const int row = emu::lane() / 4 + 8 * (i / 2), column = 2 * (emu::lane() % 4) + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const uint32_t x = of(row % 8 * 4 + k % 8 / 2)->a[row / 8 + 2 * (k / 8)], y = of(column * 4 + k % 8 / 2)->b[k / 8];
      sum += static_cast<double>(__uint_as_float((x >> 16 * (k % 2)) << 16)) * __uint_as_float((y >> 16 * (k % 2)) << 16);
    }
    d[i] += static_cast<float>(sum);
  }
  emu::meet(~0u, "mma_bf16 done", 0);  // the operands live on the lanes' stacks
}

inline bool count_reached(const int* p, int count) { return *p >= count; }
inline void wait_for_count(const int* p, int count) { emu::wait_for_count(p, count); }

inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
inline float exp2_quick(float x) { return flushed(exp2f(x)); }
inline float reciprocal_quick(float x) { return flushed(1.0f / flushed(x)); }
inline float min_or_nan(float a, float b) { return a != a ? a : b < a || b != b ? b : a; }
inline float max_or_nan(float a, float b) { return a != a ? a : b > a || b != b ? b : a; }
inline uint32_t byte_select(uint32_t low, uint32_t high, uint32_t selector) { return __byte_perm(low, high, selector); }

#define RS(name, a_type, b_type, transposed)                                                                  \
  template <int N>                                                                                            \
  inline void wgmma_##name(float (&d)[N], const uint32_t (&a)[4], uint64_t b, int accumulate) {               \
    emu::wgmma(d, N, a, 0, b, accumulate, emu::a_type, emu::b_type, false, transposed);                       \
  }
#define SS(name, type, transposed)                                                                            \
  template <int N>                                                                                            \
  inline void wgmma_##name(float (&d)[N], uint64_t a, uint64_t b, int accumulate) {                           \
    emu::wgmma(d, N, nullptr, a, b, accumulate, emu::type, emu::type, false, transposed);                     \
  }
RS(bf16_rs, kBf16, kBf16, false)
RS(f16_rs, kF16, kF16, false)
RS(bf16_rs_t, kBf16, kBf16, true)
RS(e4m3_rs, kE4M3, kE4M3, false)
RS(e5m2_rs, kE5M2, kE5M2, false)
RS(e5m2e4m3_rs, kE5M2, kE4M3, false)
SS(bf16_ss, kBf16, false)
SS(bf16_ss_t, kBf16, true)
SS(e4m3_ss, kE4M3, false)
#undef RS
#undef SS

}  // namespace hopper
