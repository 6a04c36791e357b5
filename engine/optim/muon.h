// Muon (Jordan et al. 2024): the update of a matrix is its momentum made orthogonal by Newton-Schulz
// iterations. All in FP32.
#pragma once

#include <vector>

#include "engine/plan/parameters.h"
#include "kernels/base/arena.h"
#include "kernels/base/queue.h"

namespace fp4t {

// Rows [begin, begin + count) of a parameter seen as one tall matrix [rows, columns].
struct RowSlice {
  int64_t begin, count;
};

// The matrices of a parameter that are made orthogonal one by one: q, k and v, gate and up, every expert.
std::vector<RowSlice> muon_matrices(const ParamInfo& info, const ModelSpec& model);

// Whether Muon updates this parameter: weights of linear layers but the head.
bool is_muon_parameter(const ParamInfo& info);

// Scratch for the largest matrix of a list of parameters.
class NewtonSchulz {
 public:
  NewtonSchulz(Queue& queue, Arena& arena, const std::vector<ParamInfo>& parameters);

  // x [rows, columns] F32 becomes an approximately orthogonal matrix times sqrt(max(1, rows / columns)); all
  // singular values end near 1 times that. A matrix of zeros stays as it is.
  void orthogonalise(const TensorView& x, int64_t iterations);

 private:
  // x becomes a x + b (x x^T) x + c (x x^T)^2 x.
  void iterate(const TensorView& x);
  double frobenius_norm(const TensorView& x);

  Queue& queue_;
  TensorView product_;                 // F32, elements of the largest matrix
  TensorView gram_, square_, factor_;  // F32, square of the largest short side
  TensorView sum_, nonfinite_;         // F64 [1]
};

}  // namespace fp4t
