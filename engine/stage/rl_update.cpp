#include "engine/stage/rl_update.h"

#include "engine/rl/policy.h"
#include "engine/stage/rl_score.h"
#include "kernels/ops/run.h"

namespace fp4t {

namespace {

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

}  // namespace

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

}  // namespace fp4t
