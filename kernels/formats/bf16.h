// BF16 and FP32 as bits: the conversions every other codec builds on. One source for host and device,
// free of branches, so that loops over it vectorise. Contract: NUMERICS.md section 0.0.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"

namespace fp4t {

FP4T_HD uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof(u));
  return u;
}

FP4T_HD float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

FP4T_HD float bf16_to_f32(Bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

// Nearest even; overflow rounds to infinity as IEEE says; NaN stays NaN (quiet, sign kept).
FP4T_HD Bf16 f32_to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;
  return {static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded)};
}

// Stochastic rounding with 16 random bits: up in magnitude if and only if low 16 bits + r >= 65536, so
// the expected value is x. Infinities and NaN are kept (NaN quiet).
FP4T_HD Bf16 f32_to_bf16_stochastic(float x, uint32_t r) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + (r & 0xFFFFu)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;
  return {static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded)};
}

}  // namespace fp4t
