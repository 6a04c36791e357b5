#include <cstdio>

#include "app/command.h"
#include "engine/plan/plan.h"
#include "engine/recipe/load.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

int cmd_plan(const AppOptions& options) {
  auto [recipe, text, places] = load_recipe(options.recipe.config, options.recipe.overrides);
  complete_tokenizer(recipe, places);
  const Machine machine = probe_machine(recipe.run.device, static_cast<int>(recipe.run.threads));
  std::fputs(describe(make_plan(recipe, machine, {}, places, options.ranks)).c_str(), stdout);
  return 0;
}

}  // namespace fp4t
