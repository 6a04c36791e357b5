#include <new>
#include <optional>

#include "app/command.h"
#include "engine/comm/agree.h"
#include "engine/plan/memory.h"
#include "engine/recipe/load.h"
#include "engine/rl/rewards.h"
#include "engine/stage/devices.h"
#include "engine/stage/signals.h"
#include "engine/stage/stage.h"
#include "engine/tokens/inputs.h"
#include "engine/tokens/tokenizer.h"
#include "kernels/base/check.h"

namespace fp4t {

int cmd_train(const AppOptions& options) {
  const auto comm = make_communicator();
  auto [recipe, text, places] = load_recipe(options.recipe.config, options.recipe.overrides);
  complete_tokenizer(recipe, places);
  comm->set_timeout(recipe.run.watchdog_seconds);
  install_stop_handlers();  // before anything that takes long, such as verifying a checkpoint
  std::vector<std::string> notes;
  const Machine machine = machine_of_rank(recipe, *comm, notes);
  check_inputs(recipe, places);
  check_rewards(recipe, places);
  std::optional<RunLock> lock;  // of rank 0, which alone writes to the folder
  ResumePoint found;
  on_rank_zero(*comm, [&, &run = recipe.run, &places = places] {
    lock.emplace(run.dir);  // a folder that it makes goes again with a refused start
    check_outlets(run, places);
    found = find_resume(run, places);
  });
  ResumePoint resume = share_resume(*comm, found);
  resume.notes.insert(resume.notes.end(), notes.begin(), notes.end());
  const Plan plan = make_plan(recipe, machine, resume.span_steps, places, comm->size());
  try {
    Queue queue = Queue::on(machine);
    run_stages(queue, *comm, plan, {options.accept_changes, options.command_line}, resume);
  } catch (const MemoryError& e) {
    throw RecipeError(memory_refusal(plan, places, std::string("out of memory: ") + e.what()));
  } catch (const std::bad_alloc&) {
    throw RecipeError(memory_refusal(plan, places, "out of memory: the system gives no more") +
                      "; smaller files of data need less, too");
  }
  return 0;
}

}  // namespace fp4t
