#include <cstdio>

#include "app/command.h"
#include "engine/plan/plan.h"
#include "engine/recipe/load.h"
#include "engine/rl/rewards.h"
#include "engine/stage/resume.h"
#include "engine/store/huggingface.h"
#include "engine/tokens/inputs.h"
#include "engine/tokens/tokenizer.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// What the weights lack, with the place of the key that names them.
void check_weights_of(const Recipe& recipe, const Plan& plan, const FieldPlaces& places) {
  const std::string key = "model.from";
  const SourcePlace place = nearest_place(places, key);
  const auto told = [&](const Error& e) { return place_text(place) + ": " + key + ": " + e.what(); };
  try {
    check_weights(recipe.model.from, plan);
  } catch (const MissingInputError& e) {
    throw MissingInputError(told(e));
  } catch (const BadDataError& e) {
    throw BadDataError(told(e));
  }
}

}  // namespace

int cmd_validate(const AppOptions& options) {
  auto [recipe, text, places] = load_recipe(options.recipe.config, options.recipe.overrides);
  complete_tokenizer(recipe, places);
  const Machine machine = probe_machine(recipe.run.device, static_cast<int>(recipe.run.threads));
  const Plan plan = make_plan(recipe, machine, {}, places);
  check_inputs(recipe, places);
  check_rewards(recipe, places);
  if (!recipe.model.from.empty()) check_weights_of(recipe, plan, places);
  check_origin(recipe.run, places);
  std::printf("%s: valid\n", printable(options.recipe.config).c_str());
  return 0;
}

}  // namespace fp4t
