#include "engine/tokens/rollout.h"

#include "kernels/base/check.h"

namespace fp4t {

void Rollout::check() const {
  const size_t prompts_count = problems.size();
  FP4T_CHECK_EQ(prompts.size(), prompts_count);
  const size_t n = prompts_count * static_cast<size_t>(samples_per_prompt);
  FP4T_CHECK_EQ(completions.size(), n);
  for (const auto* lists : {&log_probs, &old_log_probs, &reference_log_probs}) {
    if (lists->empty() && lists != &log_probs) continue;
    FP4T_CHECK_EQ(lists->size(), n);
    for (size_t i = 0; i < n; ++i) FP4T_CHECK_EQ((*lists)[i].size(), completions[i].size(), "completion ", i);
  }
  if (!router.empty()) FP4T_CHECK_EQ(router.size(), n);
  FP4T_CHECK_EQ(finished.size(), n);
  FP4T_CHECK_EQ(verdicts.size(), n);
  FP4T_CHECK_EQ(rewards.size(), n);
  if (!reward_parts.empty()) FP4T_CHECK_EQ(reward_parts.size(), n);
  for (const auto& parts : reward_parts) FP4T_CHECK_EQ(parts.size(), reward_parts[0].size());
  FP4T_CHECK_EQ(advantages.size(), n);
  for (size_t i = 0; i < n; ++i) FP4T_CHECK(!completions[i].empty(), "completion ", i, " has no token");
}

}  // namespace fp4t
