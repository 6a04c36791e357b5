#include "engine/rl/policy.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/base/philox.h"

namespace fp4t {

namespace {

KlEstimator estimator_of(const ObjectiveSpec& spec) {
  if (spec.kl_estimator == "k1") return KlEstimator::kK1;
  return spec.kl_estimator == "k2" ? KlEstimator::kK2 : KlEstimator::kK3;
}

}  // namespace

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

std::vector<float> leave_one_out_advantages(const std::vector<float>& rewards, int64_t samples_per_prompt) {
  FP4T_CHECK(samples_per_prompt >= 2, samples_per_prompt, " samples leave no others");
  const auto n = static_cast<size_t>(samples_per_prompt);
  FP4T_CHECK_EQ(rewards.size() % n, size_t{0}, "rewards do not fill whole groups");
  std::vector<float> advantages(rewards.size());
  for (size_t g = 0; g < rewards.size(); g += n) {
    double mean = 0;
    for (size_t i = 0; i < n; ++i) mean += static_cast<double>(rewards[g + i]);
    mean /= static_cast<double>(n);
    bool equal = true;
    for (size_t i = 0; i < n; ++i) equal = equal && rewards[g + i] == rewards[g];
    const double scale = static_cast<double>(n) / static_cast<double>(n - 1);
    for (size_t i = 0; i < n; ++i) {
      advantages[g + i] =
          equal ? 0.0f : static_cast<float>(scale * (static_cast<double>(rewards[g + i]) - mean));
    }
  }
  return advantages;
}

std::vector<float> advantages_of(const std::vector<float>& rewards, int64_t samples_per_prompt,
                                 const ObjectiveSpec& spec) {
  if (spec.baseline == "leave_one_out") return leave_one_out_advantages(rewards, samples_per_prompt);
  return group_advantages(rewards, samples_per_prompt, spec.normalise_std);
}

std::vector<int64_t> equal_groups(const std::vector<float>& rewards, int64_t samples_per_prompt) {
  FP4T_CHECK(samples_per_prompt >= 1, samples_per_prompt, " samples");
  std::vector<int64_t> groups;
  for (auto g = rewards.begin(); g + samples_per_prompt <= rewards.end(); g += samples_per_prompt) {
    const bool equal = std::all_of(g, g + samples_per_prompt, [&](float x) { return x == *g; });
    if (equal) groups.push_back((g - rewards.begin()) / samples_per_prompt);
  }
  return groups;
}

double overlong_reward(int64_t tokens, int64_t max_tokens, const ObjectiveSpec& spec) {
  const int64_t over = tokens - (max_tokens - spec.overlong_tokens);
  if (spec.overlong_tokens == 0 || over <= 0) return 0;
  return -spec.overlong_penalty *
         std::min(static_cast<double>(over) / static_cast<double>(spec.overlong_tokens), 1.0);
}

std::vector<float> shaped_rewards(const Rollout& r, int64_t max_tokens, int64_t positions,
                                  const ObjectiveSpec& spec) {
  const bool penalises_kl = spec.kl > 0 && spec.kl_in == "reward";
  if (spec.overlong_tokens == 0 && !penalises_kl) return r.rewards;
  const KlEstimator estimator = estimator_of(spec);
  std::vector<float> shaped;
  for (size_t i = 0; i < r.rewards.size(); ++i) {
    const size_t problem = i / static_cast<size_t>(r.samples_per_prompt);
    const int64_t own = r.problems[problem].max_tokens;
    // The last token is drawn at the last position and needs none of its own.
    const int64_t room = positions - static_cast<int64_t>(r.prompts[problem].size()) + 1;
    const int64_t limit = std::min({own > 0 ? own : max_tokens, max_tokens, room});
    double reward = static_cast<double>(r.rewards[i]) +
                    overlong_reward(static_cast<int64_t>(r.completions[i].size()), limit, spec);
    for (size_t t = 0; penalises_kl && t < r.completions[i].size(); ++t) {
      const double d =
          static_cast<double>(r.reference_log_probs[i][t]) - static_cast<double>(r.old_log_probs[i][t]);
      reward -= spec.kl * kl_term(d, estimator).loss;
    }
    shaped.push_back(static_cast<float>(reward));
  }
  return shaped;
}

PolicyTerms policy_terms(const ObjectiveSpec& spec) {
  PolicyTerms terms;
  terms.form = spec.clip_form == "cispo"  ? PolicyClipForm::kCispo
               : spec.clip_form == "none" ? PolicyClipForm::kNone
                                          : PolicyClipForm::kPpo;
  terms.low = spec.clip_low;
  terms.high = spec.clip_high;
  terms.dual = spec.clip_dual;
  terms.kl = spec.kl_in == "loss" ? spec.kl : 0.0;
  terms.estimator = estimator_of(spec);
  terms.entropy = spec.entropy;
  return terms;
}

double Divisor::weight(const ObjectiveSpec& spec, size_t completion_tokens) const {
  if (spec.average == "sequence") return 1.0 / (sequences * static_cast<double>(completion_tokens));
  if (spec.average == "constant") return 1.0 / (nominal_sequences * static_cast<double>(spec.average_tokens));
  return 1.0 / tokens;
}

Divisor divisor_of(const Rollout& rollout, const std::vector<int64_t>& list, const ObjectiveSpec& spec) {
  Divisor d;
  for (const int64_t i : list)
    d.tokens += static_cast<double>(rollout.completions[static_cast<size_t>(i)].size());
  d.sequences = static_cast<double>(list.size());
  d.nominal_sequences = static_cast<double>(rollout.size()) / static_cast<double>(spec.mini_batches);
  return d;
}

std::vector<std::vector<int64_t>> mini_batches(const Rollout& rollout, const ObjectiveSpec& spec,
                                               uint64_t seed, int64_t step) {
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < rollout.size(); ++i) {
    const auto at = static_cast<size_t>(i);
    if (spec.drop_zero_advantage && rollout.advantages[at] == 0.0f) continue;
    if (spec.mask_truncated && !rollout.finished[at]) continue;
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
