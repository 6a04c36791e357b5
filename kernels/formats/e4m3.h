// E4M3: the element of MXFP8 and the block scale of NVFP4. Sign, four exponent bits (bias 7), three
// mantissa bits; 0x7F and 0xFF are NaN, there is no Inf, the largest value is 448 (0x7E), subnormals
// count in 2^-9. Encoding rounds to nearest even and saturates (Inf too); NaN gives 0x7F.
// Contract: NUMERICS.md section 0.0.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

inline constexpr float kE4m3Max = 448.0f;
inline constexpr uint32_t kE4m3MinBinade = 0x3C800000u;  // 2^-6, the smallest normal, as FP32 bits

namespace detail {
// The binade of |y| that rules its step, as FP32 bits of 2^-6 .. 2^8.
FP4T_HD uint32_t e4m3_binade(float magnitude) {
  const uint32_t exponent = bits_of(magnitude) & 0x7F800000u;
  return exponent > kE4m3MinBinade ? exponent : kE4m3MinBinade;
}
}  // namespace detail

// As e2m1_nearest: the sum with 2^20 times the binade has the step, an eighth of the binade, as its
// unit in the last place.
FP4T_HD uint32_t e4m3_nearest(float y) {
  const uint32_t u = bits_of(y);
  const uint32_t abs_bits = u & 0x7FFFFFFFu;
  const float magnitude = float_of(abs_bits);
  const float a = magnitude < kE4m3Max ? magnitude : kE4m3Max;
  const uint32_t binade = detail::e4m3_binade(a);
  const uint32_t magic = binade + (20u << 23);
  const uint32_t steps = bits_of(a + float_of(magic)) - magic;
  const uint32_t code = (steps + ((binade - kE4m3MinBinade) >> 20)) | ((u >> 24) & 0x80u);
  return abs_bits > 0x7F800000u ? 0x7Fu : code;
}

// Value of a code, NaN for 0x7F and 0xFF; bits above the low eight are ignored.
FP4T_HD float e4m3_value(uint32_t code) {
  const uint32_t m = code & 0x7Fu;
  const uint32_t normal = (m << 20) + (120u << 23);
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(m)) * 0x1p-9f);
  const uint32_t magnitude = m < 8u ? subnormal : normal;
  return float_of((m == 0x7Fu ? 0x7FC00000u : magnitude) | (code & 0x80u) << 24);
}

}  // namespace fp4t
