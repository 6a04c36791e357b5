// Maxima over warps and groups. Maxima depend on no order, so that warps meet in atomic maxima of the bits of
// floats that are not negative.
#pragma once

#include "kernels/cuda/quantize.cuh"
#include "kernels/formats/bf16.h"

namespace fp4t::cuda {

__device__ __forceinline__ void raise_one(uint32_t* amax, uint32_t bits) {
  if (bits > *reinterpret_cast<volatile uint32_t*>(amax)) atomicMax(amax, bits);
}

// With the largest of the warp's bits.
__device__ __forceinline__ void raise_amax(uint32_t* amax, uint32_t bits) {
  const uint32_t top = __reduce_max_sync(0xFFFFFFFFu, bits);
  if (threadIdx.x % 32 == 0) raise_one(amax, top);
}

// Larger magnitudes of two pairs of BF16, NaN left out; the signs of the result mean nothing.
__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Scaling and rounding keep the order of magnitudes, so they are left to the maximum of the rotated sums.
__device__ __forceinline__ float finish_amax(const QuantSpec& spec, float top) {
  if (spec.hadamard == 0) return top;
  const float scaled = top * hadamard_scale(spec.hadamard);
  return spec.hadamard_out == HadamardOut::kBf16 ? bf16_to_f32(f32_to_bf16(scaled)) : scaled;
}

}  // namespace fp4t::cuda
