// Recipes of the repository planned for machines elsewhere.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "engine/plan/step_time.h"
#include "engine/recipe/load.h"

namespace fp4t::test {

inline std::string source_path(const std::string& path) {
  return std::string(std::getenv("FP4T_TEST_SOURCE")) + "/" + path;
}

struct Planned {
  MachineSpec machine;
  PlanElsewhere made;
  const Plan& plan() const { return made.plan; }
  Prediction prediction() const { return predict(made, machine); }
};

// `recipe` from the repository's root.
inline Planned planned(const std::string& recipe, const MachineSpec& machine, int64_t ranks = 1,
                       const std::vector<std::string>& overrides = {}) {
  const LoadedRecipe loaded = load_recipe(source_path(recipe), overrides);
  return {machine, plan_elsewhere(loaded.recipe, machine, loaded.places, ranks)};
}

inline Planned planned(const std::string& recipe, const std::string& machine, int64_t ranks = 1,
                       const std::vector<std::string>& overrides = {}) {
  return planned(recipe, load_machine(machine), ranks, overrides);
}

}  // namespace fp4t::test
