// Writing outputs one by one or in pairs: rounding to BF16, or accumulation in FP32.
#pragma once

#include "kernels/cuda/gemm_epilogue.cuh"

namespace fp4t::cuda {

struct GemmOut {
  void* data;
  int64_t ld;
  bool bf16, accumulate;
  bool pairs;  // an even element and the next may be stored at once
};

inline GemmOut out_of(const GemmProblem& p) {
  const bool bf16 = p.out_dtype == DType::kBf16;
  const bool pairs = p.ld_out % 2 == 0 && reinterpret_cast<uintptr_t>(p.out) % (bf16 ? 4 : 8) == 0;
  return {p.out, p.ld_out, bf16, p.accumulate, pairs};
}

__device__ __forceinline__ void store_one(const GemmOut& out, int64_t at, float x) {
  if (out.bf16) {
    static_cast<Bf16*>(out.data)[at] = f32_to_bf16(x);
  } else {
    float* p = static_cast<float*>(out.data) + at;
    *p = out.accumulate ? x + *p : x;
  }
}

// Elements `at` and, if `second`, at + 1.
__device__ __forceinline__ void store_pair(const GemmOut& out, int64_t at, bool second, float x, float y) {
  if (!out.pairs || !second) {
    store_one(out, at, x);
    if (second) store_one(out, at + 1, y);
  } else if (out.bf16) {
    const uint32_t low = f32_to_bf16(x).bits, high = f32_to_bf16(y).bits;
    *reinterpret_cast<uint32_t*>(static_cast<Bf16*>(out.data) + at) = low | high << 16;
  } else {
    float2* p = reinterpret_cast<float2*>(static_cast<float*>(out.data) + at);
    if (out.accumulate) {
      const float2 old = *p;
      *p = make_float2(x + old.x, y + old.y);
    } else {
      *p = make_float2(x, y);
    }
  }
}

}  // namespace fp4t::cuda
