// The policy objective of a batch (kernels/formats/policy.h), so that a forward and its backward
// need no word from the host in between.
#pragma once

#include "kernels/base/tensor.h"
#include "kernels/formats/policy.h"

namespace fp4t {

// mean[t] = the mean of log_prob - old_log_prob over rows [begin[t], end[t]), in FP64: 32 partial sums of
// every 32nd row, added pairwise at distances 16, 8, 4, 2, 1. Rows of one range have the same; an empty range
// gives 0.
struct SequenceLogRatio {
  static constexpr const char* kName = "sequence_log_ratio";
  TensorView log_prob;      // F32 [T]
  TensorView old_log_prob;  // F32 [T]
  TensorView begin, end;    // I32 [T], ranges that either are the same or do not meet
  TensorView mean;          // F64 [T]
  void check() const;
};

// Of every row: loss, how it was clipped, and d_log_prob = fp32(d loss / d log_prob * weight) in FP64;
// d_entropy = fp32(-entropy's coefficient * weight). Rows of weight 0 are not scored: 0 in all of them,
// whatever their inputs hold.
struct PolicyObjective {
  static constexpr const char* kName = "policy_objective";
  TensorView log_prob;      // F32 [T], of the present weights
  TensorView old_log_prob;  // F32 [T], of the weights that sampled
  TensorView reference;     // F32 [T], of the reference policy; empty when terms.kl is 0
  TensorView advantage;     // F32 [T]
  TensorView weight;        // F64 [T]
  TensorView importance;    // F32 [T], f
  TensorView log_ratio;     // F64 [T], of completions; empty: of the token, log_prob - old_log_prob
  TensorView entropy;       // F32 [T]; empty when terms.entropy is 0
  PolicyTerms terms;
  TensorView loss;        // F32 [T]
  TensorView clipped;     // I32 [T], PolicyClipped
  TensorView d_log_prob;  // F32 [T]
  TensorView d_entropy;   // F32 [T]; empty when terms.entropy is 0
  void check() const;
};

}  // namespace fp4t
