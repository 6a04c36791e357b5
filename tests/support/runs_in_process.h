// A recipe run to its end inside the test's process, so that the test sees the queue that it ran on.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/plan/plan.h"
#include "engine/recipe/load.h"
#include "engine/stage/stage.h"
#include "tests/support/runs.h"

namespace fp4t::test {

// What app/cmd_train.cpp does, in `folder` and without a lock. Returns the queue's counts at the end.
inline QueueCounts run_here(const std::string& folder, const std::string& recipe_text,
                            const std::vector<std::string>& overrides) {
  std::filesystem::current_path(folder);
  const auto [recipe, text, places] = parse_recipe(recipe_text, "recipe.yaml", overrides);
  const Machine machine = probe_machine(recipe.run.device, static_cast<int>(recipe.run.threads));
  const ResumePoint resume = find_resume(recipe.run, places);
  const Plan plan = make_plan(recipe, machine, resume.span_steps);
  Queue queue = Queue::on(machine);
  const auto comm = make_single();
  run_stages(queue, *comm, plan, {false, "a test"}, resume);
  return queue.counts();
}

}  // namespace fp4t::test
