// From accumulators to the output (NUMERICS.md section 0.0, "GEMM"), as kernels/cpu/gemm_epilogue.h does it:
// every step is one FP32 operation of its own.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>

#include "kernels/cuda/gemm_problem.h"
#include "kernels/formats/bf16.h"

namespace fp4t::cuda {

// Tensor scales of both sides, by value in a kernel's arguments.
struct GemmScales {
  const float* a;
  const float* b;
  ScaleOf a_of, b_of;
};
inline GemmScales scales_of(const GemmProblem& p) {
  return {p.a.scale, p.b.scale, p.a.scale_of, p.b.scale_of};
}

// What an accumulator is multiplied by: two factors in turn; 1 changes no bit of a finite or infinite
// value, so it stands for "nothing" as well.
struct Alpha {
  float first, second;
};

__device__ __forceinline__ float scale_at(const float* scale, ScaleOf of, int64_t group, int64_t row) {
  if (of == ScaleOf::kNone) return 1.0f;
  return scale[of == ScaleOf::kRow ? row : of == ScaleOf::kGroup ? group : 0];
}

// `row` counts rows of A from the first of all groups.
__device__ __forceinline__ Alpha alpha_of(const GemmScales& s, int64_t group, int64_t row) {
  const float a = scale_at(s.a, s.a_of, group, row);
  const float b = scale_at(s.b, s.b_of, group, 0);
  if (s.a_of == ScaleOf::kNone || s.b_of == ScaleOf::kNone) return {a, b};
  const float product = a * b;
  // A product that is 0, infinite or subnormal has lost bits that the accumulator could still use.
  const bool lossy = fabsf(product) < FLT_MIN || isinf(product);
  return lossy ? Alpha{a, b} : Alpha{product, 1.0f};
}

__device__ __forceinline__ float scaled(float acc, const Alpha& alpha) {
  return acc * alpha.first * alpha.second;
}

}  // namespace fp4t::cuda
