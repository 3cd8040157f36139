// The SIMT interface of Ascend C on a host: threads are fibers of runtime.cpp.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>

#include "emu_types.h"
#include "runtime.h"

#define __global__
#define __vector__
#define __cube__
#define __mix__(cubes, vectors)
#define __cbuf__
#define __cc__
#define __gm__
#define __ubuf__
#define __simt_vf__
#define __simt_callee__
#define __SIMT_DEVICE_FUNCTIONS_DECL__
#define __launch_bounds__(n)

using bfloat16_t = __nv_bfloat16;
using bfloat16x2_t = __nv_bfloat162;
namespace cce {
using dim3 = ::dim3;
}

// A NaN makes either operand the result, depending on the order: kernels must not rely on it.
template <class T>
inline T max(T a, T b) { return a < b ? b : a; }
template <class T>
inline T min(T a, T b) { return b < a ? b : a; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

#define FLOAT2(op)                                                                                    \
  inline float2 operator op(float2 a, float2 b) { return {a.x op b.x, a.y op b.y}; }                  \
  inline float4 operator op(float4 a, float4 b) { return {a.x op b.x, a.y op b.y, a.z op b.z, a.w op b.w}; }
FLOAT2(+) FLOAT2(-) FLOAT2(*) FLOAT2(/)
#undef FLOAT2

template <class T>
inline T asc_shfl_xor(T v, int offset) {
  uint64_t bits = 0;
  memcpy(&bits, &v, sizeof v);
  bits = emu::exchange(bits, emu::lane() ^ offset);
  memcpy(&v, &bits, sizeof v);
  return v;
}
// Over the 32 lanes in order; the hardware's order of additions is not known.
template <class T, class F>
inline T asc_reduce(T v, F combine) {
  uint64_t bits = 0;
  memcpy(&bits, &v, sizeof v);
  T all{};
  for (unsigned l = 0; l < emu::warp_lanes(); ++l) {
    const uint64_t other = emu::exchange(bits, l);
    T one;
    memcpy(&one, &other, sizeof one);
    all = l ? combine(all, one) : one;
  }
  return all;
}
template <class T>
inline T asc_reduce_add(T v) { return asc_reduce(v, [](T a, T b) { return a + b; }); }
template <class T>
inline T asc_reduce_max(T v) { return asc_reduce(v, [](T a, T b) { return a < b ? b : a; }); }
template <class T>
inline T asc_reduce_min(T v) { return asc_reduce(v, [](T a, T b) { return b < a ? b : a; }); }

// Starts a vector function and waits for it: pipes run in program order here.
template <auto function, class... Args>
inline void asc_vf_call(cce::dim3 threads, Args... args) {
  std::tuple<Args...> packed(args...);
  emu::run_threads({threads.x, threads.y, threads.z},
                   [](void* p) { std::apply([](Args... a) { function(a...); }, *static_cast<std::tuple<Args...>*>(p)); }, &packed);
}
