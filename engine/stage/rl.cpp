// The reinforcement learning loop: sample, reward, advantage, forward, backward, step, log, save. A step is
// one rollout with all its updates; a checkpoint may fall between two updates, so everything that the rest
// of the step needs lives in the run's state.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "engine/rl/policy.h"
#include "engine/rl/routing.h"
#include "engine/stage/context.h"
#include "engine/stage/evaluate.h"
#include "engine/stage/rl_metrics.h"
#include "engine/stage/rl_rollout.h"
#include "engine/stage/rl_score.h"
#include "engine/stage/rl_update.h"
#include "engine/stage/rollout_files.h"

namespace fp4t {

namespace {

void begin_step(Run& run, const RlSpec& spec, const Task& task, Rewards& rewards) {
  Rollout rollout = sample_rollout(run, spec, task, rewards);
  run.add_operand_stats();
  run.reduce_sums();
  run.state.rollout = std::move(rollout);
  double& least = run.state.counters["logprob_equal_fraction_min"];
  const double equal = equal_fraction(run.state.rollout);
  least = run.state.counters.count("logprob_compared") ? std::min(least, equal) : equal;
  run.state.counters["logprob_compared"] = 1;
}

void report_clips(const Run& run, MetricsRecord& record) {
  const double scored = std::max(1.0, run.sum("scored"));
  const double low = run.sum("clipped_low"), high = run.sum("clipped_high"), dual = run.sum("clipped_dual");
  record.numbers.insert(record.numbers.end(), {{"clip_fraction", (low + high + dual) / scored},
                                               {"clip_fraction_low", low / scored},
                                               {"clip_fraction_high", high / scored},
                                               {"clip_fraction_dual", dual / scored}});
}

// Shares of the rows whose own routing was not the sampler's, by layer.
void report_disagreement(const Run& run, MetricsRecord& record) {
  const double rows = run.sum("router_rows");
  if (rows == 0) return;
  std::vector<double> layers;
  for (int64_t l = 0; l < RoutingShape::of(run.plan.model).layers; ++l) {
    layers.push_back(run.sum(router_differs_name(static_cast<size_t>(l))) / rows);
  }
  double mean = 0;
  for (const double x : layers) mean += x / static_cast<double>(layers.size());
  record.numbers.emplace_back("router_disagreement", mean);
  record.lists.emplace_back("router_disagreement_by_layer", std::move(layers));
}

// States that look like training and are not. Counted over steps, told every so many of them.
class Alarms {
 public:
  static constexpr double kEvery = 20;

  Alarms(Run& run, const MetricsRecord& record) : run_(run), record_(record) {}

  // Returns the steps in a row without any signal.
  double no_signal() {
    const bool equal = figure(record_, "zero_variance_groups") == 1.0;
    const bool cut = figure(record_, "truncated") == 1.0;
    const bool masked = figure(record_, "rho_left_out") == 1.0;
    const double silent = count("steps_without_signal", equal || cut || masked);
    if (silent > 0 && std::fmod(silent, kEvery) == 0) {
      std::string why;
      const auto say = [&](bool holds, const char* what) {
        if (holds) why += (why.empty() ? "" : ", and ") + std::string(what);
      };
      say(equal, "every group has equal rewards");
      say(cut, "every completion is cut at sampling.max_tokens");
      say(masked, "objective.mismatch masks every token");
      run_.console.warn(detail::concat(silent, " steps in a row without any learning signal: ", why));
    }
    return silent;
  }

  // A policy that has stopped exploring.
  void entropy_collapse() {
    constexpr double kShare = 0.01;
    auto& counters = run_.state.counters;
    const double entropy = figure(record_, "entropy");
    const double first = counters.try_emplace("first_entropy", entropy).first->second;
    const double low = count("steps_of_low_entropy", entropy < kShare * first);
    if (low > 0 && std::fmod(low, kEvery) == 0) {
      run_.console.warn(detail::concat("entropy collapse: ", low, " steps in a row below ", kShare * first,
                                       " nats a token, a hundredth of the stage's first step"));
    }
  }

 private:
  double count(const std::string& name, bool again) {
    double& n = run_.state.counters[name];
    return n = again ? n + 1 : 0;
  }

