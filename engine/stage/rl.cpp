// The reinforcement learning loop: sample, reward, advantage, forward, backward, step, log, save. A step is
// one rollout with all its updates; a checkpoint may fall between two updates, so everything that the rest
// of the step needs lives in the run's state.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "engine/rl/policy.h"
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

void end_step(Run& run, const RlSpec& spec) {
  RunState& state = run.state;
  if (run.sum("applied") > 0) run.balance_experts();
  MetricsRecord record = rollout_metrics(state.rollout, spec.sampling.max_tokens);
  add_reward_parts(record, state.rollout, reward_names(spec.rewards));
  write_rollouts(run, spec);
  const double updates = std::max(1.0, run.sum("updates"));
  record.numbers.insert(record.numbers.end(),
                        {{"loss", run.sum("loss") / updates},
                         {"grad_norm", run.sum("grad_norm") / updates},
                         {"learning_rate", state.counters["rl_learning_rate"]},
                         {"clip_fraction", run.sum("clipped") / std::max(1.0, run.sum("scored"))},
                         {"entropy", run.sum("entropy") / std::max(1.0, figure(record, "completion_tokens"))},
                         {"updates", run.sum("updates")},
                         {"applied", run.sum("applied")}});
  run.report_router(record, run.sum("scored"));
  run.report_operand_stats(record);
  run.clear_sums();
  state.next_sample += state.rollout.size();
  state.step += 1;
  state.update = 0;
  const bool no_signal = figure(record, "zero_variance_groups") == 1.0 || figure(record, "truncated") == 1.0;
  double& silent = state.counters["steps_without_signal"];
  silent = no_signal ? silent + 1 : 0;
  state.rollout = {};
  run.write_metrics("step", record);
  run.note_kernels();
  if (silent > 0 && std::fmod(silent, 20.0) == 0) {
    run.console.warn(detail::concat(silent,
                                    " steps in a row without any learning signal: every group has equal "
                                    "rewards, or every completion is cut at sampling.max_tokens"));
  }
}

void print_step(Run& run, const Rollout& r, double seconds, double seconds_a_step) {
  const auto reward = mean_reward(r);
  char line[256];
  std::snprintf(
      line, sizeof(line),
      "%s step=%ld/%ld reward=%.4f grad_norm=%.3f lr=%.2e logprob_equal=%.4f tok/s=%.0f eta=%s",
      run.stage().name.c_str(), static_cast<long>(run.state.step + 1), static_cast<long>(run.stage().steps),
      reward, run.sum("grad_norm") / std::max(1.0, run.sum("updates")),
      run.state.counters["rl_learning_rate"], equal_fraction(r),
      static_cast<double>(completion_tokens(r)) / std::max(seconds, 1e-9),
      duration_text(seconds_a_step * static_cast<double>(run.stage().steps - run.state.step - 1)).c_str());
  run.console.line(line);
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
    evaluate(run, text.corpus.get(), text.sources, spec.eval, "start");
    state.texts[key] = task->fingerprint();
  }
  run.check_data(key, stage.name, task->fingerprint());  // files may change under an unchanged recipe
  evaluate_if_due(run, text.corpus.get(), text.sources, spec.eval);  // a stop may have cut it off
  const int64_t total_updates = stage.steps * stage.updates_per_step;
  double seconds_a_step = 0;
  while (state.step < stage.steps) {
    run.stop_if_requested();
    const auto begin = std::chrono::steady_clock::now();
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
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    seconds_a_step = seconds_a_step == 0 ? seconds : 0.9 * seconds_a_step + 0.1 * seconds;
    print_step(run, state.rollout, seconds, seconds_a_step);
    end_step(run, spec);
    const bool last = state.step == stage.steps;
    evaluate_if_due(run, text.corpus.get(), text.sources, spec.eval);
    if (spec.checkpoint.every > 0 && state.step % spec.checkpoint.every == 0 && !last) run.save(false);
  }
  evaluate(run, text.corpus.get(), text.sources, spec.eval, "end");
}

}  // namespace fp4t
