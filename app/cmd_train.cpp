#include "app/command.h"
#include "engine/recipe/load.h"
#include "engine/stage/signals.h"
#include "engine/stage/stage.h"
#include "engine/tokens/inputs.h"
#include "kernels/base/check.h"

namespace fp4t {

int cmd_train(const AppOptions& options) {
  const auto [recipe, text, places] = load_recipe(options.recipe.config, options.recipe.overrides);
  refuse_unserved_launch();
  install_stop_handlers();  // before anything that takes long, such as verifying a checkpoint
  const Machine machine = probe_machine(recipe.run.device, static_cast<int>(recipe.run.threads));
  check_inputs(recipe);
  const RunLock lock(recipe.run.dir);
  const ResumePoint resume = find_resume(recipe.run);
  const Plan plan = make_plan(recipe, machine, resume.span_steps, places);
  Queue queue = Queue::on(machine);
  const auto comm = make_single();
  run_stages(queue, *comm, plan, {options.accept_changes, options.command_line}, resume);
  return 0;
}

}  // namespace fp4t
