// What a user should know about a plan that computes all the same: keys that do less than they say on these
// ranks, and layouts whose rounding follows the layout. `fp4train plan`, a run's start and plan.json show
// them.
#pragma once

#include <string>
#include <vector>

#include "engine/plan/plan.h"

namespace fp4t {

// One line each, the dotted path of the key first; empty: every key does what it says.
std::vector<std::string> notes(const Plan& plan);

// Why an expert's rows, cut into rounds, are rounded otherwise than together: the first cell and its operand.
// "" where codes of every table depend on their own row alone.
std::string round_variance(const Plan& plan);

}  // namespace fp4t
