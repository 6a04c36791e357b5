#include "engine/stage/resume.h"

#include <charconv>

#include "engine/recipe/load.h"
#include "kernels/base/check.h"

namespace fp4t {

std::string span_steps_key(size_t stage) { return "span_steps." + std::to_string(stage); }
std::string data_key(size_t stage) { return "corpus." + std::to_string(stage); }
std::string task_key(size_t stage) { return "task." + std::to_string(stage); }
std::string evaluated_key(size_t stage) { return "evaluated." + std::to_string(stage); }

bool is_started(const RunState& state, size_t stage) {
  return state.texts.count(data_key(stage)) != 0 || state.texts.count(task_key(stage)) != 0;
}

std::vector<int64_t> recorded_span_steps(const RunState& state) {
  std::vector<int64_t> steps;
  for (size_t i = 0; is_started(state, i); ++i) {
    const auto it = state.texts.find(span_steps_key(i));
    int64_t value = 0;
    if (it != state.texts.end()) {
      std::from_chars(it->second.data(), it->second.data() + it->second.size(), value);
    }
    if (value < 1) throw BadDataError("checkpoint: no whole number above 0 in its text " + span_steps_key(i));
    steps.push_back(value);
  }
  return steps;
}

std::string recorded_recipe(const std::string& recipe_yaml) {
  Recipe recipe = parse_recipe(recipe_yaml, "recipe", {}).recipe;
  const RunSpec defaults;
  recipe.run.dir = "runs/" + recipe.run.name;
  recipe.run.resume = defaults.resume;
  recipe.run.device = defaults.device;
  recipe.run.threads = defaults.threads;
  return print_recipe(recipe);
}

ResumePoint find_resume(const RunSpec& run) {
  ResumePoint point;
  CheckpointStore store(run.dir);
  std::string path;
  if (run.resume == "auto") {
    path = store.newest(&point.notes);
  } else if (run.resume == "never") {
    if (!store.newest(&point.notes).empty()) {
      throw RecipeError(detail::concat("run.resume: never, but ", run.dir,
                                       " holds checkpoints; remove them, or choose another run.dir"));
    }
  } else {
    path = find_checkpoint(run.resume);
  }
  if (path.empty() && !run.branch_from.empty()) {
    path = find_checkpoint(run.branch_from);
    point.branch = true;
  }
  if (path.empty()) return point;
  point.info = read_checkpoint_info(path, true);
  point.found = true;
  point.span_steps = recorded_span_steps(point.info.state);
  return point;
}

std::vector<std::string> check_resume(const ResumePoint& resume, const std::string& recipe_yaml,
                                      bool accept_changes) {
  std::string identity, course;
  std::vector<std::string> lineage;
  const RunState& state = resume.info.state;
  if (resume.branch) {
    lineage.push_back(detail::concat("stage ", state.stage, " step ", state.step,
                                     ": branched from a checkpoint of content ", resume.info.content_hash));
  }
  for (const RecipeChange& c : compare_recipes(state.recipe_yaml, recipe_yaml)) {
    if (resume.branch && c.path == "run.branch_from") continue;
    const std::string line = detail::concat(c.path, ": ", c.before, " -> ", c.after);
    if (c.resume_class == ResumeClass::kIdentity) identity += "\n  " + line;
    if (c.resume_class == ResumeClass::kCourse) {
      course += "\n  " + line;
      lineage.push_back(detail::concat("stage ", state.stage, " step ", state.step, ": ", line));
    }
  }
  if (!identity.empty()) {
    throw RecipeError(detail::concat("the recipe is of another model or run than the checkpoint ",
                                     resume.info.path, ":", identity));
  }
  if (!course.empty() && !accept_changes && !resume.branch) {
    throw RecipeError(detail::concat("the recipe differs from the checkpoint ", resume.info.path, ":", course,
                                     "\n--accept-changes continues with the new values"));
  }
  return lineage;
}

}  // namespace fp4t
