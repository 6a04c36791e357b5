// Token log-probabilities and their gradients: cross-entropy and policy losses are weights on them.
// The distribution of a row is softmax(logits / temperature), restricted to the top-p set when top_p < 1
// (the smallest set of most probable tokens whose mass reaches top_p, ties to the lower index; the
// target is always inside), so that what the sampler drew from is what the trainer scores. Masses are
// counted in units of 2^-30 of the largest probability, so the set depends on no order of summation.
#pragma once

#include "kernels/base/tensor.h"

namespace fp4t {

struct LogProbForward {
  static constexpr const char* kName = "log_prob_forward";
  TensorView logits;    // F32 [T, V]
  TensorView targets;   // I32 [T]; -1: row ignored (log_prob 0, entropy 0)
  float temperature;    // > 0
  float top_p;          // (0, 1]
  TensorView log_prob;  // F32 [T]
  TensorView lse;       // F32 [T], of logits / temperature over the set; of ignored rows too
  TensorView entropy;   // optional F32 [T], nats
  void check() const;
};

// dlogits = d/dlogits of sum over t of (d_log_prob[t] * log_prob[t] + d_lse[t] * lse[t] +
// d_entropy[t] * entropy[t]); ignored rows, and rows whose three weights are 0, give zeros. F32 dlogits
// may take the place of the logits.
struct LogProbBackward {
  static constexpr const char* kName = "log_prob_backward";
  TensorView logits;   // F32 [T, V]
  TensorView targets;  // I32 [T]
  float temperature;
  float top_p;
  TensorView lse;         // F32 [T], the forward's
  TensorView entropy;     // F32 [T], the forward's; only with d_entropy
  TensorView d_log_prob;  // F32 [T]
  TensorView d_lse;       // optional F32 [T]
  TensorView d_entropy;   // optional F32 [T]
  TensorView dlogits;     // act [T, V]
  void check() const;
};

}  // namespace fp4t
