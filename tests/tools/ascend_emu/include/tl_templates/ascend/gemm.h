// In place of TileLang's header of this name: cube cores, as loops.
//
// Layouts are those that TileLang's src/ascend/layout states. L1: 32 bytes of a row, row after row, then the next 32
// bytes of all rows. Scales in L1: [rows / 16][pairs][16][2]. L0C: [columns / 16][rows][16].
#pragma once
#include "simt_api/asc_fp8.h"

using asc_dual_dst_mode = int;
using asc_unit_flag_mode = int;
using asc_quant_mode = int;
using asc_relu_pre_mode = int;

namespace emu {
inline int pitch, adding;  // rows (of scales: pairs) of the tile that a copy to L1 writes; whether stores add

inline float value(const bfloat16_t& v) { return v; }
inline float value(const float8_e4m3_t& v) { return from_fp8(v.data, false); }
inline float scale_value(uint8_t code) { return code == 255 ? NAN : std::ldexp(1.0f, code - 127); }

template <int Rows, int K, class T>
void from_l1(float* out, const T* tile, const uint8_t* scale, int pairs) {
  constexpr int kC0 = 32 / sizeof(T);
  for (int i = 0; i < Rows; ++i)
    for (int k = 0; k < K; ++k) {
      const float s = scale ? scale_value(peek(scale + ((i / 16 * pairs + k / 64) * 16 + i % 16) * 2 + k / 32 % 2)) : 1.0f;
      out[i * K + k] = value(tile[(k / kC0 * Rows + i) * kC0 + k % kC0]) * s;
    }
}

template <int M, int K, int N, class T>
void product(float* cc, const void* a, const void* b, const uint8_t* a_scale, const uint8_t* b_scale, int pairs, bool clear) {
  static float left[M * K], right[N * K], total[M * N];
  {
    const Pipe on(PIPE_MTE1);
    from_l1<M, K>(left, static_cast<const T*>(a), a_scale, pairs);
    from_l1<N, K>(right, static_cast<const T*>(b), b_scale, pairs);
  }
  asc_sync_notify(PIPE_MTE1, PIPE_M, -1);
  asc_sync_wait(PIPE_MTE1, PIPE_M, -1);
  const Pipe on(PIPE_M);
  for (int i = 0; i < M * N; ++i) total[i] = clear ? 0.0f : cc[(i % N / 16 * M + i / N) * 16 + i % N % 16];
  multiply(total, left, right, M, N, K);
  for (int i = 0; i < M * N; ++i) cc[(i % N / 16 * M + i / N) * 16 + i % N % 16] = total[i];
}

template <class T>
void from_l0c(T* to, const float* cc, int columns, int rows, int64_t stride, int source_rows) {
  const Pipe on(PIPE_FIX);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) {
      const float v = cc[(j / 16 * source_rows + i) * 16 + j % 16];
      to[i * stride + j] = static_cast<T>(adding ? static_cast<float>(to[i * stride + j]) + v : v);
    }
}
}  // namespace emu

template <int M, int K, int N, int, bool, class T>
void ascend_gemm_l1(float* cc, const void* a, const void* b, int clear, int, int) {
  emu::product<M, K, N, T>(cc, a, b, nullptr, nullptr, 0, clear);
}
template <int M, int K, int N, int, bool, int Pairs, class T, class, class>
void ascend_blockscaled_gemm_l1(float* cc, const void* a, const void* b, const uint8_t* a_scale, const uint8_t* b_scale, int clear, int, int, int) {
  emu::product<M, K, N, T>(cc, a, b, a_scale, b_scale, Pairs, clear);
}

struct asc_fill_l1_blocks {
  uint64_t repeat, blk_num, dst_gap;  // pieces, their blocks of 32 bytes, blocks between them
};
inline void asc_fill_l1(uint16_t* to, uint32_t value, asc_fill_l1_blocks p) {
  const emu::Pipe on(PIPE_MTE2);
  for (uint64_t r = 0; r < p.repeat; ++r)
    for (uint64_t i = 0; i < 16 * p.blk_num; ++i) to[16 * r * (p.blk_num + p.dst_gap) + i] = value;
}
inline void asc_set_gm2l1_nz_para(int, int, uint16_t pitch, int) { emu::pitch = pitch; }
template <class T>
void asc_copy_gm2l1_nd2nz(T* to, const T* from, int64_t stride_bytes, asc_load_l2_cache_mode, int rows, int columns, int, int) {
  constexpr int kC0 = 32 / sizeof(T);
  const emu::Pipe on(PIPE_MTE2);
  for (int i = 0; i < rows; ++i) {
    const T* row = reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(from) + i * stride_bytes);
    for (int j = 0; j < columns; ++j) to[(j / kC0 * emu::pitch + i) * kC0 + j % kC0] = row[j];
  }
}
inline void asc_copy_gm2l1_dn2nz(uint16_t* to, const uint16_t* from, int64_t stride_bytes, asc_load_l2_cache_mode, int pairs, int rows, int, int) {
  const emu::Pipe on(PIPE_MTE2);
  for (int i = 0; i < rows; ++i) {
    const uint8_t* row = reinterpret_cast<const uint8_t*>(from) + i * stride_bytes;
    for (int j = 0; j < 2 * pairs; ++j) reinterpret_cast<uint8_t*>(to)[((i / 16 * emu::pitch + j / 2) * 16 + i % 16) * 2 + j % 2] = row[j];
  }
}
inline void asc_copy_ub2l1(void* to, const void* from, int bursts, int blocks, int from_gap, int to_gap) {
  emu::copy(PIPE_MTE3, static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), bursts, 32 * blocks, 32 * (blocks + to_gap), 32 * (blocks + from_gap));
}
inline void asc_set_l0c_copy_nz_para(int, int, int) {}
inline void asc_set_atomic_add_float() { emu::adding = 1; }
inline void asc_set_atomic_none() { emu::adding = 0; }
template <class T, class... Modes>
void asc_copy_l0c2gm(T* to, const float* cc, int columns, int rows, int64_t stride, int source_rows, Modes...) {
  emu::from_l0c(to, cc, columns, rows, stride, source_rows);
}
template <class... Modes>
void asc_copy_l0c2ub(float* to, const float* cc, int columns, int rows, int64_t stride, int source_rows, Modes...) {
  emu::from_l0c(to, cc, columns, rows, stride, source_rows);
}
