// The coding of kernels/formats/nvfp4.h and e2m1.h in few instructions, for blocks of finite values and
// factors that leave room below them; the bits are the same. Others take the plain way.
//
// The E2M1 code of a magnitude a is a concave function of it, piecewise linear: c(a) = min(2a, a + 2, a/2 +
// 4). Nearest: each of the three pieces is a saturated difference, and the last addition, to 1.5 * 2^23,
// rounds to the even integer. Stochastic: from a = 1 on, c counts the float's own exponent and mantissa, and
// below it those of (a + 1) / 2, so that with x = max(a, (a + 1) / 2), here in eighths, the bits of x hold c
// with all its fraction; added to the draw, what is left of the carry is the code.
#pragma once

#include "kernels/cuda/quantize.cuh"
#include "kernels/formats/nvfp4.h"

namespace fp4t::cuda {

// A block's values, and the same as eight pairs of BF16 where they are BF16.
struct BlockValues {
  float v[kQuantBlock];
  uint32_t word[8];
};

// Byte selectors with bit 3 set spread the sign of a byte over it, which __byte_perm does not offer.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

// site_draw (kernels/base/philox.h) with the keys of its rounds made beforehand.
__device__ __forceinline__ PhiloxBits draw_bits(const RoundKeys& keys, uint64_t index) {
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32), c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ keys.lo[round];
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ keys.hi[round];
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
  }
  return {{c0, c1, c2, c3}};
}

// Larger or smaller magnitudes of two pairs of BF16; the signs of the result mean nothing. `max` turns into
// NaN when one is.
__device__ __forceinline__ uint32_t pair_max(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t pair_min(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// Two floats to FP16 towards zero.
__device__ __forceinline__ uint32_t truncate_pair(float low, float high) {
  uint32_t out;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// Two floats to BF16, nearest even.
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// e4m3_nearest of what is not negative.
__device__ __forceinline__ uint32_t e4m3_byte(float x) {
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(0.0f), "f"(x));
  return out;
}

// Bits 3 of eight codes from the signs of eight values, the even ones in the low nibbles.
__device__ __forceinline__ uint32_t signs_of_pairs(const uint32_t* word) {
  const uint32_t a = permute(word[0], word[1], 0xFBD9), b = permute(word[2], word[3], 0xFBD9);
  return (permute(a, b, 0x5410) & 0x08080808u) | (permute(a, b, 0x7632) & 0x80808080u);
}
__device__ __forceinline__ uint32_t signs_of_floats(const float* v) {
  const auto pair = [&](int i) { return permute(bits_of(v[i]), bits_of(v[i + 2]), 0xFBFB); };
  const uint32_t even = permute(pair(0), pair(4), 0x5410), odd = permute(pair(1), pair(5), 0x5410);
  return (even & 0x08080808u) | (odd & 0x80808080u);
}

// Eight magnitudes as codes, to nearest.
__device__ __forceinline__ uint32_t nearest_magnitudes(const float* v, float factor) {
  constexpr float kEven = 12582912.0f;  // 1.5 * 2^23
  uint32_t code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = fabsf(v[i]) * factor;
    const float first = __saturatef(0.5f * a), second = __saturatef(__fmaf_rn(a, 0.5f, -1.0f));
    const float third = __saturatef(__fmaf_rn(a, 0.5f, -2.0f));
    code[i] = bits_of(__fmaf_rn(first, 4.0f, __fmaf_rn(second, 2.0f, third + kEven)));
  }
  const auto bytes = [&](int i) {
    return permute(permute(code[i], code[i + 2], 0x0040), permute(code[i + 4], code[i + 6], 0x0040), 0x5410);
  };
  return bytes(0) + (bytes(1) << 4);
}

// Eight magnitudes as codes, by the draw's two words.
__device__ __forceinline__ uint32_t stochastic_magnitudes(const float* v, float eighth, uint32_t draw0,
                                                          uint32_t draw1) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = __saturatef(fabsf(v[i]) * eighth);
    x[i] = fmaxf(a, __fmaf_rz(a, 0.5f, 0.0625f));
  }
  // In FP16 a code ends at bit 9 of its half; the draw's eight bits lie right below.
  const uint32_t p0 = truncate_pair(x[0], x[2]) + ((draw0 & 0x00FF00FFu) << 1);
  const uint32_t p1 = truncate_pair(x[1], x[3]) + (permute(draw0, 0, 0x4341) << 1);
  const uint32_t p2 = truncate_pair(x[4], x[6]) + ((draw1 & 0x00FF00FFu) << 1);
  const uint32_t p3 = truncate_pair(x[5], x[7]) + (permute(draw1, 0, 0x4341) << 1);
  const uint32_t even = permute(p0, p2, 0x7531), odd = permute(p1, p3, 0x7531);
  // Code 0 shows as 6; a code of 8 is what lies between 6 and 8 and rounded up: 7.
  const uint32_t code = ((even >> 1 & 0x0F0F0F0Fu) | (odd << 3 & 0xF0F0F0F0u)) - 0x66666666u;
  return code - ((code & 0x88888888u) >> 3);
}

// Whether the fast way holds for a block: everything finite (its maximum was taken with NaN), and no
// underflow in an eighth of the factor.
__device__ __forceinline__ bool is_ordinary(float amax, float factor) {
  return amax <= kFloatMax && factor >= 0x1p-120f;
}

// Codes of an ordinary block in out[0..1].
template <bool kPairs>
__device__ __forceinline__ void code_fast(const BlockValues& b, float factor, bool stochastic,
                                          const PhiloxBits& bits, uint32_t* out) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float* v = b.v + 8 * h;
    const uint32_t magnitudes =
        stochastic ? stochastic_magnitudes(v, 0.125f * factor, bits.word[2 * h], bits.word[2 * h + 1])
                   : nearest_magnitudes(v, factor);
    out[h] = magnitudes | (kPairs ? signs_of_pairs(b.word + 4 * h) : signs_of_floats(v));
  }
}

// Largest magnitude, NaN when there is one.
template <bool kPairs>
__device__ __forceinline__ float amax_or_nan(const BlockValues& b) {
  if (kPairs) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = pair_max(top, b.word[i]);
    top = pair_max(top, top >> 16);
    return float_of((top & 0x7FFFu) << 16);
  }
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) top = max_or_nan(top, fabsf(b.v[i]));
  return top;
}

// Values of an ordinary block that are not zero.
template <bool kPairs>
__device__ __forceinline__ uint32_t nonzero_values(const BlockValues& b) {
  bool all;
  if (kPairs) {
    uint32_t low = b.word[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) low = pair_min(low, b.word[i]);
    all = (low & 0x7FFFu) != 0u && (low & 0x7FFF0000u) != 0u;
  } else {
    float low = fabsf(b.v[0]);
#pragma unroll
    for (int i = 1; i < kQuantBlock; ++i) low = fminf(low, fabsf(b.v[i]));
    all = low > 0.0f;
  }
  if (all) return kQuantBlock;
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) count += b.v[i] != 0.0f ? 1u : 0u;
  return count;
}

// Values of an ordinary block above 6 once multiplied.
__device__ __forceinline__ uint32_t clipped_values(const BlockValues& b, float amax, float factor) {
  if (!(amax * factor > kE2m1Max)) return 0;
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) count += fabsf(b.v[i]) * factor > kE2m1Max ? 1u : 0u;
  return count;
}

}  // namespace fp4t::cuda
