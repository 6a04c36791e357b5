// What products must give, computed the slow way: one explicit fma chain an output, then alpha, rounding
// and accumulation step by step (NUMERICS.md section 0.0, "GEMM"); and the same in FP64 for accuracy.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "kernels/ops/gemm.h"
#include "tests/support/tensors.h"

namespace fp4t::test {

// A dense FP32 matrix [rows, depth]: what an operand stands for.
struct Dense {
  int64_t rows = 0, depth = 0;
  std::vector<float> values;
  Dense(int64_t r, int64_t d) : rows(r), depth(d), values(static_cast<size_t>(r * d)) {}
  float& at(int64_t r, int64_t k) { return values[static_cast<size_t>(r * depth + k)]; }
  float at(int64_t r, int64_t k) const { return values[static_cast<size_t>(r * depth + k)]; }
};

inline float get(const TensorView& t, int64_t i) {
  return t.dtype == DType::kF32 ? t.as<float>()[i] : from_bf16(t.as<Bf16>()[i]);
}

inline void put(const TensorView& t, int64_t i, float x) {
  if (t.dtype == DType::kF32) {
    t.as<float>()[i] = x;
  } else {
    t.as<Bf16>()[i] = to_bf16(x);
  }
}

// Plain values of an operand as a matrix; `transposed` tells how they are stored.
inline Dense dense_of(const TensorView& v, bool transposed) {
  Dense d(v.dim(transposed ? 1 : 0), v.dim(transposed ? 0 : 1));
  for (int64_t r = 0; r < d.rows; ++r) {
    for (int64_t k = 0; k < d.depth; ++k) {
      d.at(r, k) = get(v, transposed ? k * d.rows + r : r * d.depth + k);
    }
  }
  return d;
}

// One accumulator: k = 0..depth-1 from 0.
inline float chain(const Dense& a, int64_t m, const Dense& b, int64_t n, int64_t depth) {
  float acc = 0;
  for (int64_t k = 0; k < depth; ++k) acc = std::fma(a.at(m, k), b.at(n, k), acc);
  return acc;
}

constexpr float kNoScale = std::numeric_limits<float>::quiet_NaN();  // operand without tensor scale

// alpha * acc; each scale may be kNoScale.
inline float scaled(float acc, float sa, float sb) {
  const bool has_a = !std::isnan(sa), has_b = !std::isnan(sb);
  if (has_a && has_b) {
    const float alpha = sa * sb;
    if (std::fpclassify(alpha) != FP_NORMAL) {
      const float first = acc * sa;
      return first * sb;
    }
    return acc * alpha;
  }
  if (has_a) return acc * sa;
  if (has_b) return acc * sb;
  return acc;
}

// out[begin + m * cols + n] for the whole product; rows of a from a_row on.
inline void expect_product(const Dense& a, const Dense& b, float sa, float sb, bool accumulate,
                           const TensorView& out, int64_t begin = 0) {
  for (int64_t m = 0; m < a.rows; ++m) {
    for (int64_t n = 0; n < b.rows; ++n) {
      const int64_t i = begin + m * b.rows + n;
      const float x = scaled(chain(a, m, b, n, a.depth), sa, sb);
      put(out, i, accumulate ? x + get(out, i) : x);
    }
  }
}

// FP64 product without scales, rounded to out's type.
inline void expect_product_fp64(const Dense& a, const Dense& b, const TensorView& out) {
  for (int64_t m = 0; m < a.rows; ++m) {
    for (int64_t n = 0; n < b.rows; ++n) {
      double acc = 0;
      for (int64_t k = 0; k < a.depth; ++k) acc += double{a.at(m, k)} * double{b.at(n, k)};
      put(out, m * b.rows + n, static_cast<float>(acc));
    }
  }
}

// Rows [begin, begin + count) of a matrix, or columns of its contraction.
inline Dense rows_of(const Dense& d, int64_t begin, int64_t count) {
  Dense out(count, d.depth);
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t k = 0; k < d.depth; ++k) out.at(r, k) = d.at(begin + r, k);
  }
  return out;
}
inline Dense depths_of(const Dense& d, int64_t begin, int64_t count) {
  Dense out(d.rows, count);
  for (int64_t r = 0; r < d.rows; ++r) {
    for (int64_t k = 0; k < count; ++k) out.at(r, k) = d.at(r, begin + k);
  }
  return out;
}

// An owned plain operand with normal values and, unless `scale` is kNoScale, a tensor scale.
struct PlainOperand {
  HostTensor tensor;
  HostTensor scale_tensor{DType::kF32, {1}};
  bool transposed;
  float scale;

  PlainOperand(DType dtype, bool depth_first, int64_t rows, int64_t depth, uint64_t seed,
               float tensor_scale = kNoScale)
      : tensor(dtype, depth_first ? Shape{depth, rows} : Shape{rows, depth}),
        transposed(depth_first),
        scale(tensor_scale) {
    fill_normal(tensor, seed);
    scale_tensor.as<float>()[0] = tensor_scale;
  }
  Operand operand() {
    Operand o;
    o.values = tensor.view();
    o.transposed = transposed;
    if (!std::isnan(scale)) o.scale = scale_tensor.view();
    return o;
  }
  Dense dense() { return dense_of(tensor.view(), transposed); }
};

// Draws of sizes and switches for randomised cases.
class Draw {
 public:
  explicit Draw(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool coin() { return (engine_() & 1) != 0; }
  int64_t one_of(const std::vector<int64_t>& choices) {
    return choices[static_cast<size_t>(below(static_cast<int64_t>(choices.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace fp4t::test
