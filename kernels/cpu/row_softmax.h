// The distribution of one row of logits: softmax(logits / temperature) over the top-p set (definition in
// kernels/ops/loss.h). One source for the sampler and the trainer, so that both give the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/formats/math.h"

namespace fp4t::cpu {

// Element i goes to lane i mod 16; the lanes are then halved in a tree. The order depends on n alone.
constexpr int64_t kLanes = 16;

template <class Combine>
float lanes_reduce(const float* x, int64_t n, float start, const Combine& combine) {
  float lane[kLanes];
  std::fill(lane, lane + kLanes, start);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lane[j] = combine(lane[j], x[i + j]);
  }
  for (int64_t j = 0; i + j < n; ++j) lane[j] = combine(lane[j], x[i + j]);
  for (int64_t half = kLanes / 2; half >= 1; half /= 2) {
    for (int64_t j = 0; j < half; ++j) lane[j] = combine(lane[j], lane[j + half]);
  }
  return lane[0];
}

inline float lanes_sum(const float* x, int64_t n) {
  return lanes_reduce(x, n, 0.0f, [](float a, float b) { return a + b; });
}

// NaN is passed over; the sum of exponentials shows it.
inline float lanes_max(const float* x, int64_t n) {
  return lanes_reduce(x, n, -std::numeric_limits<float>::infinity(),
                      [](float a, float b) { return b > a ? b : a; });
}

// Loads row after row of one width. A row with NaN, +inf or nothing but -inf has no distribution: then
// finite() is false and lse, log_prob and entropy are NaN.
class RowSoftmax {
 public:
  RowSoftmax(int64_t width, float temperature, float top_p)
      : width_(width),
        temperature_(temperature),
        top_p_(top_p),
        shifted_(static_cast<size_t>(width)),
        weight_(static_cast<size_t>(width)),
        order_(static_cast<size_t>(top_p < 1.0f ? width : 0)) {}

  // `target` is inside the set whatever its probability; -1: no target.
  void load(const float* logits, int64_t target) {
    float* shifted = shifted_.data();
    for (int64_t i = 0; i < width_; ++i) shifted[i] = logits[i] / temperature_;
    max_ = lanes_max(shifted, width_);
    for (int64_t i = 0; i < width_; ++i) shifted[i] = shifted[i] - max_;
    float* weight = weight_.data();
    for (int64_t i = 0; i < width_; ++i) weight[i] = exp_f32(shifted[i]);
    sum_ = lanes_sum(weight, width_);
    if (top_p_ < 1.0f && finite()) restrict_to_top_p(target);
    log_sum_ = log_f32(sum_);
  }

  bool finite() const { return sum_ > 0.0f && sum_ < std::numeric_limits<float>::infinity(); }
  // exp(logits / temperature - max), exactly 0 outside the set.
  const float* weights() const { return weight_.data(); }
  float lse() const { return max_ + log_sum_; }
  // Of a token inside the set; never positive.
  float log_prob(int64_t token) const { return shifted_[static_cast<size_t>(token)] - log_sum_; }

  // -sum p log p = log sum - sum (weight * shifted) / sum. Overwrites the weights.
  float take_entropy() {
    float* weight = weight_.data();
    const float* shifted = shifted_.data();
    for (int64_t i = 0; i < width_; ++i) weight[i] = weight[i] == 0.0f ? 0.0f : weight[i] * shifted[i];
    return log_sum_ - lanes_sum(weight, width_) / sum_;
  }

 private:
  // Sets the weights outside the set to 0 and sums the rest.
  void restrict_to_top_p(int64_t target) {
    const float target_weight = target >= 0 ? weight_[static_cast<size_t>(target)] : 0.0f;
    // True when a comes after b: the heap's top is the most probable token, ties to the lower index.
    const auto after = [&](int32_t a, int32_t b) {
      const float x = shifted_[static_cast<size_t>(a)], y = shifted_[static_cast<size_t>(b)];
      return x < y || (x == y && a > b);
    };
    std::iota(order_.begin(), order_.end(), 0);
    std::make_heap(order_.begin(), order_.end(), after);
    const float needed = top_p_ * sum_;
    float mass = 0.0f;
    auto end = order_.end();
    while (end != order_.begin() && mass < needed) {
      std::pop_heap(order_.begin(), end, after);
      --end;
      mass = mass + weight_[static_cast<size_t>(*end)];
    }
    for (auto outside = order_.begin(); outside != end; ++outside) {
      weight_[static_cast<size_t>(*outside)] = 0.0f;
    }
    if (target >= 0) weight_[static_cast<size_t>(target)] = target_weight;
    sum_ = lanes_sum(weight_.data(), width_);
  }

  int64_t width_;
  float temperature_, top_p_;
  std::vector<float> shifted_;  // logits / temperature - max
  std::vector<float> weight_;
  std::vector<int32_t> order_;
  float max_ = 0.0f, sum_ = 0.0f, log_sum_ = 0.0f;
};

}  // namespace fp4t::cpu
