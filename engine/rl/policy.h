// Rewards as trained on, advantages, divisors and mini-batches: pure functions on the host. NUMERICS.md
// section 3.1; one token of the objective itself is kernels/formats/policy.h.
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
// A_i = r_i minus the mean of the group's others (RLOO, arXiv 2402.14740): n / (n - 1) times r_i - mean.
std::vector<float> leave_one_out_advantages(const std::vector<float>& rewards, int64_t samples_per_prompt);
// By the objective's baseline and normalise_std.
std::vector<float> advantages_of(const std::vector<float>& rewards, int64_t samples_per_prompt,
                                 const ObjectiveSpec& spec);

// Which groups have equal rewards, by index.
std::vector<int64_t> equal_groups(const std::vector<float>& rewards, int64_t samples_per_prompt);

// DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to max_tokens - overlong_tokens, then
// a straight line down to -overlong_penalty at max_tokens.
double overlong_reward(int64_t tokens, int64_t max_tokens, const ObjectiveSpec& spec);
// Rewards with the overlong punishment and, with kl_in reward, less kl times the estimates summed over a
// completion. The limit that counts is the one that cuts the completion: the problem's own or the model's
// last of `positions` where that is lower than max_tokens.
std::vector<float> shaped_rewards(const Rollout& rollout, int64_t max_tokens, int64_t positions,
                                  const ObjectiveSpec& spec);

// The objective's terms as they stand in the loss.
PolicyTerms policy_terms(const ObjectiveSpec& spec);

// What an update divides by.
struct Divisor {
  double tokens = 0, sequences = 0;  // that the update trains on
  double nominal_sequences = 0;      // completions a step by mini_batches, whatever was left out
  // Weight in the loss of each token of a completion.
  double weight(const ObjectiveSpec& spec, size_t completion_tokens) const;
};
Divisor divisor_of(const Rollout& rollout, const std::vector<int64_t>& list, const ObjectiveSpec& spec);

// Which completions of a rollout each update trains on: [epochs * mini_batches][indices], a pure function
// of (seed, step). Completions with zero advantage, or cut ones, are left out where the objective says so;
// lists may be empty then.
std::vector<std::vector<int64_t>> mini_batches(const Rollout& rollout, const ObjectiveSpec& spec,
                                               uint64_t seed, int64_t step);

}  // namespace fp4t
