#include <cstdio>

#include "app/command.h"
#include "engine/plan/plan.h"
#include "engine/recipe/load.h"
#include "engine/stage/resume.h"
#include "engine/tokens/inputs.h"
#include "engine/tokens/tokenizer.h"
#include "kernels/base/text.h"

namespace fp4t {

int cmd_validate(const AppOptions& options) {
  auto [recipe, text, places] = load_recipe(options.recipe.config, options.recipe.overrides);
  complete_tokenizer(recipe, places);
  const Machine machine = probe_machine(recipe.run.device, static_cast<int>(recipe.run.threads));
  make_plan(recipe, machine, {}, places);
  check_inputs(recipe, places);
  check_origin(recipe.run, places);
  std::printf("%s: valid\n", printable(options.recipe.config).c_str());
  return 0;
}

}  // namespace fp4t
