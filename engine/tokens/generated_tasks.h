// The tasks, one file each; make_task (engine/tokens/tasks.h) chooses.
#pragma once

#include <memory>

#include "engine/tokens/tasks.h"

namespace fp4t {

std::unique_ptr<Task> make_sums(const TaskSpec& spec);
std::unique_ptr<Task> make_countdown(const TaskSpec& spec);
std::unique_ptr<Task> make_jsonl_task(const TaskSpec& spec);

}  // namespace fp4t
