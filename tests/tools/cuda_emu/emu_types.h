// bf16, fp16, fp8 and vector types with the names of CUDA's headers; conversions round to nearest even.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define VECTOR(T, name, align2, align4)                                                     \
  struct name##1 { T x; };                                                                  \
  struct alignas(align2) name##2 { T x, y; };                                               \
  struct name##3 { T x, y, z; };                                                            \
  struct alignas(align4) name##4 { T x, y, z, w; };                                         \
  inline name##1 make_##name##1(T x) { return {x}; }                                        \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                        \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR(char, char, 2, 4)
VECTOR(unsigned char, uchar, 2, 4)
VECTOR(short, short, 4, 8)
VECTOR(unsigned short, ushort, 4, 8)
VECTOR(int, int, 8, 16)
VECTOR(unsigned, uint, 8, 16)
VECTOR(long long, longlong, 16, 16)
VECTOR(unsigned long long, ulonglong, 16, 16)
VECTOR(float, float, 8, 16)
VECTOR(double, double, 16, 16)
#undef VECTOR
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emu {
template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline uint16_t to_bf16(float f) {
  uint32_t u = bits<uint32_t>(f);
  if (f != f) return 0x7FFF;
  return static_cast<uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
inline uint16_t double_to_bf16(double d) {  // one rounding: the float in between is made odd when inexact
  float f = static_cast<float>(d);
  if (d != d || std::isinf(f)) return to_bf16(f);
  if (static_cast<double>(f) != d) {
    uint32_t u = bits<uint32_t>(f);
    const bool away = std::fabs(static_cast<double>(f)) > std::fabs(d);
    if (away) --u;
    f = bits<float>(u | 1);
  }
  return to_bf16(f);
}
inline float from_bf16(uint16_t v) { return bits<float>(static_cast<uint32_t>(v) << 16); }
inline float from_half(uint16_t v) {
  const int e = v >> 10 & 31, m = v & 1023;
  float f = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024.0f + m, e - 25) : std::ldexp(static_cast<float>(m), -24);
  return v & 0x8000 ? -f : f;
}
// Nearest even on a grid of `mantissa` bits with least exponent `least`; exact in double.
inline double round_grid(double x, int mantissa, int least) {
  if (x == 0 || !std::isfinite(x)) return x;
  int e;
  std::frexp(x, &e);
  const int step = (e - 1 > least ? e - 1 : least) - mantissa;
  return std::ldexp(std::nearbyint(std::ldexp(x, -step)), step);
}
inline uint16_t to_half(double d) {
  const uint16_t sign = std::signbit(d) ? 0x8000 : 0;
  if (d != d) return 0x7FFF;
  double r = std::fabs(round_grid(d, 10, -14));
  if (r > 65504) return sign | 0x7C00;
  if (r < std::ldexp(1.0, -14)) return sign | static_cast<uint16_t>(std::ldexp(r, 24));
  int e;
  const double m = std::frexp(r, &e);
  return sign | static_cast<uint16_t>((e + 14) << 10) | static_cast<uint16_t>(std::ldexp(m, 11) - 1024);
}
inline uint8_t to_fp8(double d, bool e5m2, bool saturate) {
  const uint8_t sign = std::signbit(d) ? 0x80 : 0;
  const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  const double top = e5m2 ? 57344 : 448;
  if (d != d) return 0x7F;
  double r = std::fabs(round_grid(d, mantissa, 1 - bias));
  if (r > top) return sign | (saturate ? (e5m2 ? 0x7B : 0x7E) : (e5m2 ? 0x7C : 0x7F));
  if (r < std::ldexp(1.0, 1 - bias)) return sign | static_cast<uint8_t>(std::ldexp(r, mantissa + bias - 1));
  int e;
  const double m = std::frexp(r, &e);
  return sign | static_cast<uint8_t>((e - 1 + bias) << mantissa) | static_cast<uint8_t>(std::ldexp(m, mantissa + 1) - (1 << mantissa));
}
inline float from_fp8(uint8_t v, bool e5m2) {
  const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  const int e = (v & 127) >> mantissa, m = v & ((1 << mantissa) - 1);
  float f;
  if (e5m2 && e == 31)
    f = m ? NAN : INFINITY;
  else if (!e5m2 && (v & 127) == 127)
    f = NAN;
  else
    f = e ? std::ldexp(static_cast<float>((1 << mantissa) + m), e - bias - mantissa) : std::ldexp(static_cast<float>(m), 1 - bias - mantissa);
  return v & 128 ? -f : f;
}
}  // namespace emu

