#include "engine/tokens/tasks.h"

#include "engine/tokens/generated_tasks.h"
#include "kernels/base/check.h"

namespace fp4t {

std::unique_ptr<Task> make_task(const TaskSpec& spec) {
  std::unique_ptr<Task> task;
  if (spec.kind == "sums") task = make_sums(spec);
  if (spec.kind == "countdown") task = make_countdown(spec);
  if (!task) throw RecipeError("task.kind: '" + spec.kind + "' is not known; allowed are sums, countdown");
  const std::string found = task->held_out_hash();
  if (!spec.held_out.hash.empty() && spec.held_out.hash != found) {
    throw BadDataError(detail::concat("held_out.hash: the recipe says ", spec.held_out.hash,
                                      ", the held-out ", spec.kind, " have ", found,
                                      "; the split is not the one that was meant"));
  }
  return task;
}

}  // namespace fp4t
