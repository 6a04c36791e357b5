// The sampling half of a step of reinforcement learning.
#pragma once

#include "engine/stage/context.h"
#include "engine/tokens/tasks.h"

namespace fp4t {

// Prompts, completions, rewards, advantages and the trainer's own log-probabilities of one step.
Rollout sample_rollout(Run& run, const RlSpec& spec, const Task& task);

}  // namespace fp4t
