#include <cstdio>

#include "app/command.h"
#include "engine/recipe/load.h"

namespace fp4t {

int cmd_print_config(const AppOptions& options) {
  const Recipe recipe = load_recipe(options.recipe.config, options.recipe.overrides).recipe;
  std::fputs(print_recipe(recipe).c_str(), stdout);
  return 0;
}

}  // namespace fp4t
