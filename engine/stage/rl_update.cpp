#include "engine/stage/rl_update.h"

#include "engine/rl/mismatch.h"
#include "engine/rl/policy.h"
#include "engine/stage/rl_score.h"
#include "kernels/ops/run.h"

namespace fp4t {

namespace {

// What the objective reads of a micro-batch's rows besides their log-probabilities.
struct ObjectiveRows {
  ObjectiveRows(const Rollout& r, const ScoredBatch& m, const ObjectiveSpec& spec, const Divisor& divisor) {
    const auto rows = static_cast<size_t>(m.batch.size());
    for (std::vector<float>* v : {&old, &reference, &advantage, &importance}) v->assign(rows, 0.0f);
    for (std::vector<int32_t>* v : {&begin, &end}) v->assign(rows, 0);
    weight.assign(rows, 0.0);
    for (size_t c = 0; c < m.completions.size(); ++c) {
      const auto i = static_cast<size_t>(m.completions[c]);
      const auto first = static_cast<size_t>(m.first_row[c]);
      const size_t n = r.completions[i].size();
      MismatchCounts counts;  // the rollout's figures count them once
      const std::vector<float> f = importance_of(r.old_log_probs[i], r.log_probs[i], spec.mismatch, counts);
      for (size_t t = 0; t < n; ++t) {
        old[first + t] = r.old_log_probs[i][t];
        if (!r.reference_log_probs.empty()) reference[first + t] = r.reference_log_probs[i][t];
        advantage[first + t] = r.advantages[i];
        importance[first + t] = f[t];
        begin[first + t] = static_cast<int32_t>(first);
        end[first + t] = static_cast<int32_t>(first + n);
        weight[first + t] = divisor.weight(spec, n);
      }
    }
  }
  std::vector<float> old, reference, advantage, importance;
  std::vector<int32_t> begin, end;  // scored rows of the row's completion
  std::vector<double> weight;       // 0: not scored
};

template <class T>
void upload(Queue& q, const std::vector<T>& values, const TensorView& to) {
  q.upload(to.data, values.data(), to.bytes());
}

void enqueue_objective(Queue& q, const ObjectiveSpec& spec, const ObjectiveRows& rows,
                       const Transformer::TokenBuffers& b) {
  const PolicyTerms terms = policy_terms(spec);
  upload(q, rows.old, b.old_log_prob);
  if (terms.kl > 0) upload(q, rows.reference, b.reference);
  upload(q, rows.advantage, b.advantage);
  upload(q, rows.importance, b.importance);
  upload(q, rows.weight, b.weight);
  const bool by_sequence = spec.ratio == "sequence";
  if (by_sequence) {
    upload(q, rows.begin, b.sequence_begin);
    upload(q, rows.end, b.sequence_end);
    fp4t::run(q, SequenceLogRatio{.log_prob = b.log_prob,
                                  .old_log_prob = b.old_log_prob,
                                  .begin = b.sequence_begin,
                                  .end = b.sequence_end,
                                  .mean = b.log_ratio});
  }
  fp4t::run(q, PolicyObjective{.log_prob = b.log_prob,
                               .old_log_prob = b.old_log_prob,
                               .reference = b.reference,
                               .advantage = b.advantage,
                               .weight = b.weight,
                               .importance = b.importance,
                               .log_ratio = by_sequence ? b.log_ratio : TensorView{},
                               .entropy = b.entropy,
                               .terms = terms,
                               .loss = b.loss,
                               .clipped = b.clipped,
                               .d_log_prob = b.d_log_prob,
                               .d_entropy = b.d_entropy});
}

// A micro-batch's losses on their way to the host.
struct PendingObjective {
  Download loss, clipped;
  std::vector<double> weight;
};

// Forward, objective and backward of one micro-batch.
PendingObjective train_micro_batch(Run& run, const RlSpec& spec, ScoredBatch& m, const Divisor& divisor) {
  Pass pass = run.pass_for_training();
  pass.sample_id = static_cast<uint32_t>(run.state.next_sample + m.completions.front());
  pass.token_weight = 1.0 / divisor.tokens;
  route_as_sampled(run, run.state.rollout, m);
  run.model.forward(pass, m.batch);
  run.model.score(pass, scoring_of(spec, false));
  const auto b = run.model.token_buffers(m.batch.size());
  ObjectiveRows rows(run.state.rollout, m, spec.objective, divisor);
  enqueue_objective(run.queue, spec.objective, rows, b);
  run.clock.end(run.queue, StepPhase::kForward);
  run.model.backward(pass, scoring_of(spec, false));
  run.begin_router_sums();
  run.clock.end(run.queue, StepPhase::kBackward);
  return {run.queue.download(b.loss.data, b.loss.bytes()),
          run.queue.download(b.clipped.data, b.clipped.bytes()), std::move(rows.weight)};
}

void add_objective(Run& run, PendingObjective& pending) {
  const std::vector<float> losses = pending.loss.values<float>();
  const std::vector<int32_t> clipped = pending.clipped.values<int32_t>();
  double loss = 0, scored = 0, by_bound[4] = {};
  for (size_t row = 0; row < losses.size(); ++row) {
    if (pending.weight[row] == 0) continue;
    loss += static_cast<double>(losses[row]) * pending.weight[row];
    by_bound[clipped[row]] += 1;
    scored += 1;
  }
  run.add("loss", loss);
  run.add("scored", scored);
  run.add("clipped_low", by_bound[kClippedLow]);
  run.add("clipped_high", by_bound[kClippedHigh]);
  run.add("clipped_dual", by_bound[kClippedDual]);
}

}  // namespace

void update(Run& run, const RlSpec& spec, const std::vector<int64_t>& list, int64_t total_updates) {
  RunState& state = run.state;
  const Rollout& r = state.rollout;
  if (!list.empty()) {
    const Divisor divisor = divisor_of(r, list, spec.objective);
    run.begin_counting();
    run.model.zero_gradients();
    std::vector<PendingObjective> objectives;
    const Span part = run.part(static_cast<int64_t>(list.size()));
    const std::vector<int64_t> mine(list.begin() + part.begin, list.begin() + part.end);
    std::vector<ScoredBatch> batches = micro_batches(r, mine, spec.objective.micro_tokens);
    const size_t calls = run.calls_of_all(batches.size(), true);
    for (ScoredBatch& m : batches) objectives.push_back(train_micro_batch(run, spec, m, divisor));
    for (size_t m = batches.size(); m < calls; ++m) run.serve(run.pass_for_training());
    // The device has got all of the update's work: only now does the host wait for it.
    run.add_operand_stats();
    run.add_router_sums();
    for (PendingObjective& objective : objectives) add_objective(run, objective);
    run.reduce_sums();
    run.clock.end(run.queue, StepPhase::kBackward);
    const int64_t index = state.step * run.stage().updates_per_step + state.update;
    const double factor = schedule_factor(spec.schedule, index, total_updates);
    const StepReport report =
        run.optimizer.step(spec.optimizer, factor, static_cast<uint32_t>(state.attempted_updates),
                           run.sum_over_ranks(run.model.take_nonfinite()));
    run.judge(report, spec.on_nonfinite, spec.max_skips);
    run.add_common("updates", 1);
    run.add_common("grad_norm", report.gradient_norm);
    run.add_common("applied", report.applied);
    run.clock.end(run.queue, StepPhase::kStep);
    state.counters["rl_learning_rate"] = spec.optimizer.learning_rate * factor;
  }
  state.attempted_updates += 1;
  state.update += 1;
}

}  // namespace fp4t
