// Definitions of the dense ops in FP64, written for reading: no order of summation, no rounding.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/support/ops.h"

namespace fp4t::test::reference {

inline double reciprocal_rms(const double* x, int64_t n, double eps) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return 1 / std::sqrt(sum / static_cast<double>(n) + eps);
}

inline Values rms_norm(const Values& x, const Values& weight, double eps) {
  const auto width = static_cast<int64_t>(weight.size());
  Values out(x.size());
  for (size_t begin = 0; begin < x.size(); begin += weight.size()) {
    const double r = reciprocal_rms(&x[begin], width, eps);
    for (size_t i = 0; i < weight.size(); ++i) out[begin + i] = x[begin + i] * r * weight[i];
  }
  return out;
}

struct Heads {
  int64_t heads, kv_heads, head_dim;
  int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
};

// Weights may be empty: no normalisation.
inline Values qk_norm_rope(const Values& qkv, const Heads& h, const std::vector<int32_t>& positions,
                           const Values& cos, const Values& sin, const Values& q_weight,
                           const Values& k_weight, double eps) {
  Values out = qkv;
  const int64_t half = h.head_dim / 2;
  for (int64_t t = 0; t < static_cast<int64_t>(positions.size()); ++t) {
    for (int64_t head = 0; head < h.heads + h.kv_heads; ++head) {
      double* x = &out[static_cast<size_t>(t * h.width() + head * h.head_dim)];
      if (!q_weight.empty()) {
        const Values& weight = head < h.heads ? q_weight : k_weight;
        const double r = reciprocal_rms(x, h.head_dim, eps);
        for (int64_t i = 0; i < h.head_dim; ++i) x[i] *= r * weight[static_cast<size_t>(i)];
      }
      for (int64_t i = 0; i < half; ++i) {
        const auto angle = static_cast<size_t>(positions[static_cast<size_t>(t)] * half + i);
        const double a = x[i], b = x[i + half];
        x[i] = a * cos[angle] - b * sin[angle];
        x[i + half] = a * sin[angle] + b * cos[angle];
      }
    }
  }
  return out;
}

// Row t attends rows doc_begin[t]..t. Also writes the log-sum-exp of each (row, head).
inline Values attention(const Values& qkv, const Heads& h, const std::vector<int32_t>& doc_begin,
                        double scale, Values& lse) {
  const auto tokens = static_cast<int64_t>(doc_begin.size());
  const int64_t dim = h.head_dim;
  Values out(static_cast<size_t>(tokens * h.heads * dim), 0.0);
  lse.assign(static_cast<size_t>(tokens * h.heads), 0.0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t head = 0; head < h.heads; ++head) {
      const int64_t kv = head / (h.heads / h.kv_heads), begin = doc_begin[static_cast<size_t>(t)];
      const double* q = &qkv[static_cast<size_t>(t * h.width() + head * dim)];
      Values p;
      double max = -INFINITY, sum = 0;
      for (int64_t j = begin; j <= t; ++j) {
        const double* k = &qkv[static_cast<size_t>(j * h.width() + (h.heads + kv) * dim)];
        double s = 0;
        for (int64_t i = 0; i < dim; ++i) s += q[i] * k[i];
        p.push_back(s * scale);
        max = std::max(max, p.back());
      }
      for (double& s : p) sum += s = std::exp(s - max);
      lse[static_cast<size_t>(t * h.heads + head)] = max + std::log(sum);
      for (int64_t j = begin; j <= t; ++j) {
        const double* v = &qkv[static_cast<size_t>(j * h.width() + (h.heads + h.kv_heads + kv) * dim)];
        for (int64_t i = 0; i < dim; ++i) {
          out[static_cast<size_t>((t * h.heads + head) * dim + i)] +=
              p[static_cast<size_t>(j - begin)] / sum * v[i];
        }
      }
    }
  }
  return out;
}

inline Values swiglu(const Values& gate_up, int64_t width, double clamp) {
  Values out(gate_up.size() / 2);
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t row = i / static_cast<size_t>(width), column = i % static_cast<size_t>(width);
    double g = gate_up[2 * row * static_cast<size_t>(width) + column];
    double u = gate_up[(2 * row + 1) * static_cast<size_t>(width) + column];
    if (clamp > 0) g = std::min(g, clamp), u = std::clamp(u, -clamp, clamp);
    out[i] = g / (1 + std::exp(-g)) * u;
  }
  return out;
}

}  // namespace fp4t::test::reference
