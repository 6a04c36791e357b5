// Prices the three arenas from the blocks of engine/plan/{run,step,scratch}_layout.h. A pure function.
#pragma once

#include "engine/plan/plan.h"

namespace fp4t {

// Reads everything of the plan but `memory`.
MemoryPlan plan_memory(const Plan& plan);

// What a run is told that does not get the memory which its plan counts on (`what`): the key that decides
// most with its place, and what needs less.
std::string memory_refusal(const Plan& plan, const FieldPlaces& places, const std::string& what);

}  // namespace fp4t
