// Matrix products. out = alpha * A B^T with FP32 accumulation; every operand is either plain values or
// codes and scales, in which case alpha carries the tensor scales as NUMERICS.md 0.0 ("GEMM") says.
// On the CPU each output accumulates k = 0..K-1 by explicit fma: the same bits for any shape around it.
#pragma once

#include "kernels/base/tensor.h"
#include "kernels/formats/quant.h"

namespace fp4t {

// One side of a product: `rows` outer rows by `depth` contraction elements.
struct Operand {
  TensorView values;        // BF16 or F32: [rows, depth], or [depth, rows] when transposed; empty if codes
  bool transposed = false;  // of `values` only; codes are always stored with the contraction last
  QuantView codes;          // used when `values` is empty
  TensorView scale;         // optional F32 [groups]: tensor scale that plain values carry
  // kRow: `scale` is F32 [rows] instead, of a.
  ScaleScope scale_scope = ScaleScope::kTensor;
};

// out [M, N] = alpha * a [M, K] b [N, K]^T, or out += that (FP32 out only).
// Legal pairs: equal formats, or one quantised with BF16. K is the padded depth when both are
// quantised, else the logical one.
struct Gemm {
  static constexpr const char* kName = "gemm";
  Operand a;
  Operand b;
  TensorView out;   // BF16 or F32 [M, N]
  bool accumulate;  // out = fp32(fp32(alpha * acc) + out)
  void check() const;
};

// Rows of A cut into groups: out[t, :] = alpha_g * a[t, :] b[g]^T for t in [offsets[g], offsets[g + 1]).
// fprop and dgrad of experts.
struct GroupedGemm {
  static constexpr const char* kName = "grouped_gemm";
  Operand a;           // [T, K]; T is a capacity, offsets[G] rows are used
  Operand b;           // values [G, N, K] ([G, K, N] when transposed), or codes of G x N rows
  TensorView offsets;  // I32 [G + 1]
  TensorView out;      // BF16 or F32 [T, N]; rows from offsets[G] on are left alone
  // Optional I32 [T], all in range: row t of the product is row a_rows[t] of a, plain values of any number
  // of rows.
  TensorView a_rows = {};
  void check() const;
};

// The contraction cut into groups: out[g] [M, N] = alpha_g * sum over t in group g of a[:, t] b[:, t]^T.
// wgrad of experts. A group without tokens gives exact zeros (or leaves out alone when accumulating).
struct GroupedGemmK {
  static constexpr const char* kName = "grouped_gemm_k";
  Operand a;           // values [T, M] transposed, or codes [M, T] with kCols groups
  Operand b;           // values [T, N] transposed, or codes [N, T] with kCols groups
  TensorView offsets;  // I32 [G + 1]
  TensorView out;      // BF16 or F32 [G, M, N]
  bool accumulate;
  void check() const;
};

}  // namespace fp4t
