#include "engine/stage/context.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "engine/comm/agree.h"
#include "engine/plan/run_layout.h"
#include "engine/stage/rollout_files.h"
#include "engine/stage/signals.h"
#include "engine/store/huggingface.h"
#include "engine/tokens/corpus.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

bool needs_reference(const Plan& plan) {
  return std::any_of(plan.stages.begin(), plan.stages.end(),
                     [](const StagePlan& s) { return s.is_rl && std::get<RlSpec>(s.spec).objective.kl > 0; });
}

// Nothing of one process (command line, place, times) stands in it: metrics.jsonl is compared byte by byte.
std::string header_json(const Plan& plan) {
  nlohmann::ordered_json j;
  j["kind"] = "header";
  j["format"] = 1;
  j["name"] = plan.run.name;
  j["seed"] = plan.run.seed;
  j["precision_hash"] = plan.precision_hash;
  for (const StagePlan& s : plan.stages) {
    nlohmann::ordered_json stage;
    stage["name"] = s.name;
    stage["kind"] = s.is_rl ? "rl" : "pretrain";
    stage["steps"] = s.steps;
    j["stages"].push_back(std::move(stage));
  }
  return j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Console console_of(const Communicator& comm, const std::string& run_dir) {
  if (comm.rank() != 0) return Console();
  return Console(run_dir, comm.size() > 1 ? Console::Screen::kPlain : Console::Screen::kFound);
}

// A member that no hash protects: 0 when it is absent or no number.
double number_within(const nlohmann::json& object, const char* name, double most) {
  const auto it = object.find(name);
  if (it == object.end() || !it->is_number()) return 0;
  return std::clamp(it->get<double>(), 0.0, most);
}

}  // namespace

std::string duration_text(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "?";
  const auto s = static_cast<int64_t>(seconds + 0.5);
  char text[32];
  if (s >= 3600) {
    std::snprintf(text, sizeof(text), "%ldh%02ldm", static_cast<long>(s / 3600),
                  static_cast<long>(s / 60 % 60));
  } else if (s >= 60) {
    std::snprintf(text, sizeof(text), "%ldm%02lds", static_cast<long>(s / 60), static_cast<long>(s % 60));
  } else {
    std::snprintf(text, sizeof(text), "%lds", static_cast<long>(s));
  }
  return text;
}

void append_sequence(TokenBatch& batch, const Sequence& sequence) {
  const auto base = static_cast<int32_t>(batch.tokens.size());
  batch.tokens.insert(batch.tokens.end(), sequence.tokens.begin(), sequence.tokens.end());
  batch.targets.insert(batch.targets.end(), sequence.targets.begin(), sequence.targets.end());
  batch.positions.insert(batch.positions.end(), sequence.positions.begin(), sequence.positions.end());
  for (int32_t begin : sequence.doc_begin) batch.doc_begin.push_back(base + begin);
}

Run::Run(Queue& queue_in, Communicator& comm_in, const Plan& plan_in, const RunOptions& options_in,
         const ResumePoint& resume)
    : queue(queue_in),
      comm(comm_in),
      plan(plan_in),
      options(options_in),
      console(console_of(comm_in, plan_in.run.dir)),
      tokenizer(make_tokenizer(plan_in.tokenizer)),
      model(queue_in, comm_in, plan_in),
      optimizer(model, comm_in, model.run_arena()),
      store(plan_in.run.dir),
      start_(std::chrono::steady_clock::now()) {
  console.line("command: " + printable(options.command_line, 4000));
  for (const std::string& note : resume.notes) console.warn(note);
  if (needs_reference(plan)) {
    for (const NamedTensor& t : policy_tensors()) {
      reference.push_back(
          {"reference." + t.name, model.run_arena().take("reference." + t.name, t.view.dtype, t.view.shape)});
    }
  }
  for (const NamedTensor& t : reference) queue.fill_bytes(t.view.data, 0, t.view.bytes());
  if (resume.found) {
    restore(resume);
  } else {
    if (!plan.model.from.empty()) {
      import_weights(queue, plan.model.from, plan, model.params());
      model.weights_changed();
      console.line("weights from " + printable(plan.model.from));
    }
    optimizer.reset();
  }
  state.recipe_yaml = recorded_recipe(plan.recipe_yaml);
  state.precision_hash = plan.precision_hash;
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    if (!is_started(state, i)) state.texts[span_steps_key(i)] = std::to_string(plan.stages[i].steps);
  }
  if (!leads()) return;
  cut_rollouts(plan.run.dir, state.stage, state.step);
  metrics = std::make_unique<MetricsWriter>(plan.run.dir, state.metrics_lines, header_json(plan));
  if (metrics->lines() < state.metrics_lines) {
    console.warn(detail::concat("metrics.jsonl holds ", metrics->lines(), " of the ", state.metrics_lines,
                                " lines before the checkpoint; the rest is lost"));
  }
  state.metrics_lines = metrics->lines();
  if (!plan.run.prometheus.empty()) {
    prometheus = std::make_unique<PrometheusFile>(plan.run.prometheus, plan.run.name);
  }
}

