// Where a run continues: found before the plan is made, because resolved step spans come from there.
#pragma once

#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "engine/store/checkpoint.h"

namespace fp4t {

struct ResumePoint {
  bool found = false;
  bool branch = false;  // weights and counters from elsewhere, metrics start anew
  CheckpointInfo info;
  std::vector<std::string> notes;  // damaged checkpoints that were passed over
  // Steps by stage that percentages in precision rules refer to; empty: the recipe's own.
  std::vector<int64_t> span_steps;
};

// By run.resume and run.branch_from. Throws NoCheckpointError, BadDataError, RecipeError.
ResumePoint find_resume(const RunSpec& run);

// Compares the recipe that the checkpoint was made with against the present one. Identity changes throw
// RecipeError; course changes do unless accepted, and are returned as lineage lines.
std::vector<std::string> check_resume(const ResumePoint& resume, const std::string& recipe_yaml,
                                      bool accept_changes);

}  // namespace fp4t
