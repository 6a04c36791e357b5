// The training half of a step of reinforcement learning.
#pragma once

#include <vector>

#include "engine/stage/context.h"

namespace fp4t {

// One optimizer update on a list of completions; an empty list is no update but counts as attempted.
void update(Run& run, const RlSpec& spec, const std::vector<int64_t>& list, int64_t total_updates);

}  // namespace fp4t
