// MS-EDEN (Quartet II, arXiv 2601.22813): elements rounded to nearest, then the block scales corrected by
// one factor a rotation group and rounded stochastically, which makes the whole unbiased.
// Contract: NUMERICS.md sections 0.0 and 2.2.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/e4m3.h"
#include "kernels/formats/nvfp4.h"

namespace fp4t {

// Where a block's maximum is mapped: above 6, mild clipping is intended. fp32(6 / (17/16 * 0.93)).
inline constexpr float kMsEdenMax = static_cast<float>(6.0 / (17.0 / 16.0 * 0.93));
inline constexpr float kMsEdenCap = 255.99f;         // of provisional block scales: room for the correction
inline constexpr uint32_t kMsEdenZeroScale = 0x38u;  // 1.0, stored instead of a zero scale

FP4T_HD float ms_eden_tensor_scale(float amax) {
  return amax == 0.0f ? 1.0f : amax / (kMsEdenCap * kMsEdenMax);
}

// Provisional block scale.
FP4T_HD uint32_t ms_eden_block_scale(float block_amax, float decode) {
  const float s = block_amax / kMsEdenMax / decode;
  const uint32_t byte = e4m3_nearest(s < kE4m3Max ? s : kE4m3Max);
  return byte == 0u ? kMsEdenZeroScale : byte;
}

// The correction of a rotation group from num = sum x'x' and den = sum x'x^. Squares beyond FP32's range
// leave no usable ratio, as den = 0 does.
FP4T_HD float ms_eden_correction(float num, float den) {
  const bool usable = den > 0.0f && den <= kFloatMax && num <= kFloatMax;
  return usable ? num / den : 1.0f;
}

// The E4M3 code below or above min(correction * s, 448): up if and only if
// floor(frac 2^24) + (word >> 8) >= 2^24.
FP4T_HD uint32_t ms_eden_final_scale(float correction, float block_scale, uint32_t word) {
  const float corrected = correction * block_scale;
  const float z = corrected < kE4m3Max ? corrected : kE4m3Max;
  const uint32_t binade = detail::e4m3_binade(z);
  // z in steps of binade / 8; the reciprocal step is a power of two, so all of this is exact.
  const float steps = z * float_of((254u << 23) - binade) * 8.0f;
  const int32_t whole = static_cast<int32_t>(steps);
  const int32_t fraction = static_cast<int32_t>((steps - static_cast<float>(whole)) * 0x1p24f);
  const uint32_t up = (static_cast<uint32_t>(fraction) + (word >> 8)) >> 24;
  return static_cast<uint32_t>(whole) + up + ((binade - kE4m3MinBinade) >> 20);
}

}  // namespace fp4t
