// The reinforcement learning loop: sample, reward, advantage, forward, backward, step, log, save. A step is
// one rollout with all its updates; a checkpoint may fall between two updates, so everything that the rest
// of the step needs lives in the run's state.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "engine/rl/policy.h"
#include "engine/stage/context.h"
#include "engine/stage/evaluate.h"
#include "engine/stage/rl_metrics.h"
#include "engine/stage/spread.h"
#include "kernels/ops/run.h"

namespace fp4t {

namespace {

// A micro-batch of completions: which rows of the batch score which completion token.
struct ScoredBatch {
  TokenBatch batch;
  std::vector<int64_t> completions;  // indices into the rollout
  std::vector<int64_t> first_row;    // of each completion's first scored row
};

void append_completion(ScoredBatch& out, const Rollout& rollout, int64_t index) {
  const auto i = static_cast<size_t>(index);
  const auto& prompt = rollout.prompts[i / static_cast<size_t>(rollout.samples_per_prompt)];
  const auto& completion = rollout.completions[i];
  TokenBatch& b = out.batch;
  const auto begin = static_cast<int32_t>(b.size());
  const size_t rows = prompt.size() + completion.size() - 1;  // the last token predicts nothing
  for (size_t t = 0; t < rows; ++t) {
    b.tokens.push_back(t < prompt.size() ? prompt[t] : completion[t - prompt.size()]);
    const bool scored = t + 1 >= prompt.size();
    b.targets.push_back(scored ? completion[t + 1 - prompt.size()] : -1);
    b.positions.push_back(static_cast<int32_t>(t));
    b.doc_begin.push_back(begin);
  }
  out.completions.push_back(index);
  out.first_row.push_back(begin + static_cast<int64_t>(prompt.size()) - 1);
}

// Cuts a list of completions into micro-batches of at most `max_tokens` rows.
std::vector<ScoredBatch> micro_batches(const Rollout& rollout, const std::vector<int64_t>& list,
                                       int64_t max_tokens) {
  std::vector<ScoredBatch> batches;
  for (int64_t index : list) {
    const auto i = static_cast<size_t>(index);
    const auto rows =
        static_cast<int64_t>(rollout.prompts[i / static_cast<size_t>(rollout.samples_per_prompt)].size() +
                             rollout.completions[i].size() - 1);
    FP4T_CHECK(rows <= max_tokens, "a completion of ", rows, " rows; micro_tokens is ", max_tokens);
    if (batches.empty() || batches.back().batch.size() + rows > max_tokens) batches.emplace_back();
    append_completion(batches.back(), rollout, index);
  }
  return batches;
}

// The distribution that completions are drawn from.
Scoring scoring_of(const RlSpec& spec, bool entropy) {
  return {static_cast<float>(spec.sampling.temperature), static_cast<float>(spec.sampling.top_p), entropy};
}

// Log-probabilities of every completion token under the present weights and the trainer's table: each rank
// scores what it sampled, and all are gathered. The host waits once for all micro-batches.
std::vector<std::vector<float>> score_rollout(Run& run, const RlSpec& spec, const Rollout& rollout,
                                              bool monitor) {
  const Span mine = run.part(spec.sampling.prompts);
  const int64_t begin_of_mine = mine.begin * rollout.samples_per_prompt;
  std::vector<int64_t> list(static_cast<size_t>(mine.count() * rollout.samples_per_prompt));
  for (size_t i = 0; i < list.size(); ++i) list[i] = begin_of_mine + static_cast<int64_t>(i);
  const std::vector<ScoredBatch> batches = micro_batches(rollout, list, spec.objective.micro_tokens);
  const size_t calls = run.calls_of_all(batches.size(), false);
  std::vector<std::pair<Download, Download>> scores;  // log-probabilities, entropies
  for (const ScoredBatch& m : batches) {
    Pass pass = run.pass_for_scoring();
    pass.sample_id = static_cast<uint32_t>(run.state.next_sample + m.completions.front());
    pass.measure_error = monitor && scores.empty() && run.leads() && run.measures_errors();
    run.model.forward(pass, m.batch);
    run.model.score(pass, scoring_of(spec, monitor));
    const auto b = run.model.token_buffers(m.batch.size());
    scores.emplace_back(run.queue.download(b.log_prob.data, b.log_prob.bytes()),
                        monitor ? run.queue.download(b.entropy.data, b.entropy.bytes()) : Download{});
  }
  for (size_t m = batches.size(); m < calls; ++m) run.serve(run.pass_for_scoring());
  std::vector<std::vector<float>> result(list.size());
  for (size_t k = 0; k < batches.size(); ++k) {
    const ScoredBatch& m = batches[k];
    const std::vector<float> log_prob = scores[k].first.values<float>();
    const std::vector<float> entropy = monitor ? scores[k].second.values<float>() : std::vector<float>{};
    for (size_t c = 0; c < m.completions.size(); ++c) {
      const auto i = static_cast<size_t>(m.completions[c]);
      const auto begin = log_prob.begin() + m.first_row[c];
      result[i - static_cast<size_t>(begin_of_mine)].assign(
          begin, begin + static_cast<int64_t>(rollout.completions[i].size()));
      for (size_t t = 0; monitor && t < rollout.completions[i].size(); ++t) {
        run.add("entropy", static_cast<double>(entropy[static_cast<size_t>(m.first_row[c]) + t]));
      }
    }
  }
  return gather_lists(run.comm, std::move(result));
}

// Swaps the policy's tensors with host memory.
void exchange(Run& run, std::vector<std::vector<uint8_t>>& host) {
  size_t k = 0;
  for (const NamedTensor& t : run.policy_tensors()) {
    std::vector<uint8_t> now(static_cast<size_t>(t.view.bytes()));
    run.queue.copy_to_host(now.data(), t.view.data, t.view.bytes());
    run.queue.copy_from_host(t.view.data, host[k].data(), t.view.bytes());
    host[k++].swap(now);
  }
  run.model.params().refresh_copies(run.queue);
  run.model.weights_changed();
}

std::vector<std::vector<float>> score_reference(Run& run, const RlSpec& spec, const Rollout& rollout) {
  std::vector<std::vector<uint8_t>> host;
  for (const NamedTensor& t : run.reference) {
    host.emplace_back(static_cast<size_t>(t.view.bytes()));
    run.queue.copy_to_host(host.back().data(), t.view.data, t.view.bytes());
  }
  exchange(run, host);
  auto result = score_rollout(run, spec, rollout, false);
  exchange(run, host);
  return result;
}

void keep_reference(Run& run) {
  const auto policy = run.policy_tensors();
  for (size_t k = 0; k < run.reference.size(); ++k) {
    std::vector<uint8_t> host(static_cast<size_t>(policy[k].view.bytes()));
    run.queue.copy_to_host(host.data(), policy[k].view.data, policy[k].view.bytes());
    run.queue.copy_from_host(run.reference[k].view.data, host.data(), policy[k].view.bytes());
  }
}

void permute(std::vector<float>& rewards, uint64_t seed, int64_t step) {
  const PhiloxKey key = site_key(seed, Purpose::kRewardPermutation, 0, 0, static_cast<uint32_t>(step), 0);
  for (size_t i = rewards.size(); i > 1; --i) {
    const PhiloxBits bits = site_draw(key, i);
    std::swap(rewards[i - 1], rewards[(uint64_t{bits.word[0]} << 32 | bits.word[1]) % i]);
  }
}

// Verifies this rank's completions, the first of which answers problem `first`, and gathers those of all
// ranks.
void gather_completions(Run& run, const Task& task, int64_t first, std::vector<Completion> completions,
                        Rollout& r) {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<std::vector<float>> log_probs;
  std::vector<uint8_t> finished, verdicts;
  for (size_t i = 0; i < completions.size(); ++i) {
    Completion& c = completions[i];
    std::vector<int32_t> answer = c.tokens;
    if (c.finished) answer.pop_back();
    const auto problem = static_cast<size_t>(first) + i / static_cast<size_t>(r.samples_per_prompt);
    const Verdict verdict = task.verify(r.problems[problem], run.tokenizer->decode(answer), c.finished);
    verdicts.push_back(static_cast<uint8_t>(verdict));
    finished.push_back(c.finished);
    tokens.push_back(std::move(c.tokens));
    log_probs.push_back(std::move(c.log_probs));
  }
  r.completions = gather_lists(run.comm, std::move(tokens));
  r.log_probs = gather_lists(run.comm, std::move(log_probs));
  r.finished = gather_list(run.comm, finished);
  r.verdicts = gather_list(run.comm, verdicts);
  for (const uint8_t v : r.verdicts) {
    r.rewards.push_back(static_cast<Verdict>(v) == Verdict::kRight ? 1.0f : 0.0f);
  }
}

// Prompts, completions, rewards, advantages and the trainer's own log-probabilities of one step.
Rollout sample_rollout(Run& run, const RlSpec& spec, const Task& task) {
  Rollout r;
  r.samples_per_prompt = spec.sampling.samples;
  GenerateOptions options;
  options.temperature = spec.sampling.temperature;
  options.top_p = spec.sampling.top_p;
  options.max_tokens = spec.sampling.max_tokens;
  options.max_batch = spec.sampling.max_batch;
  for (const std::string& text : spec.sampling.end_tokens) {
    options.end_tokens.push_back(run.tokenizer->single_token(text));
  }
  options.key = site_key(run.plan.run.seed, Purpose::kSampling, 0, 0,
                         static_cast<uint32_t>(run.state.attempted_updates), 0);
  const PhiloxKey problems =
      site_key(run.plan.run.seed, Purpose::kTask, 0, static_cast<uint32_t>(run.state.stage), 0, 0);
  const Span mine = run.part(spec.sampling.prompts);  // groups stay whole
  std::vector<GenerateRequest> requests;
  for (int64_t p = 0; p < spec.sampling.prompts; ++p) {
    r.problems.push_back(task.training(problems, run.state.step * spec.sampling.prompts + p));
    r.prompts.push_back(run.tokenizer->encode(r.problems.back().prompt));
    if (p < mine.begin || p >= mine.end) continue;
    for (int64_t s = 0; s < spec.sampling.samples; ++s) {
      requests.push_back({r.prompts.back(), run.state.next_sample + p * spec.sampling.samples + s});
    }
  }
  std::vector<Completion> completions =
      generate_together(run, run.pass_for_sampling(), requests, options, "sampling");
  run.begin_counting();
  gather_completions(run, task, mine.begin, std::move(completions), r);
  if (spec.task.permute_rewards) permute(r.rewards, run.plan.run.seed, run.state.step);
  r.advantages = group_advantages(r.rewards, r.samples_per_prompt, spec.objective.normalise_std);
  r.old_log_probs = score_rollout(run, spec, r, true);
  if (spec.objective.kl > 0) r.reference_log_probs = score_reference(run, spec, r);
  r.check();
  return r;
}

struct Normaliser {
  double tokens = 0, sequences = 0;
  // Weight of one token of completion i in the mean loss of an update.
  double weight(const ObjectiveSpec& spec, size_t completion_tokens) const {
    if (spec.average == "sequence") return 1.0 / (sequences * static_cast<double>(completion_tokens));
    return 1.0 / tokens;
  }
};

// What the objective reads of a micro-batch's rows besides their log-probabilities.
struct ObjectiveRows {
  ObjectiveRows(const Rollout& r, const ScoredBatch& m, const ObjectiveSpec& spec,
                const Normaliser& normaliser) {
    const auto rows = static_cast<size_t>(m.batch.size());
    for (std::vector<float>* v : {&old, &reference, &advantage}) v->assign(rows, 0.0f);
    weight.assign(rows, 0.0);
    for (size_t c = 0; c < m.completions.size(); ++c) {
      const auto i = static_cast<size_t>(m.completions[c]);
      const auto first = static_cast<size_t>(m.first_row[c]);
      const size_t n = r.completions[i].size();
      for (size_t t = 0; t < n; ++t) {
        old[first + t] = r.old_log_probs[i][t];
        if (!r.reference_log_probs.empty()) reference[first + t] = r.reference_log_probs[i][t];
        advantage[first + t] = r.advantages[i];
        weight[first + t] = normaliser.weight(spec, n);
      }
    }
  }
  std::vector<float> old, reference, advantage;
  std::vector<double> weight;  // 0: not scored
};

// A micro-batch's losses on their way to the host.
struct PendingObjective {
  Download loss, clipped;
  std::vector<double> weight;
};

// Forward, objective and backward of one micro-batch.
PendingObjective train_micro_batch(Run& run, const RlSpec& spec, const ScoredBatch& m,
                                   const Normaliser& normaliser) {
  Pass pass = run.pass_for_training();
  pass.sample_id = static_cast<uint32_t>(run.state.next_sample + m.completions.front());
  pass.token_weight = 1.0 / normaliser.tokens;
  run.model.forward(pass, m.batch);
  run.model.score(pass, scoring_of(spec, false));
  const auto b = run.model.token_buffers(m.batch.size());
  ObjectiveRows rows(run.state.rollout, m, spec.objective, normaliser);
  Queue& q = run.queue;
  q.upload(b.old_log_prob.data, rows.old.data(), b.old_log_prob.bytes());
  q.upload(b.reference.data, rows.reference.data(), b.reference.bytes());
  q.upload(b.advantage.data, rows.advantage.data(), b.advantage.bytes());
  q.upload(b.weight.data, rows.weight.data(), b.weight.bytes());
  fp4t::run(q, PolicyObjective{.log_prob = b.log_prob,
                               .old_log_prob = b.old_log_prob,
                               .reference = b.reference,
                               .advantage = b.advantage,
                               .weight = b.weight,
                               .clip = policy_clip(spec.objective),
                               .loss = b.loss,
                               .clipped = b.clipped,
                               .d_log_prob = b.d_log_prob});
  run.model.backward(pass, scoring_of(spec, false));
  run.begin_router_sums();
  return {q.download(b.loss.data, b.loss.bytes()), q.download(b.clipped.data, b.clipped.bytes()),
          std::move(rows.weight)};
}

void add_objective(Run& run, PendingObjective& pending) {
  const std::vector<float> losses = pending.loss.values<float>();
  const std::vector<int32_t> clipped = pending.clipped.values<int32_t>();
  double loss = 0;
  for (size_t row = 0; row < losses.size(); ++row) {
    if (pending.weight[row] == 0) continue;
    loss += static_cast<double>(losses[row]) * pending.weight[row];
    run.add("clipped", clipped[row]);
    run.add("scored", 1);
  }
  run.add("loss", loss);
}

// One optimizer update on a list of completions; an empty list is no update but counts as attempted.
void update(Run& run, const RlSpec& spec, const std::vector<int64_t>& list, int64_t total_updates) {
  RunState& state = run.state;
  const Rollout& r = state.rollout;
  if (!list.empty()) {
    Normaliser normaliser;
    for (int64_t i : list)
      normaliser.tokens += static_cast<double>(r.completions[static_cast<size_t>(i)].size());
    normaliser.sequences = static_cast<double>(list.size());
    run.begin_counting();
    run.model.zero_gradients();
    std::vector<PendingObjective> objectives;
    const Span part = run.part(static_cast<int64_t>(list.size()));
    const std::vector<int64_t> mine(list.begin() + part.begin, list.begin() + part.end);
    const std::vector<ScoredBatch> batches = micro_batches(r, mine, spec.objective.micro_tokens);
    const size_t calls = run.calls_of_all(batches.size(), true);
    for (const ScoredBatch& m : batches) objectives.push_back(train_micro_batch(run, spec, m, normaliser));
    for (size_t m = batches.size(); m < calls; ++m) run.serve(run.pass_for_training());
    // The device has got all of the update's work: only now does the host wait for it.
    run.add_operand_stats();
    run.add_router_sums();
    for (PendingObjective& objective : objectives) add_objective(run, objective);
    run.reduce_sums();
    const int64_t index = state.step * run.stage().updates_per_step + state.update;
    const double factor = schedule_factor(spec.schedule, index, total_updates);
    const StepReport report =
        run.optimizer.step(spec.optimizer, factor, static_cast<uint32_t>(state.attempted_updates),
                           run.sum_over_ranks(run.model.take_nonfinite()));
    run.judge(report, spec.on_nonfinite, spec.max_skips);
    run.add_common("updates", 1);
    run.add_common("grad_norm", report.gradient_norm);
    run.add_common("applied", report.applied);
    state.counters["rl_learning_rate"] = spec.optimizer.learning_rate * factor;
  }
  state.attempted_updates += 1;
  state.update += 1;
}

void begin_step(Run& run, const RlSpec& spec, const Task& task) {
  Rollout rollout = sample_rollout(run, spec, task);
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
  const TextBefore text = text_before(run);
  const std::string key = task_key(static_cast<size_t>(state.stage));
  if (state.texts.count(key) == 0) {
    keep_reference(run);
    evaluate(run, text.corpus.get(), text.sources, spec.eval, "start");
    state.texts[key] = task->held_out_hash();
  }
  evaluate_if_due(run, text.corpus.get(), text.sources, spec.eval);  // a stop may have cut it off
  const int64_t total_updates = stage.steps * stage.updates_per_step;
  double seconds_a_step = 0;
  while (state.step < stage.steps) {
    run.stop_if_requested();
    const auto begin = std::chrono::steady_clock::now();
    if (state.update == 0) begin_step(run, spec, *task);
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
