#include "engine/stage/scorer.h"

#include "kernels/base/check.h"

namespace fp4t {

Scorer::Scorer(Transformer& model, const Pass& pass, int64_t batch_tokens)
    : model_(model), pass_(pass), batch_tokens_(batch_tokens) {
  FP4T_CHECK(batch_tokens >= 1 && batch_tokens <= model.plan().max_tokens, "batch_tokens ", batch_tokens);
}

void Scorer::add(ScoredTokens sequence, Done done) {
  FP4T_CHECK(sequence.first >= 1 && sequence.first < sequence.tokens.size(), "first ", sequence.first);
  FP4T_CHECK(sequence.rows() <= batch_tokens_, "a sequence of ", sequence.rows(), " rows");
  if (batch_.size() + sequence.rows() > batch_tokens_) flush();
  const auto begin = static_cast<int32_t>(batch_.size());
  for (size_t t = 0; t + 1 < sequence.tokens.size(); ++t) {
    batch_.tokens.push_back(sequence.tokens[t]);
    batch_.targets.push_back(t + 1 >= sequence.first ? sequence.tokens[t + 1] : -1);
    batch_.positions.push_back(static_cast<int32_t>(t));
    batch_.doc_begin.push_back(begin);
  }
  pending_.emplace_back(std::move(sequence), std::move(done));
}

void Scorer::flush() {
  if (pending_.empty()) return;
  model_.forward(pass_, batch_);
  model_.score(pass_, Scoring{});
  const auto buffers = model_.token_buffers(batch_.size());
  const auto all = model_.queue().download(buffers.log_prob.data, buffers.log_prob.bytes()).values<float>();
  auto at = all.begin();
  for (const auto& [sequence, done] : pending_) {
    const auto end = at + sequence.rows();
    done({at + static_cast<std::ptrdiff_t>(sequence.first - 1), end});
    at = end;
  }
  pending_.clear();
  batch_ = {};
}

}  // namespace fp4t
