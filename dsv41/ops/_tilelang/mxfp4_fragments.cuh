// MXFP4 weights as the A operand of wgmma: what a thread reads of a packed block, and its values in bf16, f16 or FP8.
#pragma once

namespace gemm {

// Two bf16 with the exponent field `byte index` of `codes`: the scale of one 1 x 32 block, twice.
__device__ __forceinline__ uint32_t scale_pair(uint32_t codes, int index) {
  return __byte_perm(codes, 0, index | 0x40 | index << 8 | 0x4000) << 7;
}
__device__ __forceinline__ uint32_t bits(__nv_bfloat162 v) {
  uint32_t out;
  memcpy(&out, &v, 4);
  return out;
}
__device__ __forceinline__ __nv_bfloat162 as_bf16(uint32_t v) {
  __nv_bfloat162 out;
  memcpy(&out, &v, 4);
  return out;
}
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) { return bits(__hmul2(as_bf16(a), as_bf16(b))); }

// MXFP4: words 2q and 2q + 1 hold the 16 values of a thread for the q-th 32 k: four magnitudes a half, as
// selectors of a table look-up; the signs of the low half at bits 7, 15, 23, 31, of the high half four
// bits lower.
struct Mxfp4 {
  static constexpr int WORDS = 8;     // 32-bit words a thread reads for a 64 x 128 block
  static constexpr int SCALES = 256;  // bytes of scale codes of the block
  uint32_t words[WORDS];
  uint32_t low, high;  // codes of this thread's two rows

  __device__ __forceinline__ void load(const uint8_t* values, const uint8_t* scales, int thread) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 v = *reinterpret_cast<const uint4*>(values + (i * 128 + thread) * 16);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
    uint2 s = *reinterpret_cast<const uint2*>(scales + (thread >> 2) * 8);
    low = s.x, high = s.y;
  }
  // The bf16 fragment of 16 k, scaled. The first product column pairs are k 4c + {0, 1}, the second 4c + {2, 3}
  // (c = lane % 4): the token rows carry k in that order.
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[4]) const {
    uint32_t w = words[step], magnitudes = w & 0x77777777u;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t scale = scale_pair(row ? high : low, step >> 1), pick = row ? magnitudes >> 16 : magnitudes;
      uint32_t upper = hopper::byte_select(0x3F3F3F00u, 0x40404040u, pick) | ((row ? w << 4 : w) & 0x80808080u);
      uint32_t lower = hopper::byte_select(0xC0800000u, 0xC0804000u, pick);
      a[row] = multiply(__byte_perm(lower, upper, 0x5140), scale);
      a[2 + row] = multiply(__byte_perm(lower, upper, 0x7362), scale);
    }
  }
  // The E4M3 fragment of the q-th 32 k, not scaled.
  __device__ __forceinline__ void decode_native(int q, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t w = words[2 * q + i], magnitudes = w & 0x77777777u;
      a[2 * i] = hopper::byte_select(0x3C383000u, 0x4C484440u, magnitudes) | (w & 0x80808080u);
      a[2 * i + 1] = hopper::byte_select(0x3C383000u, 0x4C484440u, magnitudes >> 16) | (w << 4 & 0x80808080u);
    }
  }
  // The E5M2 fragment of the q-th 32 k: values times 2^(code - base), exact for codes up to 13 from the base. The
  // exponents of the table are moved, not those of the values: 0 stays 0 whatever the code of its block.
  __device__ __forceinline__ void decode_folded(int q, uint2 fold, uint32_t (&a)[4]) const {
    // Opaque: otherwise the compiler masks each half by itself.
    uint32_t magnitudes[2] = {static_cast<uint32_t>(hopper::opaque(words[2 * q] & 0x77777777u)),
                              static_cast<uint32_t>(hopper::opaque(words[2 * q + 1] & 0x77777777u))};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t code = __byte_perm(row ? high : low, 0, 0x4440 | q);
      uint32_t small = fold.x + code * 0x04040400u, large = fold.y + code * 0x04040404u;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t w = words[2 * q + i];
        a[2 * i + row] = hopper::byte_select(small, large, magnitudes[i] >> 16 * row) |
                         ((row ? w << 4 : w) & 0x80808080u);
      }
    }
  }
  // The f16 fragment of 16 k, values as in decode_folded and k in the order of decode(): E5M2 is f16's upper byte.
  __device__ __forceinline__ void decode_half(int step, uint2 fold, uint32_t (&a)[4]) const {
    uint32_t w = words[step], magnitudes = static_cast<uint32_t>(hopper::opaque(w & 0x77777777u));
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t code = __byte_perm(row ? high : low, 0, 0x4440 | step >> 1);
      uint32_t small = fold.x + code * 0x04040400u, large = fold.y + code * 0x04040404u;
      uint32_t four = hopper::byte_select(small, large, magnitudes >> 16 * row) | ((row ? w << 4 : w) & 0x80808080u);
      a[row] = __byte_perm(four, 0, 0x1404);
      a[2 + row] = __byte_perm(four, 0, 0x3424);
    }
  }
  // What decode_folded adds to: E2M1 magnitudes as E5M2, moved by the base.
  static __device__ __forceinline__ uint2 folding(uint32_t base) {
    return make_uint2(0x3E3C3800u - base * 0x04040400u, 0x46444240u - base * 0x04040404u);
  }
  // The scale of a row for the q-th 32 k.
  __device__ __forceinline__ float scale(int row, int q) const {
    return __uint_as_float(__byte_perm(row ? high : low, 0, 0x4044 | q << 8) << 7);
  }
};

}  // namespace gemm
