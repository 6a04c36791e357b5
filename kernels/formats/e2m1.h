// E2M1, the element of NVFP4: sign, two exponent bits, one mantissa bit. No Inf, no NaN.
//   code   0  1    2  3    4  5  6  7   8..15: the same with bit 3 as the sign (8 is -0)
//   value  0  0.5  1  1.5  2  3  4  6
// The step is 0.5 below 2, 1 in [2, 4), 2 in [4, 6]. Encoding saturates; NaN of either sign gives +6,
// as the hardware does. Contract: NUMERICS.md sections 0.0 and 1.1.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

inline constexpr float kE2m1Max = 6.0f;

namespace detail {

// The binade of |y| that rules its step, as FP32 bits of 1, 2 or 4.
FP4T_HD uint32_t e2m1_binade(float magnitude) {
  const uint32_t exponent = bits_of(magnitude) & 0x7F800000u;
  return exponent > 0x3F800000u ? exponent : 0x3F800000u;
}

// min(|y|, 6), with 6 for NaN.
FP4T_HD float e2m1_magnitude(float y) {
  const float a = float_of(bits_of(y) & 0x7FFFFFFFu);
  return a < kE2m1Max ? a : kE2m1Max;
}

// Bit 3, clear for NaN.
FP4T_HD uint32_t e2m1_sign(float y) {
  const uint32_t u = bits_of(y);
  return (u & 0x7FFFFFFFu) > 0x7F800000u ? 0u : (u >> 28) & 8u;
}

}  // namespace detail

// Nearest, ties to the even code. Adding 2^22 times the binade leaves the sum's unit in the last place
// at half the binade, which is the step: the FP32 addition does the rounding.
FP4T_HD uint32_t e2m1_nearest(float y) {
  const float a = detail::e2m1_magnitude(y);
  const uint32_t binade = detail::e2m1_binade(a);
  const uint32_t magic = binade + (22u << 23);
  const uint32_t steps = bits_of(a + float_of(magic)) - magic;
  return (steps + ((binade - 0x3F800000u) >> 22)) | detail::e2m1_sign(y);
}

// The value that e2m1_nearest rounds to, without going through its code (+6 for NaN).
FP4T_HD float e2m1_round(float y) {
  const float a = detail::e2m1_magnitude(y);
  const float magic = float_of(detail::e2m1_binade(a) + (22u << 23));
  const float rounded = a + magic - magic;
  return float_of(bits_of(rounded) | detail::e2m1_sign(y) << 28);
}

// Stochastic with eight given bits r: a = n step + f step; up if and only if floor(256 f) + r >= 256.
// 1/step is a power of two, so a/step and f are exact.
FP4T_HD uint32_t e2m1_stochastic(float y, uint32_t r) {
  const float a = detail::e2m1_magnitude(y);
  const uint32_t binade = detail::e2m1_binade(a);
  const float inverse_step = float_of(0x7F800000u - binade);  // 2 / binade: the exponents sum to 255
  const int32_t fixed = static_cast<int32_t>(a * inverse_step * 256.0f);  // floor(256 a / step)
  const uint32_t steps = (static_cast<uint32_t>(fixed) + r) >> 8;
  return (steps + ((binade - 0x3F800000u) >> 22)) | detail::e2m1_sign(y);
}

// Value of a code; bits above the low four are ignored.
FP4T_HD float e2m1_value(uint32_t code) {
  const uint32_t m = code & 7u;
  // Codes 2..7 are FP32 exponents and one mantissa bit; code 1 is 0.5 and 0 is 0.
  const uint32_t normal = (m << 22) + 0x3F000000u;
  const uint32_t magnitude = m > 1u ? normal : m * 0x3F000000u;
  return float_of(magnitude | (code & 8u) << 28);
}

}  // namespace fp4t
