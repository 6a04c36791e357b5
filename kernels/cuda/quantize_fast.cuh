// The coding of kernels/formats/nvfp4.h and e2m1.h in few instructions, for blocks of finite values and
// factors that leave room below them; the bits are the same. Others take the plain way.
//
// The E2M1 code of a magnitude a is a concave function of it, piecewise linear: c(a) = min(2a, a + 2, a/2 +
// 4). Nearest: each of the three pieces is a saturated difference, and the last addition, to 1.5 * 2^23,
// rounds to the even integer. Stochastic: FP16 has its least normal number at 2^-14, so a * 2^-14 in FP16 is
// linear below a = 1 as E2M1 is, and its bits hold c(a) from bit 9 on with nine bits of its fraction below;
// added to the draw, what is left of the carry is the code.
//
// A rotation may leave its factor of 2^-kShift to the factor into codes. The bits are still the same where
// nothing comes near the ends of FP32's range, which is what is_ordinary sees to.
#pragma once

#include "kernels/cuda/bf16_pair.cuh"
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

// e4m3_nearest of what is not negative.
__device__ __forceinline__ uint32_t e4m3_byte(float x) {
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(0.0f), "f"(x));
  return out;
}

// Values as BF16 pairs, and as what those stand for.
__device__ __forceinline__ void pack_pairs(BlockValues& b) {
#pragma unroll
  for (int i = 0; i < 8; ++i) b.word[i] = pack_bf16(b.v[2 * i], b.v[2 * i + 1]);
  widen(b.word, b.v);
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

// One where a, the magnitude of a product with a factor of 2^-kLowered of its own, is above 6: any excess
// becomes more than one.
template <int kLowered>
__device__ __forceinline__ float is_clipped(float a) {
  constexpr float kSteep = 0x1p40f, kSix = kLowered == 0 ? kE2m1Max : kE2m1Max * 0x1p-14f;
  return __saturatef(__fmaf_rn(fabsf(a), kSteep, -kSix * kSteep));
}

// Eight magnitudes as codes, to nearest; adds those above 6 to `clipped`.
__device__ __forceinline__ uint32_t nearest_magnitudes(const float* v, float factor, float& clipped) {
  constexpr float kEven = 12582912.0f;  // 1.5 * 2^23
  uint32_t code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = fabsf(v[i]) * factor;
    const float first = __saturatef(0.5f * a), second = __saturatef(__fmaf_rn(a, 0.5f, -1.0f));
    const float third = __saturatef(__fmaf_rn(a, 0.5f, -2.0f));
    code[i] = bits_of(__fmaf_rn(first, 4.0f, __fmaf_rn(second, 2.0f, third + kEven)));
    clipped += is_clipped<0>(a);
  }
  const auto bytes = [&](int i) {
    return permute(permute(code[i], code[i + 2], 0x0040), permute(code[i + 4], code[i + 6], 0x0040), 0x5410);
  };
  return bytes(0) + (bytes(1) << 4);
}

// Smaller magnitudes of two pairs of FP16, with the signs of the first where the second has none.
__device__ __forceinline__ uint32_t half_min(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Bits of `mask` from a, the others from b.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  return (a & mask) | (b & ~mask);
}

