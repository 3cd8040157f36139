// E4M3 conversions of Ascend C. A NaN becomes 0x7F: whether the hardware keeps its sign is not known.
#pragma once
#include "simt_api/asc_simt.h"

using __asc_fp8x2_storage_t = uint16_t;
enum __asc_saturation_t { __ASC_NOSAT, __ASC_SATFINITE };
enum __asc_fp8_interpretation_t { __ASC_E4M3, __ASC_E5M2 };
inline __asc_fp8x2_storage_t __asc_cvt_float2_to_fp8x2(float2 f, __asc_saturation_t s, __asc_fp8_interpretation_t i) {
  const bool saturate = s == __ASC_SATFINITE, e5m2 = i == __ASC_E5M2;
  return static_cast<uint16_t>(emu::to_fp8(f.x, e5m2, saturate) | emu::to_fp8(f.y, e5m2, saturate) << 8);
}
struct float8_e4m3_t {
  uint8_t data;
};
struct float8_e4m3x2_t {
  uint16_t data;
};
struct float8_e5m2x2_t {
  uint16_t data;
};
inline float2 __e4m3x22float2(float8_e4m3x2_t v) { return {emu::from_fp8(v.data & 255, false), emu::from_fp8(v.data >> 8, false)}; }
inline float2 __e5m2x22float2(float8_e5m2x2_t v) { return {emu::from_fp8(v.data & 255, true), emu::from_fp8(v.data >> 8, true)}; }
