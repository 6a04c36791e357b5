// Prices the three arenas from the blocks of engine/plan/{run,step,scratch}_layout.h. A pure function.
#pragma once

#include "engine/plan/plan.h"

namespace fp4t {

// Reads everything of the plan but `memory`.
MemoryPlan plan_memory(const Plan& plan);

}  // namespace fp4t
