#include <cstdio>

#include "app/command.h"
#include "engine/plan/step_time.h"
#include "engine/recipe/load.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

namespace {

void print(const std::string& text) { std::fputs(text.c_str(), stdout); }

void plan_for_another_machine(const AppOptions& options, const LoadedRecipe& loaded) {
  const MachineSpec machine = load_machine(options.machine);
  const PlanElsewhere made = plan_elsewhere(loaded.recipe, machine, loaded.places, options.ranks);
  const Prediction prediction = predict(made, machine);
  print(options.json ? plan_json(made.plan, prediction)
                     : describe(made.plan) + describe(prediction, made.plan));
}

}  // namespace

int cmd_plan(const AppOptions& options) {
  LoadedRecipe loaded = load_recipe(options.recipe.config, options.recipe.overrides);
  complete_tokenizer(loaded.recipe, loaded.places);
  if (!options.machine.empty()) {
    plan_for_another_machine(options, loaded);
    return 0;
  }
  const RunSpec& run = loaded.recipe.run;
  const Machine machine = probe_machine(run.device, static_cast<int>(run.threads));
  const Plan plan = make_plan(loaded.recipe, machine, {}, loaded.places, options.ranks);
  print(options.json ? plan_json(plan) : describe(plan));
  return 0;
}

}  // namespace fp4t