#define SIXTEEN(Type, Raw, from, to)                                                        \
  struct Raw { unsigned short x; };                                                         \
  struct Type {                                                                             \
    unsigned short __x;                                                                     \
    Type() = default;                                                                       \
    Type(const Raw& r) : __x(r.x) {}                                                        \
    template <class T>                                                                      \
      requires std::is_arithmetic_v<T>                                                      \
    explicit Type(T f) : __x(to(f)) {}                                                      \
    operator float() const { return from(__x); }                                            \
    operator Raw() const { return {__x}; }                                                  \
    Type& operator=(float f) { __x = to(f); return *this; }                                 \
  };                                                                                        \
  struct alignas(4) Type##2 { Type x, y; Type##2() = default; Type##2(Type a, Type b) : x(a), y(b) {} };
SIXTEEN(__nv_bfloat16, __nv_bfloat16_raw, emu::from_bf16, emu::to_bf16)
SIXTEEN(__half, __half_raw, emu::from_half, emu::to_half)
#undef SIXTEEN
struct alignas(4) __nv_bfloat162_raw { unsigned short x, y; };
struct alignas(4) __half2_raw { unsigned short x, y; };
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
using half = __half;
using half2 = __half2;

namespace emu {
inline __nv_bfloat16 bf(uint16_t u) { return __nv_bfloat16_raw{u}; }
inline __half hf(uint16_t u) { return __half_raw{u}; }
inline double wide(__nv_bfloat16 v) { return from_bf16(v.__x); }
inline double wide(__half v) { return from_half(v.__x); }
inline void narrow(__nv_bfloat16& out, double d) { out.__x = double_to_bf16(d); }
inline void narrow(__half& out, double d) { out.__x = to_half(d); }
}  // namespace emu

inline __nv_bfloat16 __float2bfloat16(float f) { return emu::bf(emu::to_bf16(f)); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return emu::bf(emu::to_bf16(f)); }
inline __nv_bfloat16 __float2bfloat16_rz(float f) { return emu::bf(static_cast<uint16_t>(emu::bits<uint32_t>(f) >> 16)); }
inline __nv_bfloat16 __double2bfloat16(double d) { return emu::bf(emu::double_to_bf16(d)); }
inline float __bfloat162float(__nv_bfloat16 v) { return v; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16(a), __float2bfloat16(b)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return __floats2bfloat162_rn(f.x, f.y); }
inline __nv_bfloat162 __float2bfloat162_rn(float f) { return __floats2bfloat162_rn(f, f); }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
inline float __low2float(__nv_bfloat162 v) { return v.x; }
inline float __high2float(__nv_bfloat162 v) { return v.y; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.__x; }
inline short __bfloat16_as_short(__nv_bfloat16 v) { return static_cast<short>(v.__x); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return emu::bf(v); }
inline __half __float2half(float f) { return emu::hf(emu::to_half(f)); }
inline __half __float2half_rn(float f) { return __float2half(f); }
inline float __half2float(__half v) { return v; }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half(a), __float2half(b)}; }
inline __half2 __float22half2_rn(float2 f) { return __floats2half2_rn(f.x, f.y); }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return v.x; }
inline float __high2float(__half2 v) { return v.y; }
inline unsigned short __half_as_ushort(__half v) { return v.__x; }
inline __half __ushort_as_half(unsigned short v) { return emu::hf(v); }

