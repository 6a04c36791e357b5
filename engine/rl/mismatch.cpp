#include "engine/rl/mismatch.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/base/check.h"

namespace fp4t {

namespace {

constexpr double kLimit = 20.0;  // exp(20) is far beyond any bound and far from overflow

double log_rho(float old_log_prob, float log_prob) {
  return std::clamp(static_cast<double>(old_log_prob) - static_cast<double>(log_prob), -kLimit, kLimit);
}

bool outside(double x, double low, double high) { return high > 0 && (x < low || x > high); }

}  // namespace

std::vector<float> importance_of(const std::vector<float>& old_log_probs, const std::vector<float>& log_probs,
                                 const MismatchSpec& spec, MismatchCounts& counts) {
  FP4T_CHECK_EQ(old_log_probs.size(), log_probs.size());
  const size_t n = log_probs.size();
  double sum = 0;
  bool veto = false;
  for (size_t t = 0; t < n; ++t) {
    const double d = log_rho(old_log_probs[t], log_probs[t]);
    sum += d;
    veto = veto || std::exp(d) < spec.veto;
  }
  const double geometric = n > 0 ? std::exp(sum / static_cast<double>(n)) : 1.0;
  const bool masked = outside(geometric, spec.sequence_low, spec.sequence_high);
  counts.vetoed += veto;
  counts.sequences_masked += masked;
  if (veto || masked) {
    counts.left_out += static_cast<int64_t>(n);
    return std::vector<float>(n, 0.0f);
  }
  std::vector<float> f(n, 1.0f);
  for (size_t t = 0; t < n; ++t) {
    const double rho = std::exp(log_rho(old_log_probs[t], log_probs[t]));
    if (outside(rho, spec.token_low, spec.token_high)) {
      f[t] = 0;
      ++counts.masked;
      ++counts.left_out;
    } else if (spec.importance == "truncated") {
      f[t] = static_cast<float>(std::min(rho, spec.cap));
      counts.truncated += rho > spec.cap;
    } else if (spec.importance == "raw") {
      f[t] = static_cast<float>(rho);
    }
  }
  return f;
}

void MismatchSums::add(const std::vector<float>& old_log_probs, const std::vector<float>& log_probs) {
  FP4T_CHECK_EQ(old_log_probs.size(), log_probs.size());
  for (size_t t = 0; t < log_probs.size(); ++t) {
    const double d = static_cast<double>(old_log_probs[t]) - static_cast<double>(log_probs[t]);
    const double c = std::clamp(d, -kLimit, kLimit), ratio = std::exp(c);
    const double middle = std::log1p(std::expm1(c) / 2);  // log((1 + rho) / 2)
    tokens += 1;
    equal += std::memcmp(&old_log_probs[t], &log_probs[t], sizeof(float)) == 0;
    difference += std::abs(d);
    largest = std::max(largest, std::abs(d));
    generation_kl += std::expm1(c) - c;
    policy_kl += ratio * c - std::expm1(c);
    js += 0.5 * (ratio * (c - middle) - middle);
    error += std::expm1(std::abs(c));
    rho += ratio;
    rho_square += ratio * ratio;
  }
}

}  // namespace fp4t
