#include "engine/stage/rollout_files.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "engine/rl/rewards.h"
#include "engine/store/files.h"

namespace fp4t {

namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr const char* kRolloutName = "stage-%ld-step-%ld.jsonl%n";

// Where a file belongs.
struct FilePlace {
  long stage = 0, step = 0;
};

bool place_of(const std::string& name, FilePlace& place) {
  int read = 0;
  return std::sscanf(name.c_str(), kRolloutName, &place.stage, &place.step, &read) == 2 &&
         read == static_cast<int>(name.size());
}

// Throws MissingInputError when the folder is there and cannot be listed.
std::vector<std::pair<FilePlace, std::string>> files_of(const std::string& run_dir) {
  std::vector<std::pair<FilePlace, std::string>> files;
  const std::string folder = run_dir + "/rollouts";
  for (const std::string& name : names_in(folder)) {
    FilePlace place;
    if (place_of(name, place)) files.emplace_back(place, folder + "/" + name);
  }
  return files;
}

// The double whose shortest text is the shortest of the float.
OrderedJson json_number(float x) {
  if (!std::isfinite(x)) return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
  char text[48];
  const auto end = std::to_chars(text, text + sizeof(text), x).ptr;
  double same = 0;
  std::from_chars(text, end, same);
  return same;
}

OrderedJson json_numbers(const std::vector<float>& values) {
  OrderedJson list = OrderedJson::array();
  for (const float v : values) list.push_back(json_number(v));
  return list;
}

const char* verdict_name(uint8_t verdict) {
  switch (static_cast<Verdict>(verdict)) {
    case Verdict::kRight:
      return "right";
    case Verdict::kWrong:
      return "wrong";
    case Verdict::kUnverifiable:
      return "unverifiable";
  }
  return "?";
}

OrderedJson line_of(const Run& run, const RlSpec& spec, const std::vector<std::string>& parts, size_t i) {
  const Rollout& r = run.state.rollout;
  const size_t problem = i / static_cast<size_t>(r.samples_per_prompt);
  std::vector<int32_t> text = r.completions[i];
  if (r.finished[i]) text.pop_back();
  OrderedJson line;
  line["stage"] = run.stage().name;
  line["step"] = run.state.step + 1;
  line["problem"] = problem;
  line["sample"] = run.state.next_sample + static_cast<int64_t>(i);
  line["prompt"] = prompt_text(spec.task, r.problems[problem]);
  line["answer"] = r.problems[problem].answer;
  line["completion"] = run.tokenizer->decode(text);
  line["finished"] = r.finished[i] != 0;
  line["verdict"] = verdict_name(r.verdicts[i]);
  line["reward"] = json_number(r.rewards[i]);
  if (!r.reward_parts.empty()) {
    for (size_t k = 0; k < parts.size(); ++k) line["rewards"][parts[k]] = json_number(r.reward_parts[i][k]);
  }
  line["advantage"] = json_number(r.advantages[i]);
  line["prompt_tokens"] = r.prompts[problem];
  line["completion_tokens"] = r.completions[i];
  line["sampler_log_probs"] = json_numbers(r.log_probs[i]);
  line["trainer_log_probs"] = json_numbers(r.old_log_probs[i]);
  if (!r.reference_log_probs.empty()) line["reference_log_probs"] = json_numbers(r.reference_log_probs[i]);
  return line;
}

// Removes the oldest files of a stage but `keep`.
void keep_last(const std::string& run_dir, int64_t stage, int64_t keep) {
  std::vector<std::pair<FilePlace, std::string>> files;
  for (auto& file : files_of(run_dir)) {
    if (file.first.stage == stage) files.push_back(std::move(file));
  }
  std::sort(files.begin(), files.end(),
            [](const auto& a, const auto& b) { return a.first.step < b.first.step; });
  for (size_t i = 0; i + static_cast<size_t>(keep) < files.size(); ++i) remove_path(files[i].second, {});
}

}  // namespace

void write_rollouts(Run& run, const RlSpec& spec) {
  const int64_t step = run.state.step + 1;
  if (!run.leads() || spec.rollouts.every == 0 || step % spec.rollouts.every != 0) return;
  const std::vector<std::string> parts = reward_names(spec.rewards);
  std::string text;
  for (size_t i = 0; i < run.state.rollout.completions.size(); ++i) {
    text +=
        line_of(run, spec, parts, i).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  }
  char name[64];
  std::snprintf(name, sizeof(name), "stage-%ld-step-%06ld.jsonl", static_cast<long>(run.state.stage),
                static_cast<long>(step));
  const auto warn = [&](const Error& e) {
    run.console.warn(std::string("completions could not be written, training goes on: ") + e.what());
  };
  try {
    make_run_folder(run.plan.run.dir + "/rollouts");
    write_text_file(run.plan.run.dir + "/rollouts/" + name, text);
    if (spec.rollouts.keep > 0) keep_last(run.plan.run.dir, run.state.stage, spec.rollouts.keep);
  } catch (const SaveError& e) {
    warn(e);
  } catch (const MissingInputError& e) {  // the folder cannot be listed
    warn(e);
  }
}

void cut_rollouts(const std::string& run_dir, int64_t stage, int64_t step) {
  for (const auto& [place, path] : files_of(run_dir)) {
    if (place.stage > stage || (place.stage == stage && place.step > step)) remove_path(path, {});
  }
}

}  // namespace fp4t
