#include "engine/stage/resume.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <utility>

#include "engine/comm/agree.h"
#include "engine/metrics/prometheus.h"
#include "engine/plan/plan.h"
#include "engine/recipe/load.h"
#include "engine/store/checkpoint_read.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// A text of the state as a number; 0 when it is absent or none.
int64_t whole_number(const RunState& state, const std::string& key) {
  const auto it = state.texts.find(key);
  int64_t value = 0;
  if (it != state.texts.end()) {
    std::from_chars(it->second.data(), it->second.data() + it->second.size(), value);
  }
  return value;
}

// Counts beyond this are not exact as double, and sums of two overflow nowhere below it.
constexpr int64_t kMaxCount = int64_t{1} << 53;
constexpr const char* kCounts[] = {"stage_samples",    "tokens",           "skipped_updates",
                                   "skipped_in_a_row", "logprob_compared", "steps_without_signal"};

void check_counts(const RunState& state) {
  const std::pair<const char*, int64_t> fields[] = {{"step", state.step},
                                                    {"attempted_updates", state.attempted_updates},
                                                    {"applied_updates", state.applied_updates},
                                                    {"next_sample", state.next_sample},
                                                    {"metrics_lines", state.metrics_lines}};
  for (const auto& [name, value] : fields) {
    if (value < 0 || value >= kMaxCount) throw BadDataError(detail::concat("state.", name, " is ", value));
  }
  for (const char* name : kCounts) {
    const auto it = state.counters.find(name);
    if (it == state.counters.end()) continue;
    const double value = it->second;
    if (!(value >= 0 && value < static_cast<double>(kMaxCount)) || value != std::floor(value)) {
      throw BadDataError(detail::concat("counters.", name, " is ", value, ", which counts nothing"));
    }
  }
}

void check_place(const Recipe& recipe, const RunState& state) {
  if (state.stage < 0 || state.stage >= static_cast<int64_t>(recipe.stages.size())) {
    throw BadDataError(
        detail::concat("state.stage is ", state.stage, ", its recipe has ", recipe.stages.size(), " stages"));
  }
  if (state.update == 0) return;
  const auto* rl = std::get_if<RlSpec>(&recipe.stages[static_cast<size_t>(state.stage)]);
  const int64_t updates = rl ? rl->objective.epochs * rl->objective.mini_batches : 1;
  if (state.update < 0 || state.update >= updates) {
    throw BadDataError(
        detail::concat("state.update is ", state.update, ", its stage has ", updates, " updates a step"));
  }
  if (state.rollout.size() == 0) {
    throw BadDataError(detail::concat("state.update is ", state.update, " without a rollout"));
  }
}

// Tokens are rows of the embedding, and their places positions.
void check_rollout(const Recipe& recipe, const Rollout& rollout) {
  const int64_t rows =
      recipe.model.vocabulary > 0 ? recipe.model.vocabulary : tokenizer_vocabulary(recipe.tokenizer);
  const auto check_tokens = [&](const char* what, size_t i, const std::vector<int32_t>& tokens) {
    for (int32_t t : tokens) {
      if (t < 0 || t >= rows) {
        throw BadDataError(detail::concat("rollout: ", what, " ", i, " has token ", t, " of ", rows));
      }
    }
  };
  for (size_t i = 0; i < rollout.prompts.size(); ++i) {
    if (rollout.prompts[i].empty()) throw BadDataError(detail::concat("rollout: prompt ", i, " is empty"));
    check_tokens("prompt", i, rollout.prompts[i]);
  }
  for (size_t i = 0; i < rollout.completions.size(); ++i) {
    check_tokens("completion", i, rollout.completions[i]);
    const auto& prompt = rollout.prompts[i / static_cast<size_t>(rollout.samples_per_prompt)];
    const auto length = static_cast<int64_t>(prompt.size() + rollout.completions[i].size()) - 1;
    if (length > recipe.model.max_positions) {
      throw BadDataError(detail::concat("rollout: completion ", i, " takes ", length, " positions of ",
                                        recipe.model.max_positions));
    }
  }
}

std::filesystem::path without_links(const std::string& path) {
  std::error_code error;
  auto found = std::filesystem::weakly_canonical(path, error);
  if (error)
    throw MissingInputError(detail::concat("cannot look at '", printable(path), "': ", error.message()));
  return found;
}

// Whether `path` lies below `folder`, whatever links lead there.
bool lies_in(const std::string& path, const std::string& folder) {
  const auto relative = without_links(path).lexically_relative(without_links(folder));
  return !relative.empty() && *relative.begin() != "..";
}

// "recipe.yaml:3:15: run.resume: "
std::string key_at(const FieldPlaces& places, const std::string& key) {
  const SourcePlace place = nearest_place(places, key);
  return (place.file.empty() ? "" : place_text(place) + ": ") + key + ": ";
}

// Runs `body`, whose errors are of the checkpoint that a key of the recipe names.
template <class Body>
auto of_key(const FieldPlaces& places, const char* key, const Body& body) {
  try {
    return body();
  } catch (const MissingInputError& error) {
    throw MissingInputError(key_at(places, key) + error.what());
  } catch (const BadDataError& error) {
    throw BadDataError(key_at(places, key) + error.what());
  }
}

CheckpointInfo read_checked(const std::string& path, bool verify_hashes) {
  CheckpointInfo info = read_checkpoint_info(path, verify_hashes);
  check_state(info);
  return info;
}

