// One token of the policy objective, one source for host and device; NUMERICS.md section 3.1.
// r: ratio of the present policy to the one before the first update, of the token or of its completion; A:
// advantage; f: what the ratio of trainer to sampler makes of the policy's term, a constant
// (engine/rl/mismatch.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/base/host_device.h"

namespace fp4t {

enum class PolicyClipForm : uint8_t {
  kPpo,    // -min(r A, clip(r) A); with `dual` c: for A < 0 not above -c A
  kCispo,  // -clip(r) A log p, the weight clip(r) a constant (arXiv 2506.13585)
  kNone,   // -r A
};

// With d = log p_ref - log p: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1.
enum class KlEstimator : uint8_t { kK1, kK2, kK3 };

struct PolicyTerms {
  PolicyClipForm form = PolicyClipForm::kPpo;
  double low = 0, high = 0;  // the ratio stays in [1 - low, 1 + high]
  double dual = 0;           // above 1; 0: off
  double kl = 0;             // coefficient of the penalty to the reference policy, 0: none
  KlEstimator estimator = KlEstimator::kK3;
  double entropy = 0;  // coefficient of the entropy bonus, 0: none
};

// Of one token.
struct PolicyInput {
  float log_prob, reference, advantage;
  double log_ratio;  // of the token, or the mean over its completion
  float importance;  // f
  float entropy;     // of the token's distribution
};

// Which bound holds the ratio where the gradient of the policy's term ends or, with kCispo, its weight is
// cut.
enum PolicyClipped : int32_t { kNotClipped = 0, kClippedLow = 1, kClippedHigh = 2, kClippedDual = 3 };

struct TokenObjective {
  float loss;        // contribution before averaging
  float d_log_prob;  // derivative of the loss with respect to the current log-probability
  int32_t clipped;   // PolicyClipped
};

struct PolicySlope {
  double loss, slope;
};

// The policy's term and its derivative, without f. The derivative of a completion's ratio is taken as that of
// r_t = sg(r / p_t) p_t (GSPO-token, arXiv 2507.18071 section 4.3), which over a completion sums to the
// ratio's own.
FP4T_HD PolicySlope policy_term(double log_prob, double ratio, double a, const PolicyTerms& terms,
                                int32_t& clipped) {
  const double held =
      terms.form == PolicyClipForm::kNone ? ratio : std::clamp(ratio, 1 - terms.low, 1 + terms.high);
  clipped = kNotClipped;
  if (terms.form == PolicyClipForm::kCispo) {
    if (a != 0 && held != ratio) clipped = held > ratio ? kClippedLow : kClippedHigh;
    return {-held * a * log_prob, -held * a};
  }
  // min(r A, clip(r) A): where the clipped branch is the smaller one, the gradient is zero.
  if (held * a < ratio * a) {
    clipped = held > ratio ? kClippedLow : kClippedHigh;
    return {-held * a, 0};
  }
  if (terms.dual > 0 && a < 0 && ratio * a < terms.dual * a) {
    clipped = kClippedDual;
    return {-terms.dual * a, 0};
  }
  return {-ratio * a, -ratio * a};
}

// The estimate and its derivative with respect to the current log-probability, d = log p_ref - log p.
// Beyond d = 20 k3 goes on as a straight line, so that neither it nor its slope leaves FP32.
FP4T_HD PolicySlope kl_term(double d, KlEstimator estimator) {
  constexpr double kLimit = 20.0;
  if (estimator == KlEstimator::kK1) return {-d, 1};
  if (estimator == KlEstimator::kK2) return {d * d / 2, -d};
  const double e = std::exp(std::min(d, kLimit));
  return {e * (1 + std::max(d - kLimit, 0.0)) - d - 1, 1 - e};
}

// f * policy_term + kl * kl_term - entropy * H. Log-ratios of new to old are limited to +-20: exp(20) is far
// beyond any clip and far from overflow. The bonus's derivative goes another way (d_entropy of
// PolicyObjective).
FP4T_HD TokenObjective policy_token(const PolicyInput& in, const PolicyTerms& terms) {
  constexpr double kLimit = 20.0;
  const double now = static_cast<double>(in.log_prob);
  TokenObjective out{};
  double loss = 0, slope = 0;
  if (in.importance != 0) {  // what a masked token holds does not matter
    const double ratio = std::exp(std::clamp(in.log_ratio, -kLimit, kLimit));
    const PolicySlope policy = policy_term(now, ratio, static_cast<double>(in.advantage), terms, out.clipped);
    loss = static_cast<double>(in.importance) * policy.loss;
    slope = static_cast<double>(in.importance) * policy.slope;
  }
  if (terms.kl > 0) {
    const PolicySlope kl = kl_term(static_cast<double>(in.reference) - now, terms.estimator);
    loss += terms.kl * kl.loss;
    slope += terms.kl * kl.slope;
  }
  if (terms.entropy > 0) loss -= terms.entropy * static_cast<double>(in.entropy);
  out.loss = static_cast<float>(loss);
  out.d_log_prob = static_cast<float>(slope);
  return out;
}

// Where sums over a completion are split: lane l adds elements l, l + 32, ...; then lanes are added pairwise.
constexpr int kSequenceLanes = 32;

}  // namespace fp4t
