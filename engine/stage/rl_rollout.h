// The sampling half of a step of reinforcement learning.
#pragma once

#include "engine/rl/rewards.h"
#include "engine/stage/context.h"
#include "engine/tokens/tasks.h"

namespace fp4t {

// The counter of problems that a stage has asked besides the first of each step's groups
// (objective.resample).
inline constexpr const char* kExtraProblems = "extra_problems";

// Prompts, completions, rewards, advantages and the trainer's own log-probabilities of one step.
Rollout sample_rollout(Run& run, const RlSpec& spec, const Task& task, Rewards& rewards);
// What rewards the stage's completions; lives as long as its programs shall.
Rewards make_rewards(Run& run, const RlSpec& spec);

}  // namespace fp4t
