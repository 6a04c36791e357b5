// Advantages and the clipped policy objective: pure functions on the host. NUMERICS.md section 3.1.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "engine/tokens/rollout.h"
#include "kernels/formats/policy.h"

namespace fp4t {

// Group-relative advantages, in two passes (mean, then deviations) in FP64 and index order:
// A_i = r_i - mean, divided by the group's standard deviation (n - 1, plus 1e-6) when asked for.
std::vector<float> group_advantages(const std::vector<float>& rewards, int64_t samples_per_prompt,
                                    bool normalise_std);

// The clipped objective with an ObjectiveSpec's limits, kernels/formats/policy.h; one token of it.
inline PolicyClip policy_clip(const ObjectiveSpec& spec) { return {spec.clip_low, spec.clip_high, spec.kl}; }
TokenObjective grpo_token(float log_prob, float old_log_prob, float reference_log_prob, float advantage,
                          const ObjectiveSpec& spec);

// Which completions of a rollout each update trains on: [epochs * mini_batches][indices], a pure function
// of (seed, step). Completions with zero advantage are left out where the objective says so; lists may be
// empty then.
std::vector<std::vector<int64_t>> mini_batches(const Rollout& rollout, const ObjectiveSpec& spec,
                                               uint64_t seed, int64_t step);

}  // namespace fp4t
