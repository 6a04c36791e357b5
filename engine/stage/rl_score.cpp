#include "engine/stage/rl_score.h"

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

}  // namespace

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
  return {static_cast<float>(spec.sampling.temperature), static_cast<float>(spec.sampling.top_p), entropy};
}

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

}  // namespace fp4t
