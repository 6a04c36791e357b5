// One token of the clipped policy objective, one source for host and device; NUMERICS.md section 3.1.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/base/host_device.h"

namespace fp4t {

struct PolicyClip {
  double low, high;  // the ratio stays in [1 - low, 1 + high]
  double kl;         // coefficient of the penalty to the reference policy, 0: none
};

struct TokenObjective {
  float loss;        // contribution before averaging
  float d_log_prob;  // derivative of the loss with respect to the current log-probability
  bool clipped;
};

// -min(r A, clip(r, 1 - low, 1 + high) A) + kl * k3, r = exp(now - old), k3 = exp(ref - now) - (ref - now) -
// 1, with log-ratios limited to +-20 so that no exp overflows.
FP4T_HD TokenObjective policy_token(float log_prob, float old_log_prob, float reference_log_prob,
                                    float advantage, const PolicyClip& clip) {
  constexpr double kLimit = 20.0;  // exp(20) is far beyond any clip and far from overflow
  const double now = static_cast<double>(log_prob);
  const double a = static_cast<double>(advantage);
  const double ratio = std::exp(std::clamp(now - static_cast<double>(old_log_prob), -kLimit, kLimit));
  const double clipped_ratio = std::clamp(ratio, 1 - clip.low, 1 + clip.high);
  TokenObjective out{};
  // min(r A, clip(r) A): where the clipped branch is the smaller one, the gradient is zero.
  out.clipped = clipped_ratio * a < ratio * a;
  double loss = -std::min(ratio * a, clipped_ratio * a);
  double slope = out.clipped ? 0.0 : -ratio * a;
  if (clip.kl > 0) {
    const double d = std::clamp(static_cast<double>(reference_log_prob) - now, -kLimit, kLimit);
    const bool inside = std::abs(static_cast<double>(reference_log_prob) - now) <= kLimit;
    loss += clip.kl * (std::exp(d) - d - 1);
    if (inside) slope += clip.kl * (1 - std::exp(d));
  }
  out.loss = static_cast<float>(loss);
  out.d_log_prob = static_cast<float>(slope);
  return out;
}

}  // namespace fp4t
