#include "engine/stage/resume.h"

#include "engine/recipe/load.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

std::string span_key(size_t stage) { return "span_steps." + std::to_string(stage); }

}  // namespace

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
    path = run.resume;
  }
  if (path.empty() && !run.branch_from.empty()) {
    path = run.branch_from;
    point.branch = true;
  }
  if (path.empty()) return point;
  point.info = read_checkpoint_info(path, true);
  point.found = true;
  for (size_t i = 0; point.info.state.texts.count(span_key(i)) != 0; ++i) {
    point.span_steps.push_back(std::stoll(point.info.state.texts.at(span_key(i))));
  }
  return point;
}

std::vector<std::string> check_resume(const ResumePoint& resume, const std::string& recipe_yaml,
                                      bool accept_changes) {
  std::string identity, course;
  std::vector<std::string> lineage;
  const RunState& state = resume.info.state;
  for (const RecipeChange& c : compare_recipes(state.recipe_yaml, recipe_yaml)) {
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
