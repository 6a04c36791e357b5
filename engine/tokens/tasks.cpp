#include "engine/tokens/tasks.h"

#include "engine/tokens/generated_tasks.h"
#include "kernels/base/check.h"

namespace fp4t {

std::unique_ptr<Task> make_task(const TaskSpec& spec) {
  std::unique_ptr<Task> task;
  if (spec.kind == "sums") task = make_sums(spec);
  if (spec.kind == "countdown") task = make_countdown(spec);
  if (!task) throw RecipeError("task.kind: '" + spec.kind + "' is not known; allowed are sums, countdown");
  const std::string difference = held_out_difference(*task, spec.held_out);
  if (!difference.empty()) throw BadDataError("held_out.hash: " + difference);
  return task;
}

TaskSpec task_of(const DataSourceSpec& source) {
  TaskSpec task;
  task.kind = source.kind;
  task.low = source.low;
  task.high = source.high;
  task.numbers = source.numbers;
  task.held_out = source.held_out;
  return task;
}

std::string held_out_difference(const Task& task, const HeldOutSpec& spec) {
  const std::string found = task.held_out_hash();
  if (spec.hash.empty() || spec.hash == found) return "";
  return detail::concat("the recipe says ", spec.hash, ", the held-out ", task.name(), " have ", found,
                        "; the split is not the one that was meant");
}

}  // namespace fp4t