Run::~Run() = default;

// Whether the stage in progress compares with the reference policy that its beginning kept.
bool Run::reference_is_in_use() const {
  const auto at = static_cast<size_t>(state.stage);
  if (at >= plan.stages.size() || !plan.stages[at].is_rl || !is_started(state, at)) return false;
  return std::get<RlSpec>(plan.stages[at].spec).objective.kl > 0;
}

void Run::restore(const ResumePoint& resume) {
  const std::vector<std::string> lineage = check_resume(resume, plan.recipe_yaml, options.accept_changes);
  changes_accepted_ = options.accept_changes || resume.branch;
  state = resume.info.state;
  if (static_cast<size_t>(state.stage) >= plan.stages.size()) {
    throw RecipeError(detail::concat("the checkpoint ", printable(resume.info.path), " is in stage ",
                                     state.stage + 1, ", the recipe has ", plan.stages.size()));
  }
  state.lineage.insert(state.lineage.end(), lineage.begin(), lineage.end());
  for (const std::string& line : lineage) console.line("accepted change: " + line);
  std::vector<std::string> optional = {"rollout."};
  if (!reference_is_in_use()) optional.push_back("reference.");
  load_tensors(queue, resume.info.path, tensors(), optional, parts());
  model.params().refresh_copies(queue);
  model.weights_changed();
  optimizer.set_applied_updates(state.applied_updates);
  const auto telemetry = nlohmann::json::parse(state.telemetry_json, nullptr, false);
  if (telemetry.is_object()) {
    earlier_seconds_ = number_within(telemetry, "seconds", 1e10);
    restarts_ = static_cast<int64_t>(number_within(telemetry, "restarts", 1e9)) + 1;
  }
  warn_of_changes_too_late();
  if (resume.branch || resume.elsewhere) state.metrics_lines = 0;
  if (resume.branch) {
    earlier_seconds_ = 0;
    restarts_ = 0;
  }
  last_checkpoint_ = resume.branch || resume.elsewhere ? "" : resume.info.path;
  console.line(detail::concat(resume.branch ? "branching from " : "resuming from ",
                              printable(resume.info.path), ": stage ", state.stage, ", step ", state.step,
                              state.update ? detail::concat(", update ", state.update) : ""));
}

void Run::warn_of_changes_too_late() {
  for (size_t i = 0; i < static_cast<size_t>(state.stage); ++i) {
    const int64_t finished = finished_steps(state, i);
    const StagePlan& over = plan.stages[i];
    if (finished == 0 || finished == over.steps) continue;
    console.warn(detail::concat("stage '", printable(over.name), "' is over after ", finished,
                                " steps; that the recipe now says ", over.steps, " has no effect"));
  }
}

std::vector<NamedTensor> Run::policy_tensors() {
  std::vector<NamedTensor> list;
  for (const Param& p : model.params().params()) list.push_back({p.info.name, p.master});
  for (const Buffer& b : model.params().buffers()) list.push_back({b.info.name, b.data});
  return list;
}

