// Figures of a rollout, all computed from the rollout alone. Names follow NUMERICS.md section 3.4.
#pragma once

#include <string>
#include <vector>

#include "engine/metrics/metrics.h"
#include "engine/tokens/rollout.h"

namespace fp4t {

double mean_reward(const Rollout& r);
int64_t completion_tokens(const Rollout& r);
// Fraction of completion tokens whose sampler and trainer log-probabilities are equal bit for bit.
double equal_fraction(const Rollout& r);
// Reward, group, length and log-probability figures, and what the ratio of trainer to sampler does to the
// policy's term. Lengths by status do not depend on what is trained.
MetricsRecord rollout_metrics(const Rollout& r, const MismatchSpec& mismatch);
// Means of the parts of the reward, where it has more than one: "reward.<name>".
void add_reward_parts(MetricsRecord& record, const Rollout& rollout, const std::vector<std::string>& names);
// The step's monitor of a MoE layer: rows whose own routing was not the recorded one.
std::string router_differs_name(size_t layer);
// A number of a record by name; throws InternalError when it is not there.
double figure(const MetricsRecord& record, const std::string& name);

}  // namespace fp4t
