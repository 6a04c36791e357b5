// SwiGLU of one element, forward.
#pragma once

#include "kernels/formats/math.h"

namespace fp4t::cuda {

// NaN passes through both.
__device__ __forceinline__ float limit_above(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ float limit_below(float x, float limit) { return x < limit ? limit : x; }

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  return silu_f32(limit_above(gate, limit)) * limit_below(limit_above(up, limit), -limit);
}

}  // namespace fp4t::cuda
