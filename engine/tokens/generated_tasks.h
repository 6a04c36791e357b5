// The tasks, one file each; make_task (engine/tokens/tasks.h) chooses.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/tokens/tasks.h"

namespace fp4t {

std::unique_ptr<Task> make_sums(const TaskSpec& spec);
std::unique_ptr<Task> make_countdown(const TaskSpec& spec);
std::unique_ptr<Task> make_jsonl_task(const TaskSpec& spec);

// Prompts of a jsonl task's rows by the side of the split that they are on, each with its "file:line".
struct SplitRows {
  struct Row {
    std::string prompt, place;
  };
  std::vector<Row> training, held_out;
};
// Throws as make_task does.
SplitRows split_rows(const TaskSpec& spec);

}  // namespace fp4t
