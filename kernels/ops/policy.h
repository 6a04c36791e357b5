// The clipped policy objective of a batch (kernels/formats/policy.h), so that a forward and its backward
// need no word from the host in between.
#pragma once

#include "kernels/base/tensor.h"
#include "kernels/formats/policy.h"

namespace fp4t {

// Of every row: loss, whether it was clipped, and d_log_prob = fp32(d loss / d log_prob * weight) in FP64.
// Rows of weight 0 are not scored: 0 in all three, whatever their inputs hold.
struct PolicyObjective {
  static constexpr const char* kName = "policy_objective";
  TensorView log_prob;      // F32 [T], of the present weights
  TensorView old_log_prob;  // F32 [T], of the weights that sampled
  TensorView reference;     // F32 [T], of the reference policy; empty when clip.kl is 0
  TensorView advantage;     // F32 [T]
  TensorView weight;        // F64 [T]
  PolicyClip clip;
  TensorView loss;        // F32 [T]
  TensorView clipped;     // I32 [T], 0 or 1
  TensorView d_log_prob;  // F32 [T]
  void check() const;
};

}  // namespace fp4t