// Eight codes with their signs, by the draw's two words; adds values above 6 to `clipped`. `lowered` is 2^-14
// of the factor.
__device__ __forceinline__ uint32_t stochastic_codes(const float* v, float lowered, uint32_t draw0,
                                                     uint32_t draw1, float& clipped) {
  constexpr uint32_t kSix = 0x0E000E00u;  // 6 * 2^-14
  float a[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    a[i] = v[i] * lowered;
    clipped += is_clipped<14>(a[i]);
  }
  const auto pair = [&](int i) { return half_min(truncate_pair(a[i], a[i + 2]), kSix); };
  // The draw's eight bits lie right below the code.
  const uint32_t p0 = pair(0) + (permute(draw0, 0, 0x4240) << 1),
                 p1 = pair(1) + (permute(draw0, 0, 0x4341) << 1);
  const uint32_t p2 = pair(4) + (permute(draw1, 0, 0x4240) << 1),
                 p3 = pair(5) + (permute(draw1, 0, 0x4341) << 1);
  // Of every byte bit 7 is the sign and bits 3 to 1 are the magnitude.
  const uint32_t even = permute(p0, p2, 0x7531), odd = permute(p1, p3, 0x7531);
  const uint32_t low = select_bits(0x07070707u, even >> 1, even >> 4);
  const uint32_t high = select_bits(0x80808080u, odd, odd << 3);
  return select_bits(0x0F0F0F0Fu, low, high);
}

constexpr float kNearlyNone = 0x1p-124f;  // below, a quarter may be less than BF16's normal numbers

// Least magnitude of a block; with NaN, something.
template <bool kPairs>
__device__ __forceinline__ float least_value(const BlockValues& b) {
  if (kPairs) {
    uint32_t low = b.word[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) low = pair_min(low, b.word[i]);
    low = pair_min(low, low >> 16);
    return float_of(low << 16 & 0x7FFF0000u);
  }
  float low = fabsf(b.v[0]);
#pragma unroll
  for (int i = 1; i < kQuantBlock; ++i) low = fminf(low, fabsf(b.v[i]));
  return low;
}

// What a block is before it is coded: its extremes, and how many of its values are not zero.
struct BlockExtremes {
  float largest;  // NaN when there is one
  float least;
  uint32_t nonzero;
};

// Whether the short way holds for a block and its factor into codes: everything is finite, and neither
// products with the lowered factor nor a rotation's factor left out meet the ends of the range. Also counts
// values that are not zero.
template <int kShift>
__device__ __forceinline__ bool is_ordinary(const BlockValues& b, float factor, BlockExtremes& e) {
  constexpr float kLeast = kShift == 0 ? 0x1p-149f : kNearlyNone, kMost = kShift == 0 ? kFloatMax : 0x1p100f;
  constexpr float kLeastFactor = 0x1p-100f;
  e.nonzero = kQuantBlock;
  if (e.least >= kLeast && e.largest <= kMost && factor >= kLeastFactor) return true;
  uint32_t small = 0, zeros = 0;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) {
    zeros += b.v[i] == 0.0f ? 1u : 0u;
    if (kShift != 0) small += fabsf(b.v[i]) < kNearlyNone ? 1u : 0u;
  }
  e.nonzero -= zeros;
  return e.largest <= kMost && factor >= kLeastFactor && (kShift == 0 || small == zeros);
}

// Codes of an ordinary block in out[0..1]; returns how many values are above 6 once multiplied.
template <bool kPairs, bool kStochastic>
__device__ __forceinline__ float code_fast(const BlockValues& b, float factor, const PhiloxBits& bits,
                                           uint32_t* out) {
  float clipped = 0.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float* v = b.v + 8 * h;
    if (kStochastic) {
      out[h] = stochastic_codes(v, 0x1p-14f * factor, bits.word[2 * h], bits.word[2 * h + 1], clipped);
    } else {
      out[h] = nearest_magnitudes(v, factor, clipped) |
               (kPairs ? signs_of_pairs(b.word + 4 * h) : signs_of_floats(v));
    }
  }
  return clipped;
}

// Largest magnitude, NaN when there is one.
template <bool kPairs>
__device__ __forceinline__ float amax_or_nan(const BlockValues& b) {
  if (kPairs) {
    uint32_t top = b.word[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) top = pair_max(top, b.word[i]);
    top = pair_max(top, top >> 16);
    return float_of((top & 0x7FFFu) << 16);
  }
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) top = max_or_nan(top, fabsf(b.v[i]));
  return top;
}

}  // namespace fp4t::cuda
