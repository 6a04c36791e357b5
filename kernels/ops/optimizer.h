// Pieces of optimizer steps. Masters and moments are F32, or BF16 stored by stochastic rounding.
// Every operation is a single FP32 one, from left to right as written; an update uses the new moments
// before they are stored. A BF16 copy is the stored master rounded to nearest, so that it can be derived
// again from a checkpoint.
// The three updates take `apply`: where it is given and holds 0, nothing is written, so that they can be
// enqueued before the host knows whether the update happens (ClipFactor).
#pragma once

#include <cmath>
#include <limits>

#include "kernels/base/host_device.h"
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
  TensorView apply = {};      // optional I32 [1]
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

// The same by chunk, for sums that several ranks make up: sums[c] = {squares, non-finite elements} of chunk c
// of x. A chunk ends with its matrix of `matrix` elements, so that chunks of experts do not depend on where
// they are; x begins with a chunk, at element `first` of the logical tensor.
struct SumSquaresChunks {
  static constexpr const char* kName = "sum_squares_chunks";
  static constexpr int64_t kChunk = 65536;
  TensorView x;  // F32 or BF16 [n]
  int64_t first, matrix;
  TensorView sums;  // F64 [chunks(), 2], written
  // Of the logical tensor; chunks do not overlap, so they are counted from its beginning.
  FP4T_HD int64_t chunks_a_matrix() const { return (matrix + kChunk - 1) / kChunk; }
  FP4T_HD int64_t chunk_at(int64_t element) const {
    return element / matrix * chunks_a_matrix() + (element % matrix + kChunk - 1) / kChunk;
  }
  FP4T_HD int64_t begin_of(int64_t chunk) const {
    const int64_t inside = chunk % chunks_a_matrix() * kChunk;
    return chunk / chunks_a_matrix() * matrix + inside;
  }
  // Elements of x that belong to its chunk c.
  struct Range {
    int64_t begin, end;
  };
  FP4T_HD Range range(int64_t c, int64_t n) const {
    const int64_t chunk = chunk_at(first) + c;
    const int64_t begin = begin_of(chunk) - first, end = begin_of(chunk + 1) - first;
    return {begin, end < n ? end : n};
  }
  int64_t chunks() const { return chunk_at(first + x.elements()) - chunk_at(first); }
  void check() const;
};

// Whether an update happens, and the factor that clips its gradients: none where any element was not finite
// or the norm sqrt(sum) is not; max_norm / norm where the norm exceeds max_norm > 0, else 1.
struct ClipDecision {
  bool apply;
  double factor;  // 1 where nothing is applied
};

FP4T_HD ClipDecision decide_clip(double sum, double nonfinite, double max_norm) {
  const double norm = std::sqrt(sum);
  if (nonfinite != 0.0 || !(norm <= std::numeric_limits<double>::max())) return {false, 1.0};
  return {true, max_norm > 0.0 && norm > max_norm ? max_norm / norm : 1.0};
}

// decide_clip where the sums of SumSquares are, for updates that are already enqueued when the host reads
// them.
struct ClipFactor {
  static constexpr const char* kName = "clip_factor";
  TensorView sum;          // F64 [1]
  TensorView nonfinite;    // F64 [1]
  double extra_nonfinite;  // counted elsewhere, added to nonfinite
  double max_norm;         // <= 0: no clipping
  TensorView factor;       // F32 [1]
  TensorView apply;        // I32 [1]: 1 or 0
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
  TensorView apply = {};
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
  TensorView apply = {};
  void check() const;
};

}  // namespace fp4t
