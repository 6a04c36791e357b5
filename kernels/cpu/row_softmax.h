// The distribution of one row of logits: softmax(logits / temperature) over the top-p set (definition in
// kernels/ops/loss.h). One source for the sampler and the trainer, so that both give the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
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

// A weight relative to the largest, in units of 2^-30: what draws and top-p masses count in.
inline int32_t fixed_point(float weight) { return static_cast<int32_t>(weight * 0x1p30f); }

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
        key_(static_cast<size_t>(top_p < 1.0f ? width : 0)),
        fixed_(key_.size()) {}

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
  // Mass of the tokens whose key is at most `last`.
  int64_t mass_within(int32_t last) const {
    const int32_t *key = key_.data(), *fixed = fixed_.data();
    int64_t mass = 0;
    for (int64_t i = 0; i < width_; ++i) mass += key[i] <= last ? fixed[i] : 0;
    return mass;
  }

  // Sets the weights outside the set to 0 and sums the rest. The key of a token, the bits of max - logit,
  // orders tokens by falling probability; masses are integers, so no order of summation matters.
  void restrict_to_top_p(int64_t target) {
    int32_t *key = key_.data(), *fixed = fixed_.data();
    float* weight = weight_.data();
    const float target_weight = target >= 0 ? weight[target] : 0.0f;
    for (int64_t i = 0; i < width_; ++i) {
      key[i] = static_cast<int32_t>(bits_of(shifted_[static_cast<size_t>(i)]) & 0x7FFFFFFFu);
      fixed[i] = fixed_point(weight[i]);
    }
    // Beyond a distance of 21 every weight is less than one unit (e^-21 < 2^-30).
    int32_t low = 0, high = static_cast<int32_t>(bits_of(21.0f));
    const double total = static_cast<double>(mass_within(high));
    const int64_t needed = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(double{top_p_} * total)));
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      if (mass_within(middle) >= needed) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    // Of the equally probable tokens at the border, the lower indices until the mass is reached.
    int64_t mass = low == 0 ? 0 : mass_within(low - 1);
    for (int64_t i = 0; i < width_; ++i) {
      const bool inside = key[i] < low || (key[i] == low && mass < needed);
      mass += key[i] == low ? fixed[i] : 0;
      weight[i] = inside ? weight[i] : 0.0f;
    }
    if (target >= 0) weight[target] = target_weight;
    sum_ = lanes_sum(weight, width_);
  }

  int64_t width_;
  float temperature_, top_p_;
  std::vector<float> shifted_;  // logits / temperature - max
  std::vector<float> weight_;
  std::vector<int32_t> key_, fixed_;  // only for top_p < 1
  float max_ = 0.0f, sum_ = 0.0f, log_sum_ = 0.0f;
};

}  // namespace fp4t::cpu