std::vector<NamedTensor> Run::tensors() {
  std::vector<NamedTensor> list;
  for (const NamedTensor& t : policy_tensors()) list.push_back({"model." + t.name, t.view});
  for (const NamedTensor& t : optimizer.state()) list.push_back(t);
  list.insert(list.end(), reference.begin(), reference.end());
  return list;
}

TensorParts Run::parts() {
  TensorParts list;
  if (!plan.shards.is_sharded()) return list;
  for (const Param& p : model.params().params()) {
    const TensorPart owned = {p.info.shape, model.params().owned(p).begin};
    list["optimizer.m." + p.info.name] = list["optimizer.v." + p.info.name] = owned;
    TensorPart kept = owned;
    if (!master_is_part(p.info, plan)) {
      if (p.held.count() == p.info.shape.elements()) continue;  // rank 0 has all of it
      kept = {p.info.shape, p.held.begin, plan.axes.data_index(comm.rank()) == 0};
    }
    list["model." + p.info.name] = kept;
    if (!reference.empty()) list["reference." + p.info.name] = kept;
  }
  return list;
}

size_t Run::calls_of_all(size_t mine, bool backward) {
  if (!calls_together(plan, backward)) return mine;
  auto most = static_cast<double>(mine);
  comm.all_reduce(&most, 1, ReduceOp::kMax);
  return static_cast<size_t>(most);
}

void Run::serve(const Pass& pass) {
  if (!calls_together(plan, pass.backward != nullptr)) return;
  model.forward(pass, {});
  if (pass.backward) model.backward(pass, Scoring{});
}

Pass Run::pass_base() const {
  Pass pass;
  pass.seed = plan.run.seed;
  pass.step = static_cast<uint32_t>(state.attempted_updates);
  return pass;
}

Pass Run::pass_for_evaluation() const {
  Pass pass = pass_base();
  if (!stage().is_rl) {
    pass.forward = &stage().precision.forward.at(state.step);
    return pass;
  }
  // In an RL stage the table in force at the end of the pretraining before it; without one, the trainer's.
  pass.forward = &stage().precision.forward.at(state.step);
  for (int64_t i = 0; i < state.stage; ++i) {
    const StagePlan& before = plan.stages[static_cast<size_t>(i)];
    if (!before.is_rl) pass.forward = &before.precision.forward.spans.back().table;
  }
  return pass;
}

Pass Run::pass_for_training() const {
  Pass pass = pass_base();
  pass.forward = &stage().precision.forward.at(state.step);
  pass.backward = &stage().precision.backward.at(state.step);
  pass.count_load = true;
  return pass;
}

Pass Run::pass_for_scoring() const {
  Pass pass = pass_base();
  pass.forward = &stage().precision.forward.at(state.step);
  return pass;
}

Pass Run::pass_for_sampling() const {
  Pass pass = pass_base();
  pass.forward = &stage().precision.sampler.at(state.step);
  return pass;
}

