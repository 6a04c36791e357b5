// Log-probabilities of given tokens, many sequences a forward pass.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/model/transformer.h"

namespace fp4t {

// A sequence by itself. Tokens [first, tokens.size()) are scored, each given all those before it; 1 <= first.
struct ScoredTokens {
  std::vector<int32_t> tokens;
  size_t first = 1;
  // Rows that it takes of a batch: the last token predicts nothing.
  int64_t rows() const { return static_cast<int64_t>(tokens.size()) - 1; }
};

class Scorer {
 public:
  // log p of tokens[first], tokens[first + 1], ..., in nats.
  using Done = std::function<void(const std::vector<float>&)>;

  // Packs what is added, in order, into batches of at most `batch_tokens` rows, which the model's plan has
  // room for. With formats whose scales are shared over a tensor a value depends on its batch; with
  // row-invariant ones it does not.
  Scorer(Transformer& model, const Pass& pass, int64_t batch_tokens);

  // `done` is called before flush() returns, in the order of adding.
  void add(ScoredTokens sequence, Done done);
  void flush();

 private:
  Transformer& model_;
  Pass pass_;
  int64_t batch_tokens_;
  TokenBatch batch_;
  std::vector<std::pair<ScoredTokens, Done>> pending_;
};

}  // namespace fp4t
