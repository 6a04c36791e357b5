// E8M0, the block scale of MXFP8: byte b stands for 2^(b - 127), 255 for NaN; no sign, no zero.
// Contract: NUMERICS.md section 0.0.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

// The smallest power of two that is not below t >= 0: min(254, exponent + (mantissa != 0)); below the
// normal range 2^-126 when t > 2^-127, else 2^-127.
FP4T_HD uint32_t e8m0_round_up(float t) {
  const uint32_t u = bits_of(t);
  const uint32_t exponent = u >> 23;
  const uint32_t mantissa = u & 0x7FFFFFu;
  const uint32_t normal = exponent + (mantissa != 0u ? 1u : 0u);
  const uint32_t capped = normal < 254u ? normal : 254u;
  return exponent == 0u ? (mantissa > 0x400000u ? 1u : 0u) : capped;
}

// 2^(byte - 127); byte 0 is an FP32 subnormal, exact all the same.
FP4T_HD float e8m0_value(uint32_t byte) {
  const uint32_t b = byte & 0xFFu;
  const uint32_t finite = b == 0u ? 0x00400000u : b << 23;
  return float_of(b == 255u ? 0x7FC00000u : finite);
}

// 2^(127 - byte), the exact reciprocal, for bytes 0..254.
FP4T_HD float e8m0_reciprocal(uint32_t byte) { return e8m0_value(254u - (byte & 0xFFu)); }

}  // namespace fp4t
