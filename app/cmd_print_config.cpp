#include <cstdio>

#include "app/command.h"
#include "engine/recipe/load.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

int cmd_print_config(const AppOptions& options) {
  auto [recipe, text, places] = load_recipe(options.recipe.config, options.recipe.overrides);
  complete_tokenizer(recipe, places);
  std::fputs(print_recipe(recipe).c_str(), stdout);
  return 0;
}

}  // namespace fp4t
