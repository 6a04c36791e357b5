// The walk over the stages, and what stands at the end of a run.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "engine/stage/context.h"
#include "engine/store/files.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

void write_plan(const Plan& plan) {
  write_text_file(plan.run.dir + "/recipe.yaml", plan.recipe_yaml);
  write_text_file(plan.run.dir + "/plan.txt", describe(plan));
  write_text_file(plan.run.dir + "/plan.json", plan_json(plan));
}

// Figures that the evaluations left in the counters, under the names that users look for.
nlohmann::ordered_json summary_json(const Run& run) {
  nlohmann::ordered_json j;
  const auto& counters = run.state.counters;
  j["name"] = run.plan.run.name;
  j["seed"] = run.plan.run.seed;
  j["seconds"] = run.seconds();
  if (run.comm.size() > 1) j["exposed_seconds"] = run.exposed_seconds();
  auto copy = [&](const char* name, const std::string& counter) {
    const auto it = counters.find(counter);
    if (it != counters.end()) j[name] = it->second;
  };
  for (const StagePlan& stage : run.plan.stages) {
    const std::string prefix = "eval." + stage.name + ".";
    if (!stage.is_rl) {
      if (!j.contains("text_loss_start")) copy("text_loss_start", prefix + "start.text_loss");
      copy("text_loss_after_pretraining", prefix + "end.text_loss");
    } else {
      if (!j.contains("accuracy_before_rl")) {
        copy("accuracy_before_rl", prefix + "start.accuracy");
        copy("greedy_accuracy_before_rl", prefix + "start.accuracy_greedy");
      }
      copy("accuracy_after_rl", prefix + "end.accuracy");
      copy("greedy_accuracy_after_rl", prefix + "end.accuracy_greedy");
    }
    copy("text_loss_end", prefix + "end.text_loss");
  }
  copy("logprob_equal_fraction_min", "logprob_equal_fraction_min");
  copy("tokens", "tokens");
  copy("skipped_updates", "skipped_updates");
  j["precision_hash"] = run.plan.precision_hash;
  j["checkpoint"] = run.last_checkpoint();
  j["content_hash"] = read_checkpoint_info(run.last_checkpoint(), false).content_hash;
  return j;
}

// Whether summary.json and report.html are those of the last checkpoint. What cannot be read is written anew.
bool is_summarised(const Run& run) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(run.plan.run.dir + "/report.html", error)) return false;
  nlohmann::json summary;
  try {
    summary = nlohmann::json::parse(read_text_file(run.plan.run.dir + "/summary.json"), nullptr, false);
  } catch (const Error&) {
    return false;
  }
  if (!summary.is_object()) return false;
  const auto hash = summary.find("content_hash");
  return hash != summary.end() && *hash == read_checkpoint_info(run.last_checkpoint(), false).content_hash;
}

void finish(Run& run) {
  const auto summary = summary_json(run);
  // The report is drawn from the summary, so the one that stands is of another state: it goes first. Whoever
  // finds a report finds it beside its own summary, wherever this ended before.
  const std::string report = run.plan.run.dir + "/report.html";
  remove_path(report, {});
  write_text_file(run.plan.run.dir + "/summary.json", summary.dump(2) + "\n");
  write_report(run.plan.run.dir);
  std::string line = "done in " + duration_text(run.seconds());
  for (const char* name :
       {"text_loss_start", "text_loss_end", "accuracy_before_rl", "accuracy_after_rl",
        "greedy_accuracy_before_rl", "greedy_accuracy_after_rl", "logprob_equal_fraction_min"}) {
    if (summary.contains(name)) line += detail::concat("\n  ", name, " = ", summary[name].get<double>());
  }
  line += detail::concat("\n  content_hash = ", summary["content_hash"].get<std::string>(),
                         "\n  report: ", printable(report));
  run.console.line(line);
}

}  // namespace

void run_stages(Queue& queue, Communicator& comm, const Plan& plan, const RunOptions& options,
                const ResumePoint& resume) {
  // Once before anything is written: a refused start leaves no trace.
  if (resume.found) check_resume(resume, plan.recipe_yaml, options.accept_changes);
  Run run(queue, comm, plan, options, resume);
  if (run.leads()) write_plan(plan);
  run.console.line(describe(plan));
  const auto& checkpoint = *std::visit([](const auto& s) { return &s.checkpoint; }, run.stage().spec);
  const std::string space = run.store.space_warning(plan.memory.checkpoint_bytes, checkpoint.keep);
  if (!space.empty()) run.console.warn(space);
  RunState& state = run.state;
  const auto count = static_cast<int64_t>(plan.stages.size());
  bool moved = false;
  while (state.stage < count) {
    const StagePlan& stage = run.stage();
    run.console.line(detail::concat("stage ", state.stage + 1, " of ", count, ": ", printable(stage.name)));
    const auto& optimizer = *std::visit([](const auto& s) { return &s.optimizer; }, stage.spec);
    if (state.step == 0 && state.update == 0 && optimizer.state == "fresh") run.optimizer.reset();
    // A finished stage stays finished; with more steps (an accepted change) it goes on.
    std::string& done = state.texts[done_key(static_cast<size_t>(state.stage))];
    const bool already = done == std::to_string(stage.steps);
    if (!already) {
      if (stage.is_rl) {
        run_rl(run);
      } else {
        run_pretrain(run);
      }
      done = std::to_string(stage.steps);
      moved = true;
    }
    if (state.stage + 1 == count) {
      // The last state stays that of the finished stage: a longer recipe continues it.
      if (!already || run.last_checkpoint().empty()) run.save(true);
      break;
    }
    state.stage += 1;
    state.step = 0;
    state.counters["stage_samples"] = 0;
    run.save(false);
  }
  if (!run.leads()) return;
  if (!moved && is_summarised(run)) {
    run.console.line("already done; " + printable(plan.run.dir) + "/summary.json stands");
    return;
  }
  finish(run);
}

}  // namespace fp4t