double Run::seconds() const {
  return earlier_seconds_ + std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Run::save(bool required) {
  const CheckpointSpec& spec = *std::visit([](const auto& s) { return &s.checkpoint; }, stage().spec);
  state.applied_updates = optimizer.applied_updates();
  nlohmann::json telemetry;
  telemetry["seconds"] = seconds();
  telemetry["restarts"] = restarts_;
  state.telemetry_json = telemetry.dump();
  check_replicas();  // a checkpoint of weights that have parted would hide it
  const std::vector<NamedTensor> all = tensors();
  const TensorParts shared = parts();
  PartGather gather(queue, comm, all, shared);
  std::string failure;
  if (leads()) {
    try {
      gather.lead([&](const FetchWhole& fetch) {
        metrics->sync();
        last_checkpoint_ = store.save(queue, all, state, spec.keep, shared, fetch);
      });
    } catch (const SaveError& e) {
      failure = e.what();
    }
  } else {
    gather.serve();
  }
  last_checkpoint_ = broadcast_text(comm, last_checkpoint_, 0);
  failure = broadcast_text(comm, failure, 0);
  if (failure.empty()) return;
  if (required) throw SaveError(failure);
  console.warn("the checkpoint could not be written, training goes on: " + failure);
}

void Run::stop_if_requested() {
  double number = stop_requested();
  comm.all_reduce(&number, 1, ReduceOp::kMax);
  if (number > 0) stop(static_cast<int>(number));
}

void Run::stop(int number) {
  save(true);
  const char* how =
      plan.run.resume == "never" ? "; with run.resume: auto it continues" : "; the same command continues";
  throw PreemptedError(
      detail::concat("stopped by signal ", number, "; saved ", printable(last_checkpoint_), how));
}

void Run::check_data(const std::string& key, const std::string& stage_name, const std::string& fingerprint) {
  std::string& known = state.texts[key];
  if (known == fingerprint) return;
  if (!known.empty()) {
    if (!changes_accepted_) {
      throw BadDataError(detail::concat("the data of stage '", printable(stage_name),
                                        "' is not what the checkpoint was made with: ", printable(known),
                                        " then, ", fingerprint, " now"));
    }
    state.lineage.push_back(detail::concat("stage ", state.stage, " step ", state.step, ": data of stage '",
                                           printable(stage_name), "': ", printable(known), " -> ",
                                           fingerprint));
    console.line("accepted change: " + state.lineage.back());
  }
  known = fingerprint;
}

void Run::write_metrics(const std::string& kind, const MetricsRecord& record) {
  if (!leads()) return;
  int64_t global = state.step;
  for (size_t i = 0; i < static_cast<size_t>(state.stage); ++i) {
    const int64_t finished = finished_steps(state, i);
    global += finished > 0 ? finished : plan.stages[i].steps;
  }
  metrics->write(kind, stage().name, state.step, global, record);
  state.metrics_lines = metrics->lines();
  if (!prometheus) return;
  try {
    prometheus->update(kind, stage().name, state.step, record, static_cast<double>(std::time(nullptr)));
    prometheus_failed_ = false;
  } catch (const SaveError& e) {
    // Who looks on is no reason to stop; told once until it works again.
    if (!prometheus_failed_) console.warn(e.what());
    prometheus_failed_ = true;
  }
}

void Run::note_kernels() {
  if (!leads()) return;
  std::vector<std::string> now = model.kernels_used();
  if (now == kernels_) return;
  kernels_ = std::move(now);
  std::string text;
  for (const std::string& line : kernels_) text += line + "\n";
  write_text_file(plan.run.dir + "/kernels.txt", text);
  console.line(detail::concat("kernels: ", kernels_.size(), " products, listed in ", printable(plan.run.dir),
                              "/kernels.txt"));
}

void Run::reduce_sums() {
  if (comm.size() == 1) return;
  for (const auto& [name, value] : sum_by_name(comm, own_sums_)) add_common(name, value);
  own_sums_.clear();
}

double Run::sum(const std::string& name) const {
  const auto it = state.counters.find("step." + name);
  return it == state.counters.end() ? 0.0 : it->second;
}

void Run::clear_sums() {
  auto& counters = state.counters;
  for (auto it = counters.lower_bound("step."); it != counters.end() && it->first.rfind("step.", 0) == 0;) {
    it = counters.erase(it);
  }
}

void Run::judge(const StepReport& report, const std::string& policy, int64_t max_skips) {
  double& skipped = state.counters["skipped_in_a_row"];
  if (report.applied) {
    skipped = 0;
    return;
  }
  skipped += 1;
  state.counters["skipped_updates"] += 1;
  const std::string what = detail::concat(printable(stage().name), " step ", state.step + 1, ": ",
                                          report.nonfinite, " non-finite values in gradients or operands");
  if (policy == "stop") throw NonFiniteError(what + "; weights are unchanged (on_nonfinite: stop)");
  if (skipped > static_cast<double>(max_skips)) {
    throw NonFiniteError(
        detail::concat(what, "; more than ", max_skips, " updates skipped in a row (max_skips)"));
  }
  console.warn(what + "; the update was skipped");
}

}  // namespace fp4t
