// Two BF16 in one register, the first in the low half: conversions and products that the device does in one
// instruction.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp4t::cuda {

// Nearest even. A NaN becomes the device's own, which arithmetic makes too: for values that arithmetic made,
// not for copies (f32_to_bf16 keeps the payload).
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// a * b, each product rounded by itself.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

}  // namespace fp4t::cuda
