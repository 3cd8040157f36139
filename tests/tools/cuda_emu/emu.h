// The part of the CUDA language that kernels of this project use, for one CPU thread. Included before them.
#pragma once
#include <cassert>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

#include "emu_types.h"
#include "runtime.h"

#define __CUDACC__ 1
#define __CUDA_ARCH__ 900
#define __device__
#define __host__
#define __global__
#define __constant__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(n) alignas(n)

namespace emu {
extern Dim threadIdx_, blockIdx_, blockDim_, gridDim_;
// An argument whose pointer type the callee chooses.
struct Pointer {
  void* p;
  template <class T>
  operator T*() const { return static_cast<T*>(p); }
  operator int64_t() const { return reinterpret_cast<int64_t>(p); }
};
template <class T>
inline uint64_t pack(T v) {
  static_assert(sizeof(T) <= 8);
  uint64_t u = 0;
  memcpy(&u, &v, sizeof v);
  return u;
}
template <class T>
inline T unpack(uint64_t u) {
  T v;
  memcpy(&v, &u, sizeof v);
  return v;
}
}  // namespace emu
#define threadIdx emu::threadIdx_
#define blockIdx emu::blockIdx_
#define blockDim emu::blockDim_
#define gridDim emu::gridDim_
constexpr int warpSize = 32;

// ---- synchronisation -------------------------------------------------------------------------------------
inline void __syncthreads() { emu::sync_block("__syncthreads", 0, 0, true); }
inline int __syncthreads_count(int p) { int all; return emu::sync_count(p, &all); }
inline int __syncthreads_or(int p) { int all; return emu::sync_count(p, &all) != 0; }
inline int __syncthreads_and(int p) { int all; return emu::sync_count(p, &all) == all; }
inline void __syncwarp(unsigned mask = ~0u) { emu::meet(mask, "__syncwarp", 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emu::yield_now(); }
[[noreturn]] inline void __trap() { emu::fail("__trap"); }
inline long long clock64() { return 0; }
inline void cudaGridDependencySynchronize() {}

// ---- warps -----------------------------------------------------------------------------------------------
namespace emu {
template <class T>
inline T from_lane(const Meeting& m, const char* what, int source, int own) {
  if (source == own) return unpack<T>(m.value[own]);
  if (!(m.mask >> source & 1)) fail("%s: lane %d reads lane %d, which does not take part", what, own, source);
  return unpack<T>(m.value[source]);
}
}  // namespace emu
template <class T>
inline T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  const int l = emu::lane();
  return emu::from_lane<T>(emu::meet(mask, "__shfl_sync", emu::pack(v)), "__shfl_sync", (l & ~(width - 1)) | (source & (width - 1)), l);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int x, int width = 32) {
  const int l = emu::lane(), s = l ^ x;
  return emu::from_lane<T>(emu::meet(mask, "__shfl_xor_sync", emu::pack(v)), "__shfl_xor_sync", s / width > l / width ? l : s, l);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  const int l = emu::lane(), s = l - static_cast<int>(delta);
  return emu::from_lane<T>(emu::meet(mask, "__shfl_up_sync", emu::pack(v)), "__shfl_up_sync", s < (l & ~(width - 1)) ? l : s, l);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  const int l = emu::lane(), s = l + static_cast<int>(delta);
  return emu::from_lane<T>(emu::meet(mask, "__shfl_down_sync", emu::pack(v)), "__shfl_down_sync", s > (l | (width - 1)) ? l : s, l);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const emu::Meeting& m = emu::meet(mask, "__ballot_sync", predicate != 0);
  unsigned r = 0;
  for (int l = 0; l < 32; ++l)
    if (m.mask >> l & 1 && m.value[l]) r |= 1u << l;
  return r;
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
template <class T>
inline unsigned __match_any_sync(unsigned mask, T v) {
  const emu::Meeting& m = emu::meet(mask, "__match_any_sync", emu::pack(v));
  unsigned r = 0;
  for (int l = 0; l < 32; ++l)
    if (m.mask >> l & 1 && m.value[l] == emu::pack(v)) r |= 1u << l;
  return r;
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T v, int* all) {
  const unsigned same = __match_any_sync(mask, v);
  *all = same == mask;
  return *all ? mask : 0;
}
inline unsigned __activemask() { return ~0u; }
namespace emu {
template <class T, class F>
inline T reduce(unsigned mask, const char* what, T v, F f) {
  const Meeting& m = meet(mask, what, pack(v));
  bool first = true;
  T r{};
  for (int l = 0; l < 32; ++l)
    if (m.mask >> l & 1) {
      const T x = unpack<T>(m.value[l]);
      r = first ? x : f(r, x);
      first = false;
    }
  return r;
}
}  // namespace emu
#define REDUCE(name, expression)                                                                              \
  template <class T>                                                                                          \
  inline T __reduce_##name##_sync(unsigned mask, T v) {                                                       \
    return emu::reduce(mask, "__reduce_" #name "_sync", v, [](T a, T b) -> T { return expression; });         \
  }
REDUCE(add, a + b)
REDUCE(max, a > b ? a : b)
REDUCE(min, a < b ? a : b)
REDUCE(or, a | b)
REDUCE(and, a & b)
REDUCE(xor, a ^ b)
#undef REDUCE

// ---- atomics ---------------------------------------------------------------------------------------------
namespace emu {
__attribute__((no_sanitize("kernel-address"))) inline void raw_write(void* p, const void* v, size_t n) {
  for (size_t i = 0; i < n; ++i) static_cast<volatile char*>(p)[i] = static_cast<const char*>(v)[i];
}
__attribute__((no_sanitize("kernel-address"))) inline void raw_read(void* v, const void* p, size_t n) {
  for (size_t i = 0; i < n; ++i) static_cast<char*>(v)[i] = static_cast<const volatile char*>(p)[i];
}
template <class T, class F>
__attribute__((noinline)) T atomic_update(T* p, F f) {
  atomic_access(p, sizeof(T));
  T old;
  raw_read(&old, p, sizeof old);
  T next = f(old);
  raw_write(p, &next, sizeof next);
  return old;
}
}  // namespace emu
#define ATOMIC(name, expression)                                                                              \
  template <class T, class U>                                                                                 \
  inline T atomic##name(T* p, U value) {                                                                      \
    const T v = static_cast<T>(value);                                                                        \
    return emu::atomic_update(p, [v](T old) -> T { return expression; });                                     \
  }                                                                                                           \
  template <class T, class U>                                                                                 \
  inline T atomic##name##_block(T* p, U value) { return atomic##name(p, value); }
