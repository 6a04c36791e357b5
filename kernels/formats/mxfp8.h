// MXFP8: E4M3 elements, one E8M0 scale for 32 of them, rounded up so that the largest never saturates.
// Contract: NUMERICS.md sections 0.0 and 1.4.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/formats/e4m3.h"
#include "kernels/formats/e8m0.h"

namespace fp4t {

// Scale byte of a block whose largest magnitude is `block_amax` (NaN left out, Inf gives 254).
FP4T_HD uint32_t mxfp8_block_scale(float block_amax) { return e8m0_round_up(block_amax * (1.0f / kE4m3Max)); }

// Factor into codes: the exact reciprocal of the scale.
FP4T_HD float mxfp8_encode_factor(uint32_t scale) { return e8m0_reciprocal(scale); }

}  // namespace fp4t
