// The pretraining loop: next batch, forward, backward, step, log, save.
#include <cmath>
#include <cstdio>

#include "engine/stage/context.h"
#include "engine/stage/evaluate.h"

namespace fp4t {

namespace {

struct StepLoss {
  double loss = 0;  // mean over the trained tokens
  int64_t trained_tokens = 0;
};

int64_t count_trained(const std::vector<TokenBatch>& batches) {
  int64_t n = 0;
  for (const TokenBatch& b : batches) {
    for (int32_t target : b.targets) n += target >= 0;
  }
  return n;
}

// Samples [samples.begin, samples.end) of the stage in micro-batches.
std::vector<TokenBatch> next_batches(const Corpus& corpus, const BatchSpec& spec, const Span& samples) {
  std::vector<TokenBatch> batches;
  for (int64_t i = samples.begin; i < samples.end; ++i) {
    if ((i - samples.begin) % spec.micro_sequences == 0) batches.emplace_back();
    append_sequence(batches.back(), corpus.sample(i));
  }
  return batches;
}

// Forward and backward of one micro-batch; returns its log-probabilities, on their way to the host.
Download train_micro_batch(Run& run, const PretrainSpec& spec, const Pass& pass, const TokenBatch& batch) {
  run.model.forward(pass, batch);
  const auto b = run.model.token_buffers(batch.size());
  const auto weight = static_cast<float>(pass.token_weight);
  const std::vector<float> d_log_prob(static_cast<size_t>(batch.size()), -weight);
  run.queue.upload(b.d_log_prob.data, d_log_prob.data(), b.d_log_prob.bytes());
  run.model.backward(pass, Scoring{}, static_cast<float>(2 * spec.z_loss * pass.token_weight));
  return run.queue.download(b.log_prob.data, b.log_prob.bytes());
}

// Sum of the token losses of a micro-batch.
double loss_of(const TokenBatch& batch, const std::vector<float>& log_prob) {
  double loss = 0;
  for (size_t t = 0; t < log_prob.size(); ++t) {
    if (batch.targets[t] >= 0) loss -= static_cast<double>(log_prob[t]);
  }
  return loss;
}

// Gradients of this rank's micro-batches, the first of which begins `offset` samples into the step; the loss
// of all ranks'.
StepLoss accumulate(Run& run, const PretrainSpec& spec, const std::vector<TokenBatch>& batches,
                    int64_t offset) {
  StepLoss result;
  result.trained_tokens =
      static_cast<int64_t>(run.sum_over_ranks(static_cast<double>(count_trained(batches))));
  run.begin_counting();
  run.model.zero_gradients();
  if (result.trained_tokens == 0) {
    run.console.warn("no token of this step is trained; its gradient is zero");
    return result;
  }
  std::vector<Download> log_probs;
  // Where blocks exchange something, ranks with fewer micro-batches serve the others.
  const size_t calls = run.calls_of_all(batches.size(), true);
  for (size_t m = 0; m < calls; ++m) {
    Pass pass = run.pass_for_training();
    pass.completes_gradients = m + 1 == calls;
    if (m >= batches.size()) {
      run.serve(pass);
      continue;
    }
    pass.token_weight = 1.0 / static_cast<double>(result.trained_tokens);
    pass.sample_id = static_cast<uint32_t>(run.state.next_sample + offset +
                                           static_cast<int64_t>(m) * spec.batch.micro_sequences);
    pass.measure_error = m == 0 && run.leads() && run.measures_errors();
    log_probs.push_back(train_micro_batch(run, spec, pass, batches[m]));
    run.begin_router_sums();
  }
  // The device has got all of the step's work: only now does the host wait for it.
  run.add_operand_stats();
  run.add_router_sums();
  run.reduce_sums();
  for (size_t m = 0; m < batches.size(); ++m) {
    result.loss += loss_of(batches[m], log_probs[m].values<float>());
  }
  result.loss = run.sum_over_ranks(result.loss);
  result.loss /= static_cast<double>(result.trained_tokens);
  return result;
}

// Of steps so far, the later ones with more weight.
struct StepSeconds {
  double steps = 0, seconds = 0;
  void add(double of_step) {
    steps = 0.9 * steps + 1;
    seconds = 0.9 * seconds + of_step;
  }
  double mean() const { return seconds / steps; }
};

void print_step(Run& run, const PretrainSpec& spec, double loss, const StepReport& report,
                double learning_rate, const StepSeconds& speed, const std::string& exposed) {
  const StagePlan& stage = run.stage();
  const std::string eta = duration_text(speed.mean() * static_cast<double>(stage.steps - run.state.step));
  char figures[280];
  std::snprintf(figures, sizeof(figures),
                " step=%ld/%ld loss=%.4f grad_norm=%.3f lr=%.2e tok/s=%.0f%s eta=%s%s",
                static_cast<long>(run.state.step), static_cast<long>(stage.steps), loss, report.gradient_norm,
                learning_rate, static_cast<double>(spec.batch.tokens) / speed.mean(), exposed.c_str(),
                eta.c_str(), report.applied ? "" : " SKIPPED");
  run.console.line(stage.name + figures);
}

}  // namespace

void run_pretrain(Run& run) {
  const StagePlan& stage = run.stage();
  const auto& spec = std::get<PretrainSpec>(stage.spec);
  RunState& state = run.state;
  const auto corpus = make_corpus(spec.data, spec.batch.length, run.plan.run.seed, *run.tokenizer);
  run.console.line(corpus->describe());
  const bool begins = !is_started(state, static_cast<size_t>(state.stage));
  if (begins) evaluate(run, corpus.get(), spec.data, spec.eval, "start");
  run.check_data(data_key(static_cast<size_t>(state.stage)), stage.name, corpus->fingerprint());
  evaluate_if_due(run, corpus.get(), spec.data, spec.eval);  // a stop may have cut it off
  const int64_t sequences = spec.batch.tokens / spec.batch.length;
  StepSeconds speed;
  while (state.step < stage.steps) {
    run.stop_if_requested();
    const StepTimer timer(run.comm, run.queue);
    const double factor = schedule_factor(spec.schedule, state.step, stage.steps);
    double& position = state.counters["stage_samples"];
    const Span mine = run.part(sequences);
    const auto first = static_cast<int64_t>(position);
    const auto batches = next_batches(*corpus, spec.batch, {first + mine.begin, first + mine.end});
    const StepLoss loss = accumulate(run, spec, batches, mine.begin);
    const double bad =
        run.sum_over_ranks(run.model.take_nonfinite()) + (std::isfinite(loss.loss) ? 0.0 : 1.0);
    const StepReport report =
        run.optimizer.step(spec.optimizer, factor, static_cast<uint32_t>(state.attempted_updates), bad);
    run.judge(report, spec.on_nonfinite, spec.max_skips);
    if (report.applied) run.balance_experts();
    position += static_cast<double>(sequences);
    state.next_sample += sequences;
    state.attempted_updates += 1;
    state.step += 1;
    state.counters["tokens"] += static_cast<double>(loss.trained_tokens);

    MetricsRecord record;
    record.numbers = {{"loss", loss.loss},
                      {"grad_norm", report.gradient_norm},
                      {"learning_rate", spec.optimizer.learning_rate * factor},
                      {"clip_factor", report.clip_factor},
                      {"applied", report.applied ? 1.0 : 0.0},
                      {"nonfinite", report.nonfinite},
                      {"trained_tokens", static_cast<double>(loss.trained_tokens)},
                      {"tokens", state.counters["tokens"]}};
    run.report_router(record, static_cast<double>(loss.trained_tokens));
    run.report_operand_stats(record);
    run.clear_sums();
    run.write_metrics("step", record);
    run.note_kernels();

    const StepTime time = timer.read();
    speed.add(time.seconds);
    print_step(run, spec, loss.loss, report, spec.optimizer.learning_rate * factor, speed,
               timer.exposed_text(time));
    const bool last = state.step == stage.steps;
    evaluate_if_due(run, corpus.get(), spec.data, spec.eval);
    if (spec.checkpoint.every > 0 && state.step % spec.checkpoint.every == 0 && !last) run.save(false);
  }
  evaluate(run, corpus.get(), spec.data, spec.eval, "end");
}

}  // namespace fp4t
