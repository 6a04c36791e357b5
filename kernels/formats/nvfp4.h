// The two levels of NVFP4 scales: one FP32 scale a tensor (or row), one E4M3 scale a block. Every
// operation is one FP32 rounding, in the order that equality with the hardware recipe asks for.
// Contract: NUMERICS.md sections 0.0, 1.2 and 2.1.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/e2m1.h"
#include "kernels/formats/e4m3.h"
#include "kernels/formats/quant.h"

namespace fp4t {

inline constexpr float kFloatMax = 0x1.fffffep127f;
// With 17/16 headroom the block maximum maps to 6 * 16/17, so that the worst E4M3 rounding of a scale
// (by 1/16) lands on 6 and nothing clips.
inline constexpr float kHeadroomMax = 96.0f / 17.0f;
inline constexpr float kFourOverSixCap = 256.0f;  // room for the 1.5 times larger scale

// Tensor scales: `encode` multiplies into the range of the block scales, `decode` is its reciprocal.
struct TensorScale {
  float encode;
  float decode;
};

// `decode` up to a power of two, at least 2^-126.
FP4T_HD float round_up_to_pow2(float decode) {
  const uint32_t u = bits_of(decode);
  const uint32_t exponent = (u >> 23) + ((u & 0x7FFFFFu) != 0u ? 1u : 0u);
  return decode < 0x1p-126f ? 0x1p-126f : float_of(exponent << 23);
}

// Scales of a tensor or row whose largest magnitude is `amax`; an infinite or zero one encodes by 1.
FP4T_HD TensorScale nvfp4_tensor_scale(ScaleRule rule, ScaleRound round, Headroom headroom, float amax) {
  const float top = headroom == Headroom::k17over16 ? kE4m3Max * kHeadroomMax
                    : rule == ScaleRule::kAmax      ? kE4m3Max * kE2m1Max
                                                    : kFourOverSixCap * kE2m1Max;
  float encode = top / amax;
  encode = encode < kFloatMax ? encode : kFloatMax;
  if (amax == 0.0f || encode == 0.0f) encode = 1.0f;
  float decode = 1.0f / encode;
  if (round == ScaleRound::kPow2) {
    decode = round_up_to_pow2(decode);
    encode = 1.0f / decode;
  }
  return {encode, decode};
}

// What a block's maximum is multiplied with before E4M3 (rule amax).
FP4T_HD float nvfp4_block_multiplier(Headroom headroom, float encode) {
  return encode * (1.0f / (headroom == Headroom::k17over16 ? kHeadroomMax : kE2m1Max));
}

// Block scale of rule amax.
FP4T_HD uint32_t nvfp4_block_scale(float block_amax, float multiplier) {
  return e4m3_nearest(block_amax * multiplier);
}

// Candidates of four-over-six: the block's maximum at 6, or at 4.
FP4T_HD uint32_t nvfp4_scale_at_six(float block_amax, float encode) {
  return e4m3_nearest(block_amax / kE2m1Max * encode);
}
FP4T_HD uint32_t nvfp4_scale_at_four(float block_amax, float encode) {
  return e4m3_nearest(1.5f * (block_amax / kE2m1Max * encode));
}

// Factor into codes: an exact division by what the codes will be multiplied with, from the rounded scale.
FP4T_HD float nvfp4_encode_factor(float block_scale, float decode) {
  const float factor = 1.0f / (block_scale * decode);
  return factor < kFloatMax ? factor : kFloatMax;
}

// Value of a code as four-over-six compares it and as Dequantize gives it with DecodeScale::kFull.
FP4T_HD float nvfp4_value(float element, float block_scale, float decode) {
  return element * block_scale * decode;
}

}  // namespace fp4t
