#include "engine/rl/policy.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/base/philox.h"

namespace fp4t {

std::vector<float> group_advantages(const std::vector<float>& rewards, int64_t samples_per_prompt,
                                    bool normalise_std) {
  FP4T_CHECK(samples_per_prompt >= 1, samples_per_prompt, " samples");
  const auto n = static_cast<size_t>(samples_per_prompt);
  FP4T_CHECK_EQ(rewards.size() % n, size_t{0}, "rewards do not fill whole groups");
  std::vector<float> advantages(rewards.size());
  for (size_t g = 0; g < rewards.size(); g += n) {
    double mean = 0;
    for (size_t i = 0; i < n; ++i) mean += static_cast<double>(rewards[g + i]);
    mean /= static_cast<double>(n);
    double squares = 0;
    for (size_t i = 0; i < n; ++i) {
      const double d = static_cast<double>(rewards[g + i]) - mean;
      squares += d * d;
    }
    double scale = 1.0;
    if (normalise_std) scale = n > 1 ? 1.0 / (std::sqrt(squares / static_cast<double>(n - 1)) + 1e-6) : 0.0;
    for (size_t i = 0; i < n; ++i) {
      // A group of equal rewards has no signal, whatever the mean's rounding.
      const double d = squares == 0 ? 0.0 : static_cast<double>(rewards[g + i]) - mean;
      advantages[g + i] = static_cast<float>(d * scale);
    }
  }
  return advantages;
}

TokenObjective grpo_token(float log_prob, float old_log_prob, float reference_log_prob, float advantage,
                          const ObjectiveSpec& spec) {
  return policy_token(log_prob, old_log_prob, reference_log_prob, advantage, policy_clip(spec));
}

std::vector<std::vector<int64_t>> mini_batches(const Rollout& rollout, const ObjectiveSpec& spec,
                                               uint64_t seed, int64_t step) {
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < rollout.size(); ++i) {
    if (spec.drop_zero_advantage && rollout.advantages[static_cast<size_t>(i)] == 0.0f) continue;
    kept.push_back(i);
  }
  std::vector<std::vector<int64_t>> lists;
  for (int64_t epoch = 0; epoch < spec.epochs; ++epoch) {
    std::vector<int64_t> order = kept;
    const PhiloxKey key =
        site_key(seed, Purpose::kMiniBatch, 0, 0, static_cast<uint32_t>(step), static_cast<uint32_t>(epoch));
    for (size_t i = order.size(); i > 1; --i) {
      const PhiloxBits bits = site_draw(key, i);
      const uint64_t word = uint64_t{bits.word[0]} << 32 | bits.word[1];
      std::swap(order[i - 1], order[word % i]);
    }
    const auto n = static_cast<int64_t>(order.size());
    for (int64_t b = 0; b < spec.mini_batches; ++b) {
      const int64_t begin = n * b / spec.mini_batches, end = n * (b + 1) / spec.mini_batches;
      lists.emplace_back(order.begin() + begin, order.begin() + end);
    }
  }
  return lists;
}

}  // namespace fp4t
