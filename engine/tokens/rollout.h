// One step's completions with everything that training needs from them. A value type: it is stored in
// checkpoints as it is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/tokens/tasks.h"

namespace fp4t {

// Completions of all prompts, group after group (a group: the samples of one prompt).
struct Rollout {
  int64_t samples_per_prompt = 0;
  std::vector<Problem> problems;                        // [prompts]
  std::vector<std::vector<int32_t>> prompts;            // [prompts] tokens
  std::vector<std::vector<int32_t>> completions;        // [prompts * samples] tokens, end token included
  std::vector<std::vector<float>> log_probs;            // recorded by the sampler, one a completion token
  std::vector<std::vector<float>> old_log_probs;        // the trainer's before the first update
  std::vector<std::vector<float>> reference_log_probs;  // of the starting policy; empty without KL
  std::vector<std::vector<uint8_t>> router;      // of the sampler (engine/rl/routing.h); empty: not recorded
  std::vector<uint8_t> finished;                 // ended with an end token
  std::vector<uint8_t> verdicts;                 // Verdict
  std::vector<std::vector<float>> reward_parts;  // [prompts * samples][parts of the recipe's rewards]
  std::vector<float> rewards;
  std::vector<float> advantages;

  int64_t size() const { return static_cast<int64_t>(completions.size()); }
  // Throws InternalError when sizes or contents disagree.
  void check() const;
};

}  // namespace fp4t
