#include <cstdio>

#include "app/command.h"
#include "engine/recipe/load.h"

namespace fp4t {

int cmd_schema(const AppOptions&) {
  std::fputs(recipe_schema().c_str(), stdout);
  return 0;
}

}  // namespace fp4t