ATOMIC(Add, old + v)
ATOMIC(Sub, old - v)
ATOMIC(Max, old > v ? old : v)
ATOMIC(Min, old < v ? old : v)
ATOMIC(Or, old | v)
ATOMIC(And, old & v)
ATOMIC(Xor, old ^ v)
ATOMIC(Exch, (static_cast<void>(old), v))
#undef ATOMIC
template <class T>
inline T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
  return emu::atomic_update(p, [=](T old) -> T { return old == compare ? value : old; });
}

// ---- memory ----------------------------------------------------------------------------------------------
#define LOAD(name) template <class T> inline T name(const T* p) { return *p; }
LOAD(__ldg) LOAD(__ldcg) LOAD(__ldca) LOAD(__ldcs) LOAD(__ldlu) LOAD(__ldcv)
#undef LOAD
#define STORE(name) template <class T> inline void name(T* p, std::type_identity_t<T> v) { *p = v; }
STORE(__stwb) STORE(__stcg) STORE(__stcs) STORE(__stwt)
#undef STORE
inline size_t __cvta_generic_to_shared(const void* p) { return emu::shared_address(p); }

// ---- bits ------------------------------------------------------------------------------------------------
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned sel = s >> (4 * i) & 15;
    unsigned byte = both >> (8 * (sel & 7)) & 255;
    if (sel & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) { return static_cast<unsigned>(((static_cast<uint64_t>(hi) << 32 | lo) << (s & 31)) >> 32); }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) { return static_cast<unsigned>((static_cast<uint64_t>(hi) << 32 | lo) >> (s & 31)); }
inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned s) { return s >= 32 ? lo : __funnelshift_l(lo, hi, s); }
inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned s) { return s >= 32 ? hi : __funnelshift_r(lo, hi, s); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned __float_as_uint(float f) { return emu::bits<unsigned>(f); }
inline int __float_as_int(float f) { return emu::bits<int>(f); }
inline float __uint_as_float(unsigned u) { return emu::bits<float>(u); }
inline float __int_as_float(int u) { return emu::bits<float>(u); }
inline long long __double_as_longlong(double d) { return emu::bits<long long>(d); }
inline double __longlong_as_double(long long d) { return emu::bits<double>(d); }

// ---- arithmetic ------------------------------------------------------------------------------------------
template <class A, class B>
  requires(std::is_integral_v<A> && std::is_integral_v<B>)
inline std::common_type_t<A, B> min(A a, B b) { using C = std::common_type_t<A, B>; return C(a) < C(b) ? C(a) : C(b); }
template <class A, class B>
  requires(std::is_integral_v<A> && std::is_integral_v<B>)
inline std::common_type_t<A, B> max(A a, B b) { using C = std::common_type_t<A, B>; return C(a) > C(b) ? C(a) : C(b); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __saturatef(float x) { return x != x ? 0.0f : x < 0 ? 0.0f : x > 1 ? 1.0f : x; }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(nearbyintf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  return c;
}