#define ARITHMETIC(T, T2)                                                                                     \
  inline T __hadd(T a, T b) { T r; emu::narrow(r, emu::wide(a) + emu::wide(b)); return r; }                   \
  inline T __hsub(T a, T b) { T r; emu::narrow(r, emu::wide(a) - emu::wide(b)); return r; }                   \
  inline T __hmul(T a, T b) { T r; emu::narrow(r, emu::wide(a) * emu::wide(b)); return r; }                   \
  inline T __hfma(T a, T b, T c) { T r; emu::narrow(r, emu::wide(a) * emu::wide(b) + emu::wide(c)); return r; } \
  inline T __hneg(T a) { a.__x ^= 0x8000; return a; }                                                         \
  inline T __habs(T a) { a.__x &= 0x7FFF; return a; }                                                         \
  inline T __hmax(T a, T b) { return emu::wide(a) != emu::wide(a) ? b : emu::wide(b) > emu::wide(a) ? b : a; } \
  inline T __hmin(T a, T b) { return emu::wide(a) != emu::wide(a) ? b : emu::wide(b) < emu::wide(a) ? b : a; } \
  inline bool __hisnan(T a) { return emu::wide(a) != emu::wide(a); }                                          \
  inline T operator+(T a, T b) { return __hadd(a, b); }                                                       \
  inline T operator-(T a, T b) { return __hsub(a, b); }                                                       \
  inline T operator*(T a, T b) { return __hmul(a, b); }                                                       \
  inline T2 __hadd2(T2 a, T2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }                              \
  inline T2 __hsub2(T2 a, T2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }                              \
  inline T2 __hmul2(T2 a, T2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }                              \
  inline T2 __hmul2_rn(T2 a, T2 b) { return __hmul2(a, b); }                                                  \
  inline T2 __hadd2_rn(T2 a, T2 b) { return __hadd2(a, b); }                                                  \
  inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }              \
  inline T2 __hmax2(T2 a, T2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                              \
  inline T2 __hmin2(T2 a, T2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                              \
  inline T2 __habs2(T2 a) { return {__habs(a.x), __habs(a.y)}; }                                              \
  inline T2 __hneg2(T2 a) { return {__hneg(a.x), __hneg(a.y)}; }
ARITHMETIC(__nv_bfloat16, __nv_bfloat162)
ARITHMETIC(__half, __half2)
#undef ARITHMETIC

// ---- fp8 -------------------------------------------------------------------------------------------------
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
using __nv_fp8x4_storage_t = unsigned;
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float f, __nv_saturation_t s, __nv_fp8_interpretation_t i) {
  return emu::to_fp8(f, i == __NV_E5M2, s == __NV_SATFINITE);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 f, __nv_saturation_t s, __nv_fp8_interpretation_t i) {
  return static_cast<unsigned short>(__nv_cvt_float_to_fp8(f.x, s, i) | __nv_cvt_float_to_fp8(f.y, s, i) << 8);
}
inline __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_fp8(__nv_bfloat16_raw v, __nv_saturation_t s, __nv_fp8_interpretation_t i) {
  return __nv_cvt_float_to_fp8(emu::from_bf16(v.x), s, i);
}
inline __nv_fp8x2_storage_t __nv_cvt_bfloat16raw2_to_fp8x2(__nv_bfloat162_raw v, __nv_saturation_t s, __nv_fp8_interpretation_t i) {
  return __nv_cvt_float2_to_fp8x2({emu::from_bf16(v.x), emu::from_bf16(v.y)}, s, i);
}
inline __nv_fp8x2_storage_t __nv_cvt_halfraw2_to_fp8x2(__half2_raw v, __nv_saturation_t s, __nv_fp8_interpretation_t i) {
  return __nv_cvt_float2_to_fp8x2({emu::from_half(v.x), emu::from_half(v.y)}, s, i);
}
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t v, __nv_fp8_interpretation_t i) {
  return {emu::to_half(emu::from_fp8(v, i == __NV_E5M2))};
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t v, __nv_fp8_interpretation_t i) {
  return {__nv_cvt_fp8_to_halfraw(v & 255, i).x, __nv_cvt_fp8_to_halfraw(v >> 8, i).x};
}
#define FP8(Type, kind)                                                                     \
  struct Type {                                                                             \
    __nv_fp8_storage_t __x;                                                                 \
    Type() = default;                                                                       \
    template <class T>                                                                      \
      requires std::is_arithmetic_v<T>                                                      \
    explicit Type(T f) : __x(__nv_cvt_float_to_fp8(f, __NV_SATFINITE, kind)) {}             \
    explicit Type(__nv_bfloat16 f) : Type(static_cast<float>(f)) {}                         \
    explicit Type(__half f) : Type(static_cast<float>(f)) {}                                \
    explicit operator float() const { return emu::from_fp8(__x, kind == __NV_E5M2); }       \
  };
FP8(__nv_fp8_e4m3, __NV_E4M3)
FP8(__nv_fp8_e5m2, __NV_E5M2)
#undef FP8
struct __nv_fp8x2_e4m3 {
  __nv_fp8x2_storage_t __x;
  __nv_fp8x2_e4m3() = default;
  explicit __nv_fp8x2_e4m3(float2 f) : __x(__nv_cvt_float2_to_fp8x2(f, __NV_SATFINITE, __NV_E4M3)) {}
  explicit operator float2() const { return {emu::from_fp8(__x & 255, false), emu::from_fp8(__x >> 8, false)}; }
};
struct __nv_fp8x4_e4m3 {
  __nv_fp8x4_storage_t __x;
  __nv_fp8x4_e4m3() = default;
  explicit __nv_fp8x4_e4m3(float4 f)
      : __x(__nv_cvt_float2_to_fp8x2({f.x, f.y}, __NV_SATFINITE, __NV_E4M3) |
            static_cast<unsigned>(__nv_cvt_float2_to_fp8x2({f.z, f.w}, __NV_SATFINITE, __NV_E4M3)) << 16) {}
  explicit operator float4() const {
    return {emu::from_fp8(__x & 255, false), emu::from_fp8(__x >> 8 & 255, false), emu::from_fp8(__x >> 16 & 255, false),
            emu::from_fp8(__x >> 24, false)};
  }
};
