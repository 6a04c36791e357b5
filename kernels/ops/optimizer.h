// Pieces of optimizer steps. Masters and moments are F32, or BF16 stored by stochastic rounding.
// Every operation is a single FP32 one, from left to right as written; an update uses the new moments
// before they are stored. A BF16 copy is the stored master rounded to nearest, so that it can be derived
// again from a checkpoint.
#pragma once

#include "kernels/base/philox.h"
#include "kernels/base/tensor.h"

namespace fp4t {

// AdamW (Loshchilov and Hutter 2019): m, v moving averages, decoupled weight decay:
//   g = grad * grad_scale; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2
//   w = w - lr * (m * bias1 / (sqrt(v * bias2) + eps) + weight_decay * w)
// bias1 = 1 / (1 - b1^t), bias2 likewise, t = applied updates, from the host in FP64.
struct AdamWStep {
  static constexpr const char* kName = "adamw_step";
  TensorView grad;        // F32 or BF16 [n]
  TensorView grad_scale;  // F32 [1]: the clip factor
  TensorView master;      // F32 or BF16 [n], updated
  TensorView m, v;        // F32 or BF16 [n], updated
  TensorView copy;        // optional BF16 [n]: round-to-nearest copy of the new master
  float lr, beta1, beta2, eps, weight_decay, bias1, bias2;
  PhiloxKey store_key;  // BF16 stores: element i of master, m, v uses words 0, 1, 2 of draw i, upper 16 bits
  int64_t first_element = 0;  // index of element 0 in the logical tensor: draw i is that of first_element + i
  void check() const;
};

// Sum of squares over fixed chunks of 65536 elements of the logical tensor in FP64, chunk after chunk:
// sum[0] += that; nonfinite[0] += elements that are NaN or Inf (they do not enter the sum).
struct SumSquares {
  static constexpr const char* kName = "sum_squares";
  TensorView x;          // F32 or BF16 [n]
  TensorView sum;        // F64 [1]
  TensorView nonfinite;  // F64 [1]
  void check() const;
};

// momentum = beta * momentum + grad * grad_scale; update = grad * grad_scale + beta * momentum (Nesterov).
struct MuonMomentum {
  static constexpr const char* kName = "muon_momentum";
  TensorView grad;        // F32 or BF16 [n]
  TensorView grad_scale;  // F32 [1]
  TensorView momentum;    // F32 or BF16 [n], updated
  float beta;
  TensorView update;    // F32 [n]
  PhiloxKey store_key;  // momentum uses word 1
  int64_t first_element = 0;
  void check() const;
};

// master = master - lr * (scale * update + weight_decay * master), copy as in AdamWStep.
struct ApplyUpdate {
  static constexpr const char* kName = "apply_update";
  TensorView update;  // F32 [n]
  TensorView master;  // F32 or BF16 [n]
  TensorView copy;    // optional BF16 [n]
  float lr, scale, weight_decay;
  PhiloxKey store_key;  // master uses word 0
  int64_t first_element = 0;
  void check() const;
};

}  // namespace fp4t
