// A plan for a machine that this process does not run on: nothing about this host enters, ranks may be of any
// kind and number, and a plan too large for the machine is still a plan.
#pragma once

#include <string>

#include "engine/plan/machine_spec.h"
#include "engine/plan/plan.h"

namespace fp4t {

struct PlanElsewhere {
  Plan plan;
  std::string memory_obstacle;  // "" when the plan fits, else what it needs, has, and which keys need less
};

// Throws RecipeError with every problem at once: besides make_plan's, an expert group that does not lie
// within one fast domain, and ranks that leave a domain half empty.
PlanElsewhere plan_elsewhere(const Recipe& recipe, const MachineSpec& spec, const FieldPlaces& places,
                             int64_t ranks);

}  // namespace fp4t
