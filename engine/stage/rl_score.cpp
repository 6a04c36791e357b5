#include "engine/stage/rl_score.h"

#include <numeric>

#include "engine/rl/routing.h"
#include "engine/stage/rl_metrics.h"
#include "engine/stage/spread.h"

namespace fp4t {

namespace {

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

enum class Scored : uint8_t { kPolicy, kReference };

// A micro-batch's scores on their way to the host.
struct PendingScores {
  Download log_prob, entropy;
  Download routing;  // replayed: where the own choice is another (router_differs); measured: the own choice
  std::vector<int32_t> sampled_routing;  // measured: the sampler's
};

PendingScores score_batch(Run& run, const RlSpec& spec, const Rollout& rollout, ScoredBatch& m, Scored what,
                          bool first) {
  const bool policy = what == Scored::kPolicy;
  Pass pass = run.pass_for_scoring();
  pass.sample_id = static_cast<uint32_t>(run.state.next_sample + m.completions.front());
  pass.measure_error = policy && first && run.leads() && run.measures_errors();
  PendingScores scores;
  const bool measures = policy && spec.objective.router_replay == "measure";
  if (policy) route_as_sampled(run, rollout, m);
  if (measures) {
    scores.sampled_routing.swap(m.batch.router);
    pass.record_router = true;
  }
  run.model.forward(pass, m.batch);
  run.model.score(pass, scoring_of(spec, policy));
  const auto b = run.model.token_buffers(m.batch.size());
  scores.log_prob = run.queue.download(b.log_prob.data, b.log_prob.bytes());
  if (policy) scores.entropy = run.queue.download(b.entropy.data, b.entropy.bytes());
  if (measures) scores.routing = run.queue.download(b.router.data, b.router.bytes());
  if (!m.batch.router.empty()) {
    scores.routing = run.queue.download(b.router_differs.data, b.router_differs.bytes());
  }
  return scores;
}

// Rows whose routers' own choice was another set of experts, by layer.
void add_disagreement(Run& run, const ScoredBatch& m, PendingScores& scores) {
  const bool measured = !scores.sampled_routing.empty();
  if (m.batch.router.empty() && !measured) return;
  const std::vector<int32_t> found = scores.routing.values<int32_t>();
  const RoutingShape shape = RoutingShape::of(run.plan.model);
  const int64_t rows = m.batch.size();
  std::vector<int64_t> counts;
  if (measured) counts = rows_that_differ(shape, scores.sampled_routing, found, rows);
  for (int64_t l = 0; !measured && l < shape.layers; ++l) {
    const auto begin = found.begin() + l * rows;
    counts.push_back(std::accumulate(begin, begin + rows, int64_t{0}));
  }
  for (size_t l = 0; l < counts.size(); ++l) run.add(router_differs_name(l), static_cast<double>(counts[l]));
  run.add("router_rows", static_cast<double>(rows));
}

// Each rank scores its part of the rollout, and all are gathered.
std::vector<std::vector<float>> score(Run& run, const RlSpec& spec, const Rollout& rollout, Scored what) {
  const Span mine = run.part(spec.sampling.prompts);
  const int64_t begin_of_mine = mine.begin * rollout.samples_per_prompt;
  std::vector<int64_t> list(static_cast<size_t>(mine.count() * rollout.samples_per_prompt));
  for (size_t i = 0; i < list.size(); ++i) list[i] = begin_of_mine + static_cast<int64_t>(i);
  std::vector<ScoredBatch> batches = micro_batches(rollout, list, spec.objective.micro_tokens);
  const size_t calls = run.calls_of_all(batches.size(), false);
  std::vector<PendingScores> scores;
  for (ScoredBatch& m : batches) scores.push_back(score_batch(run, spec, rollout, m, what, scores.empty()));
  for (size_t m = batches.size(); m < calls; ++m) run.serve(run.pass_for_scoring());
  const bool policy = what == Scored::kPolicy;
  std::vector<std::vector<float>> result(list.size());
  for (size_t k = 0; k < batches.size(); ++k) {
    const ScoredBatch& m = batches[k];
    const std::vector<float> log_prob = scores[k].log_prob.values<float>();
    const std::vector<float> entropy = policy ? scores[k].entropy.values<float>() : std::vector<float>{};
    for (size_t c = 0; c < m.completions.size(); ++c) {
      const auto i = static_cast<size_t>(m.completions[c]);
      const auto begin = log_prob.begin() + m.first_row[c];
      result[i - static_cast<size_t>(begin_of_mine)].assign(
          begin, begin + static_cast<int64_t>(rollout.completions[i].size()));
      for (size_t t = 0; policy && t < rollout.completions[i].size(); ++t) {
        run.add("entropy", static_cast<double>(entropy[static_cast<size_t>(m.first_row[c]) + t]));
      }
    }
    add_disagreement(run, m, scores[k]);
  }
  return gather_lists(run.comm, std::move(result));
}

}  // namespace

void route_as_sampled(const Run& run, const Rollout& rollout, ScoredBatch& m) {
  if (rollout.router.empty()) return;
  std::vector<const std::vector<uint8_t>*> parts;
  for (const int64_t i : m.completions) parts.push_back(&rollout.router[static_cast<size_t>(i)]);
  m.batch.router = joined_routing(RoutingShape::of(run.plan.model), parts);
}

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

Scoring scoring_of(const RlSpec& spec, bool entropy) {
  return {static_cast<float>(spec.sampling.temperature), static_cast<float>(spec.sampling.top_p),
          entropy || spec.objective.entropy > 0, spec.objective.entropy > 0};
}

std::vector<std::vector<float>> score_rollout(Run& run, const RlSpec& spec, const Rollout& rollout) {
  return score(run, spec, rollout, Scored::kPolicy);
}

std::vector<std::vector<float>> score_reference(Run& run, const RlSpec& spec, const Rollout& rollout) {
  std::vector<std::vector<uint8_t>> host;
  for (const NamedTensor& t : run.reference) {
    host.emplace_back(static_cast<size_t>(t.view.bytes()));
    run.queue.copy_to_host(host.back().data(), t.view.data, t.view.bytes());
  }
  exchange(run, host);
  auto result = score(run, spec, rollout, Scored::kReference);
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

}  // namespace fp4t
