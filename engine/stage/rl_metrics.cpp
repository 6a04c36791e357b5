#include "engine/stage/rl_metrics.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "engine/rl/mismatch.h"
#include "engine/rl/policy.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof(float)) == 0; }

struct Lengths {
  double sum = 0, least = 0, most = 0, count = 0;
  void add(double n) {
    least = count == 0 ? n : std::min(least, n);
    most = std::max(most, n);
    sum += n;
    count += 1;
  }
  double mean() const { return count > 0 ? sum / count : 0.0; }
};

void add_lengths(MetricsRecord& record, const Rollout& r) {
  Lengths finished, cut;
  for (size_t i = 0; i < r.completions.size(); ++i) {
    (r.finished[i] ? finished : cut).add(static_cast<double>(r.completions[i].size()));
  }
  record.numbers.insert(record.numbers.end(),
                        {{"truncated", cut.count / std::max(1.0, cut.count + finished.count)},
                         {"length_finished_min", finished.least},
                         {"length_finished_mean", finished.mean()},
                         {"length_finished_max", finished.most},
                         {"length_truncated_mean", cut.mean()}});
}

void add_log_probs(MetricsRecord& record, const Rollout& r, const MismatchSpec& spec) {
  MismatchSums sums;
  MismatchCounts counts;
  for (size_t i = 0; i < r.completions.size(); ++i) {
    sums.add(r.old_log_probs[i], r.log_probs[i]);
    importance_of(r.old_log_probs[i], r.log_probs[i], spec, counts);
  }
  const double tokens = std::max(1.0, sums.tokens), sequences = std::max(1.0, static_cast<double>(r.size()));
  record.numbers.insert(record.numbers.end(),
                        {{"logprob_equal_fraction", sums.mean(sums.equal)},
                         {"logprob_difference_mean", sums.mean(sums.difference)},
                         {"logprob_difference_max", sums.largest},
                         {"generation_kl", sums.mean(sums.generation_kl)},
                         {"policy_kl", sums.mean(sums.policy_kl)},
                         {"generation_js", sums.mean(sums.js)},
                         {"multiplicative_error", sums.mean(sums.error)},
                         {"rho_mean", sums.mean(sums.rho)},
                         {"rho_chi_square", sums.chi_square()},
                         {"effective_share", sums.effective_share()},
                         {"rho_truncated", static_cast<double>(counts.truncated) / tokens},
                         {"rho_masked", static_cast<double>(counts.masked) / tokens},
                         {"rho_left_out", static_cast<double>(counts.left_out) / tokens},
                         {"sequences_masked", static_cast<double>(counts.sequences_masked) / sequences},
                         {"sequences_vetoed", static_cast<double>(counts.vetoed) / sequences}});
}

}  // namespace

double mean_reward(const Rollout& r) {
  double sum = 0;
  for (float x : r.rewards) sum += static_cast<double>(x);
  return sum / std::max(1.0, static_cast<double>(r.rewards.size()));
}

int64_t completion_tokens(const Rollout& r) {
  int64_t n = 0;
  for (const auto& c : r.completions) n += static_cast<int64_t>(c.size());
  return n;
}

double equal_fraction(const Rollout& r) {
  double equal = 0;
  for (size_t i = 0; i < r.completions.size(); ++i) {
    for (size_t t = 0; t < r.completions[i].size(); ++t) {
      equal += same_bits(r.log_probs[i][t], r.old_log_probs[i][t]);
    }
  }
  return equal / std::max(1.0, static_cast<double>(completion_tokens(r)));
}

MetricsRecord rollout_metrics(const Rollout& r, const MismatchSpec& mismatch) {
  MetricsRecord record;
  const double mean = mean_reward(r);
  double squares = 0, right = 0, unverifiable = 0;
  for (size_t i = 0; i < r.rewards.size(); ++i) {
    squares += (static_cast<double>(r.rewards[i]) - mean) * (static_cast<double>(r.rewards[i]) - mean);
    right += r.verdicts[i] == static_cast<uint8_t>(Verdict::kRight);
    unverifiable += r.verdicts[i] == static_cast<uint8_t>(Verdict::kUnverifiable);
  }
  const auto flat = static_cast<double>(equal_groups(r.rewards, r.samples_per_prompt).size());
  const double count = std::max(1.0, static_cast<double>(r.rewards.size()));
  record.numbers = {{"reward", mean},
                    {"reward_std", std::sqrt(squares / count)},
                    {"zero_variance_groups", flat / std::max(1.0, static_cast<double>(r.problems.size()))},
                    {"right", right / count},
                    {"unverifiable", unverifiable / count},
                    {"completion_tokens", static_cast<double>(completion_tokens(r))}};
  add_lengths(record, r);
  add_log_probs(record, r, mismatch);
  return record;
}

void add_reward_parts(MetricsRecord& record, const Rollout& r, const std::vector<std::string>& names) {
  for (size_t k = 0; names.size() > 1 && k < names.size(); ++k) {
    double sum = 0;
    for (const auto& parts : r.reward_parts) sum += static_cast<double>(parts[k]);
    record.numbers.emplace_back("reward." + names[k],
                                sum / std::max(1.0, static_cast<double>(r.reward_parts.size())));
  }
}

std::string router_differs_name(size_t layer) {
  char text[48];
  std::snprintf(text, sizeof(text), "router_differs.%04zu", layer);
  return text;
}

double figure(const MetricsRecord& record, const std::string& name) {
  for (const auto& [key, value] : record.numbers) {
    if (key == name) return value;
  }
  throw InternalError("no figure " + name + " in the record");
}

}  // namespace fp4t