  Run& run_;
  const MetricsRecord& record_;
};

void end_step(Run& run, const RlSpec& spec) {
  RunState& state = run.state;
  if (run.sum("applied") > 0) run.balance_experts();
  MetricsRecord record = rollout_metrics(state.rollout, spec.objective.mismatch);
  add_reward_parts(record, state.rollout, reward_names(spec.rewards));
  write_rollouts(run, spec);
  const double updates = std::max(1.0, run.sum("updates"));
  record.numbers.insert(record.numbers.end(),
                        {{"loss", run.sum("loss") / updates},
                         {"grad_norm", run.sum("grad_norm") / updates},
                         {"learning_rate", state.counters["rl_learning_rate"]},
                         {"entropy", run.sum("entropy") / std::max(1.0, figure(record, "completion_tokens"))},
                         {"updates", run.sum("updates")},
                         {"applied", run.sum("applied")}});
  if (spec.objective.resample > 0) record.numbers.emplace_back("resampled_groups", run.sum("resampled"));
  report_clips(run, record);
  report_disagreement(run, record);
  run.report_router(record, run.sum("scored"));
  run.report_operand_stats(record);
  run.clear_sums();
  state.next_sample += state.rollout.size();
  state.step += 1;
  state.update = 0;
  state.rollout = {};
  Alarms alarms(run, record);
  const double silent = alarms.no_signal();
  alarms.entropy_collapse();
  run.write_metrics("step", record);
  run.note_kernels();
  if (spec.stop_without_signal > 0 && silent >= static_cast<double>(spec.stop_without_signal)) {
    run.save(true);
    throw Error(ExitCode::kNonFinite,
                detail::concat("stopped after ", silent,
                               " steps in a row without any learning signal (stop_without_signal); saved ",
                               run.last_checkpoint()));
  }
}

// A stage counts its own.
void begin_counters(RunState& state) {
  for (const char* name : {"steps_without_signal", "steps_of_low_entropy", "first_entropy", kExtraProblems}) {
    state.counters.erase(name);
  }
}

void print_step(Run& run, const Rollout& r, double seconds, double seconds_a_step,
                const std::string& exposed) {
  const StagePlan& stage = run.stage();
  const std::string eta =
      duration_text(seconds_a_step * static_cast<double>(stage.steps - run.state.step - 1));
  char figures[280];
  std::snprintf(figures, sizeof(figures),
                " step=%ld/%ld reward=%.4f grad_norm=%.3f lr=%.2e logprob_equal=%.4f tok/s=%.0f%s eta=%s",
                static_cast<long>(run.state.step + 1), static_cast<long>(stage.steps), mean_reward(r),
                run.sum("grad_norm") / std::max(1.0, run.sum("updates")),
                run.state.counters["rl_learning_rate"], equal_fraction(r),
                static_cast<double>(completion_tokens(r)) / std::max(seconds, 1e-9), exposed.c_str(),
                eta.c_str());
  run.console.line(stage.name + figures);
  if (run.clock.timed()) {
    run.console.line(
        detail::concat(run.stage().name, " step=", run.state.step + 1, " seconds: ", run.clock.text()));
  }
}

// The data of the pretraining before: its held-out text keeps being measured.
struct TextBefore {
  std::unique_ptr<Corpus> corpus;
  std::vector<DataSourceSpec> sources;
};

TextBefore text_before(Run& run) {
  TextBefore text;
  for (auto i = static_cast<size_t>(run.state.stage); i-- > 0;) {
    const StagePlan& stage = run.plan.stages[i];
    if (stage.is_rl) continue;
    const auto& spec = std::get<PretrainSpec>(stage.spec);
    text.corpus = make_corpus(spec.data, spec.batch.length, run.plan.run.seed, *run.tokenizer);
    text.sources = spec.data;
    run.check_data(data_key(i), stage.name, text.corpus->fingerprint());
    break;
  }
  return text;
}

}  // namespace

void run_rl(Run& run) {
  const StagePlan& stage = run.stage();
  const auto& spec = std::get<RlSpec>(stage.spec);
  RunState& state = run.state;
  const std::unique_ptr<Task> task = make_task(spec.task);
  Rewards rewards = make_rewards(run, spec);
  const TextBefore text = text_before(run);
  const std::string key = task_key(static_cast<size_t>(state.stage));
  if (state.texts.count(key) == 0) {
    keep_reference(run);
    begin_counters(state);
    evaluate(run, text.corpus.get(), text.sources, spec.eval, "start");
    state.texts[key] = task->fingerprint();
  }
  run.check_data(key, stage.name, task->fingerprint());  // files may change under an unchanged recipe
  evaluate_if_due(run, text.corpus.get(), text.sources, spec.eval);  // a stop may have cut it off
  const int64_t total_updates = stage.steps * stage.updates_per_step;
  double seconds_a_step = 0;
  while (state.step < stage.steps) {
    run.stop_if_requested();
    const StepTimer timer(run.comm, run.queue);
    if (state.update == 0) begin_step(run, spec, *task, rewards);
    const auto lists = mini_batches(state.rollout, spec.objective, run.plan.run.seed, state.step);
    while (state.update < static_cast<int64_t>(lists.size())) {
      update(run, spec, lists[static_cast<size_t>(state.update)], total_updates);
      const bool inside = state.update < static_cast<int64_t>(lists.size());
      const int64_t every = spec.checkpoint.every_updates;
      if (inside) run.stop_if_requested();
      if (inside && every > 0 && (state.step * stage.updates_per_step + state.update) % every == 0)
        run.save(false);
    }
    const StepTime time = timer.read();
    seconds_a_step = seconds_a_step == 0 ? time.seconds : 0.9 * seconds_a_step + 0.1 * time.seconds;
    print_step(run, state.rollout, time.seconds, seconds_a_step, timer.exposed_text(time));
    end_step(run, spec);
    const bool last = state.step == stage.steps;
    evaluate_if_due(run, text.corpus.get(), text.sources, spec.eval);
    if (spec.checkpoint.every > 0 && state.step % spec.checkpoint.every == 0 && !last) run.save(false);
  }
  evaluate(run, text.corpus.get(), text.sources, spec.eval, "end");
}

}  // namespace fp4t
