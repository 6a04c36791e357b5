// From accumulators to the output (NUMERICS.md section 0.0, "GEMM"): alpha, rounding, accumulation.
// Every step is one FP32 operation of its own.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/base/dtype.h"
#include "kernels/cpu/gemm_tile.h"
#include "kernels/formats/bf16.h"

namespace fp4t::cpu {

// Tensor scales of the two operands; null: none, and then nothing is multiplied.
struct GemmScales {
  const float* a = nullptr;
  bool a_per_row = false;  // a[row] instead of a[0]
  const float* b = nullptr;
};

struct GemmOutput {
  void* data = nullptr;  // element (0, 0)
  DType dtype = DType::kF32;
  int64_t stride = 0;
  bool accumulate = false;  // F32 only
};

// What an accumulator is multiplied by: nothing, one factor, or two in turn.
struct Alpha {
  int num_factors = 0;
  float factor[2] = {1, 1};
};

inline Alpha alpha_of(const GemmScales& s, int64_t row) {
  if (!s.a && !s.b) return {};
  if (!s.a) return {1, {s.b[0], 1}};
  const float sa = s.a[s.a_per_row ? row : 0];
  if (!s.b) return {1, {sa, 1}};
  const float product = sa * s.b[0];
  // A product that is 0, infinite or subnormal has lost bits that the accumulator could still use.
  const bool lossy = std::fabs(product) < FLT_MIN || std::isinf(product);
  return lossy ? Alpha{2, {sa, s.b[0]}} : Alpha{1, {product, 1}};
}

namespace detail {

inline void scale_row(float* acc, const Alpha& alpha) {
  for (int f = 0; f < alpha.num_factors; ++f) {
    for (int i = 0; i < kTileCols; ++i) acc[i] *= alpha.factor[f];
  }
}

inline void write_row(const float* acc, int64_t cols, bool accumulate, float* out) {
  if (accumulate) {
    for (int64_t i = 0; i < cols; ++i) out[i] = acc[i] + out[i];
  } else {
    for (int64_t i = 0; i < cols; ++i) out[i] = acc[i];
  }
}
inline void write_row(const float* acc, int64_t cols, bool, Bf16* out) {
  for (int64_t i = 0; i < cols; ++i) out[i] = f32_to_bf16(acc[i]);
}

template <class T>
void store_rows(float* acc, const GemmScales& scales, const GemmOutput& output, int64_t row0, int64_t rows,
                int64_t col0, int64_t cols) {
  Alpha alpha = alpha_of(scales, row0);
  for (int64_t r = 0; r < rows; ++r) {
    if (scales.a_per_row) alpha = alpha_of(scales, row0 + r);
    float* x = acc + r * kTileCols;
    scale_row(x, alpha);
    T* out = static_cast<T*>(output.data) + (row0 + r) * output.stride + col0;
    // The constant count lets whole rows become a few vector stores.
    write_row(x, cols == kTileCols ? kTileCols : cols, output.accumulate, out);
  }
}

}  // namespace detail

// One tile [rows, kTileCols] of accumulators, of which `cols` columns exist; acc is overwritten.
inline void store_tile(float* acc, const GemmScales& scales, const GemmOutput& output, int64_t row0,
                       int64_t rows, int64_t col0, int64_t cols) {
  if (output.dtype == DType::kBf16) {
    detail::store_rows<Bf16>(acc, scales, output, row0, rows, col0, cols);
  } else {
    detail::store_rows<float>(acc, scales, output, row0, rows, col0, cols);
  }
}

}  // namespace fp4t::cpu
