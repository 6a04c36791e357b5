#include <algorithm>
#include <cmath>

#include "engine/stage/benchmarks.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

std::vector<ScoredTokens> windows_of(const std::vector<int32_t>& document, const TextWindows& windows) {
  FP4T_CHECK(windows.stride >= 1 && windows.stride <= windows.context, "stride ", windows.stride);
  const auto n = static_cast<int64_t>(document.size());
  std::vector<ScoredTokens> list;
  int64_t scored = 1;  // tokens before it are done
  for (int64_t begin = 0; scored < n; begin += windows.stride) {
    // A window reads `context` tokens and predicts the one behind its last, too.
    const int64_t end = std::min(n, begin + windows.context + 1);
    list.push_back({{document.begin() + begin, document.begin() + end}, static_cast<size_t>(scored - begin)});
    scored = end;
  }
  return list;
}

double Perplexity::nats_per_token() const { return nats / static_cast<double>(scored_tokens); }
double Perplexity::bits_per_byte() const { return nats / std::log(2.0) / static_cast<double>(scored_bytes); }
double Perplexity::perplexity() const { return std::exp(nats_per_token()); }

Documents read_text_documents(const TextFile& file) {
  DataSourceSpec spec;
  spec.name = file.path;
  spec.kind = file.path.ends_with(".jsonl") ? "jsonl" : "text";
  spec.paths = {file.path};
  spec.field = file.field;
  spec.separator = file.separator;
  return read_documents(spec);
}

Perplexity measure_perplexity(Scorer& scorer, const Tokenizer& tokenizer, const Documents& documents,
                              const TextWindows& windows) {
  Perplexity result;
  std::vector<std::vector<int32_t>> tokens;  // all before the first forward: a text may be no tokens
  for (size_t d = 0; d < documents.texts.size(); ++d) tokens.push_back(documents.tokens(d, tokenizer));
  for (size_t d = 0; d < tokens.size(); ++d) {
    if (tokens[d].empty()) continue;
    result.documents += 1;
    result.tokens += static_cast<int64_t>(tokens[d].size());
    result.scored_tokens += static_cast<int64_t>(tokens[d].size()) - 1;
    const auto first = static_cast<int64_t>(tokenizer.decode({tokens[d].front()}).size());
    result.scored_bytes += std::max<int64_t>(0, static_cast<int64_t>(documents.texts[d].size()) - first);
    for (ScoredTokens& window : windows_of(tokens[d], windows)) {
      scorer.add(std::move(window), [&result](const std::vector<float>& log_probs) {
        for (const float p : log_probs) result.nats -= static_cast<double>(p);
      });
    }
  }
  scorer.flush();
  if (result.scored_tokens == 0) {
    throw BadDataError(printable(documents.files.front()) +
                       ": no document of two tokens or more: nothing to score");
  }
  return result;
}

}  // namespace fp4t
