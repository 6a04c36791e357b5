// The distribution of one row of logits as kernels/ops/loss.h defines it, plainly and in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace fp4t::test {

struct Distribution {
  std::vector<bool> inside;
  std::vector<double> p;  // 0 outside
  double lse = 0, entropy = 0;

  double log_prob(const std::vector<double>& z, int64_t token) const {
    return z[static_cast<size_t>(token)] - lse;
  }
};

// The top-p set of z = logits / temperature; `target` joins it, -1: none.
inline std::vector<bool> top_p_set(const std::vector<double>& z, double top_p, int64_t target) {
  std::vector<size_t> order(z.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return z[a] > z[b]; });
  double total = 0, mass = 0;
  for (double v : z) total += std::exp(v - z[order[0]]);
  std::vector<bool> inside(z.size(), top_p >= 1);
  for (size_t i = 0; i < order.size() && mass < top_p * total; ++i) {
    inside[order[i]] = true;
    mass += std::exp(z[order[i]] - z[order[0]]);
  }
  if (target >= 0) inside[static_cast<size_t>(target)] = true;
  return inside;
}

inline Distribution distribution(const std::vector<double>& z, std::vector<bool> inside) {
  Distribution d;
  d.inside = std::move(inside);
  d.p.assign(z.size(), 0.0);
  const double largest = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (size_t i = 0; i < z.size(); ++i) sum += d.inside[i] ? std::exp(z[i] - largest) : 0.0;
  d.lse = largest + std::log(sum);
  for (size_t i = 0; i < z.size(); ++i) {
    if (!d.inside[i]) continue;
    d.p[i] = std::exp(z[i] - d.lse);
    if (d.p[i] > 0) d.entropy -= d.p[i] * (z[i] - d.lse);
  }
  return d;
}

inline std::vector<double> tempered(const float* logits, int64_t vocab, double temperature) {
  std::vector<double> z(logits, logits + vocab);
  for (double& v : z) v /= temperature;
  return z;
}

}  // namespace fp4t::test