bool names_a_checkpoint(const RunSpec& run) { return run.resume != "auto" && run.resume != "never"; }

}  // namespace

std::string span_steps_key(size_t stage) { return "span_steps." + std::to_string(stage); }
std::string data_key(size_t stage) { return "corpus." + std::to_string(stage); }
std::string task_key(size_t stage) { return "task." + std::to_string(stage); }
std::string evaluated_key(size_t stage) { return "evaluated." + std::to_string(stage); }

bool is_started(const RunState& state, size_t stage) {
  return state.texts.count(data_key(stage)) != 0 || state.texts.count(task_key(stage)) != 0;
}

std::string done_key(size_t stage) { return "done." + std::to_string(stage); }

int64_t finished_steps(const RunState& state, size_t stage) {
  return std::max<int64_t>(0, whole_number(state, done_key(stage)));
}

std::vector<int64_t> recorded_span_steps(const RunState& state) {
  std::vector<int64_t> steps;
  for (size_t i = 0; is_started(state, i); ++i) {
    const int64_t value = whole_number(state, span_steps_key(i));
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
  recipe.parallel.transport = ParallelSpec().transport;
  recipe.run.prometheus = defaults.prometheus;
  return print_recipe(recipe);
}

void check_state(const CheckpointInfo& info) {
  try {
    const Recipe recipe = parse_recipe(info.state.recipe_yaml, "its recipe", {"run.resume=never"})
                              .recipe;  // keep does not matter
    check_counts(info.state);
    check_place(recipe, info.state);
    check_rollout(recipe, info.state.rollout);
    recorded_span_steps(info.state);
  } catch (const Error& error) {
    throw BadDataError(detail::concat("checkpoint '", printable(info.path), "': ", error.what()));
  }
}

void check_origin(const RunSpec& run, const FieldPlaces& places) {
  const bool resumes = names_a_checkpoint(run);
  if (!resumes && run.branch_from.empty()) return;
  if (!list_checkpoints(run.dir + "/checkpoints").empty()) return;
  of_key(places, resumes ? "run.resume" : "run.branch_from",
         [&] { return read_checked(find_checkpoint(resumes ? run.resume : run.branch_from), false); });
}

void check_outlets(const RunSpec& run, const FieldPlaces& places) {
  if (run.prometheus.empty()) return;
  try {
    PrometheusFile::check_place(run.prometheus);
  } catch (const SaveError& error) {
    throw SaveError(key_at(places, "run.prometheus") + error.what());
  }
}

ResumePoint find_resume(const RunSpec& run, const FieldPlaces& places) {
  ResumePoint point;
  const auto take = [&](const char* key, const std::string& named) {
    of_key(places, key, [&] { return point.info = read_checked(find_checkpoint(named), true); });
  };
  CheckpointStore store(run.dir);
  const std::string path = store.newest(&point.notes, [&](const CheckpointInfo& info) {
    check_state(info);
    point.info = info;
  });
  if (run.resume == "never") {
    if (!path.empty()) {
      throw RecipeError(detail::concat(key_at(places, "run.resume"), "never, but ", printable(run.dir),
                                       " holds checkpoints; remove them, or choose another run.dir"));
    }
  } else if (names_a_checkpoint(run) && !path.empty()) {
    point.notes.push_back(detail::concat("run.resume: ", printable(run.resume), " is passed over, since ",
                                         printable(run.dir), " has checkpoints of its own"));
  } else if (names_a_checkpoint(run)) {
    take("run.resume", run.resume);
    point.elsewhere = !lies_in(point.info.path, run.dir);
  }
  point.branch = path.empty() && !names_a_checkpoint(run) && !run.branch_from.empty();
  if (point.branch) take("run.branch_from", run.branch_from);
  point.found = !point.info.path.empty();
  if (point.found) point.span_steps = recorded_span_steps(point.info.state);
  return point;
}

ResumePoint share_resume(Communicator& comm, const ResumePoint& found) {
  if (comm.size() == 1) return found;
  int32_t facts[3] = {found.found, found.branch, found.elsewhere};
  comm.broadcast(facts, sizeof(facts), 0);
  const std::string path = broadcast_text(comm, found.info.path, 0);
  if (comm.rank() == 0 || facts[0] == 0) return found;
  ResumePoint point;
  point.found = true;
  point.branch = facts[1] != 0;
  point.elsewhere = facts[2] != 0;
  point.info = read_checkpoint_info(path, false);  // rank 0 has verified it; tensors are when they are loaded
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
    const std::string line = detail::concat(c.path, ": ", printable(c.before), " -> ", printable(c.after));
    if (c.resume_class == ResumeClass::kIdentity) identity += "\n  " + line;
    if (c.resume_class == ResumeClass::kCourse) {
      course += "\n  " + line;
      lineage.push_back(detail::concat("stage ", state.stage, " step ", state.step, ": ", line));
    }
  }
  if (!identity.empty()) {
    throw RecipeError(detail::concat("the recipe is of another model or run than the checkpoint ",
                                     printable(resume.info.path), ":", identity));
  }
  if (!course.empty() && !accept_changes && !resume.branch) {
    throw RecipeError(detail::concat("the recipe differs from the checkpoint ", printable(resume.info.path),
                                     ":", course, "\n--accept-changes continues with the new values"));
  }
  return lineage;
}

}  // namespace fp4t
