// Mixture of experts: routing, permutation, combine. No token is ever dropped.
// T tokens, E experts, k = top_k. Rows of the permuted order are sorted by expert, then by token.
#pragma once

#include "kernels/base/tensor.h"

namespace fp4t {

enum class RouterKind : uint8_t { kSoftmax, kSigmoid };

// logits = x W^T in FP32, accumulated k = 0..D-1 by fma.
struct RouterLogits {
  static constexpr const char* kName = "router_logits";
  TensorView x;       // act [T, D]
  TensorView weight;  // F32 [E, D]
  TensorView logits;  // F32 [T, E]
  void check() const;
};

struct RouterLogitsBackward {
  static constexpr const char* kName = "router_logits_backward";
  TensorView x;        // act [T, D]
  TensorView weight;   // F32 [E, D]
  TensorView dlogits;  // F32 [T, E]
  TensorView dx;       // F32 [T, D], written
  TensorView dweight;  // F32 [E, D], added to
  void check() const;
};

// Scores by softmax or sigmoid (kernels/formats/math.h, so Bitwise); experts chosen by score + bias, ties
// to the lower index (NaN counts as largest, so that it stays visible in the gates); gates are the chosen
// scores without bias, divided by their sum when `normalise` (a sum of 0 gives gates of 0), times
// `gate_scale`. Where a token's `replay` names experts, these take the place of its choice, in that order;
// the scores stay its own.
struct Route {
  static constexpr const char* kName = "route";
  TensorView logits;  // F32 [T, E]
  TensorView bias;    // F32 [E]
  RouterKind kind;
  int64_t top_k;
  bool normalise;
  float gate_scale;
  TensorView scores;        // F32 [T, E]
  TensorView experts;       // I32 [T, k], by descending score + bias
  TensorView gates;         // F32 [T, k]
  TensorView offsets;       // I32 [E + 1], first permuted row of each expert
  TensorView row_of;        // I32 [T, k], permuted row of each (token, choice)
  TensorView token_of;      // I32 [T * k], token of each permuted row
  TensorView replay = {};   // optional I32 [T, k]; a row that begins with -1: the token's own choice
  TensorView differs = {};  // with replay I32 [T]: 1 where the own choice is another set of experts, else 0
  void check() const;
};

// Balance statistics and the auxiliary losses of one micro-batch, added to `sums`:
//   sums[0] += z = sum over tokens of (log-sum-exp of logits)^2
//   sums[1] += aux = E * sum over e of f_e * p_e * T, f_e = count_e / (T k), p_e = mean score of e
//              (scores normalised to sum 1 for sigmoid); 1 * T for uniform routing (Switch, Fedus 2021)
// and `load` [E] += tokens of each expert.
struct RouterStats {
  static constexpr const char* kName = "router_stats";
  TensorView logits, scores;  // F32 [T, E]
  TensorView offsets;         // I32 [E + 1]
  RouterKind kind;
  int64_t top_k;
  TensorView sums;  // F64 [2]
  TensorView load;  // I64 [E]
  void check() const;
};

// Gradient of gates, auxiliary loss and z-loss with respect to the logits.
//   total = <gates, dgates> + aux_coefficient * aux + z_coefficient * z, aux and z as in RouterStats
// (counts are constants; the caller puts the normalisation by tokens into the coefficients).
struct RouteBackward {
  static constexpr const char* kName = "route_backward";
  TensorView logits, scores;  // F32 [T, E]
  TensorView experts;         // I32 [T, k]
  TensorView offsets;         // I32 [E + 1]
  TensorView dgates;          // F32 [T, k]
  RouterKind kind;
  bool normalise;
  float gate_scale;
  float aux_coefficient, z_coefficient;
  TensorView dlogits;  // F32 [T, E]
  void check() const;
};

// out[r, :] = x[token_of[r], :], whatever the rows hold.
struct PermuteRows {
  static constexpr const char* kName = "permute_rows";
  TensorView x;         // any type [T, D]
  TensorView token_of;  // I32 [R]
  TensorView out;       // x's type [R, D]
  // Optional I32 [T, R / T], the inverse: token_of[row_of[t, j]] = t. A GPU then reads every row once.
  TensorView row_of = {};
  void check() const;
};

// out[t] = ((tree sum over the token's experts of gate * y) + shared) + residual, in FP32, rounded once.
// The tree halves [0, E) at floor((a + b) / 2); absent experts are skipped. Without gates the weights
// are 1 (the backward's sum of input gradients).
// Where experts lie on several ranks (DESIGN.md section 6), `partial` sums those of a token's choices that
// are here: `experts` is -1 for the others, whose row and gate are not looked at, y has any number of rows,
// and a token without any gets 0 before the addends.
struct CombineExperts {
  static constexpr const char* kName = "combine_experts";
  TensorView y;        // act or F32 [T * k, D], permuted rows
  TensorView row_of;   // I32 [T, k]
  TensorView experts;  // I32 [T, k]
  TensorView gates;    // optional F32 [T, k]
  int64_t num_experts;
  TensorView shared;    // optional act [T, D]
  TensorView residual;  // optional act or F32 [T, D]
  TensorView out;       // act or F32 [T, D]
  bool partial = false;
  void check() const;
};

// dy[row_of[t, j], :] = gates[t, j] * dout[t, :];  dgates[t, j] = <dout[t], y[row_of[t, j]]> summed in
// index order in FP32. Without `row_of`, row by row: k = 1, and token t is row t; `dout_of` says which row of
// dout each has.
struct CombineExpertsBackward {
  static constexpr const char* kName = "combine_experts_backward";
  TensorView dout;          // act [T, D]; with dout_of any number of rows
  TensorView y;             // act [T * k, D]
  TensorView row_of;        // I32 [T, k], or empty
  TensorView gates;         // F32 [T, k]
  TensorView dy;            // act [T * k, D]; may alias y
  TensorView dgates;        // F32 [T, k]
  TensorView dout_of = {};  // optional I32 [T], all in range
  void check() const;
};

// bias[e] += rate * sign(mean load - load[e]); once a step (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
struct UpdateExpertBias {
  static constexpr const char* kName = "update_expert_bias";
  TensorView load;  // I64 [E]
  float rate;
  TensorView bias;  // F32 [E]
  void check() const;
};

}  // namespace fp4t
