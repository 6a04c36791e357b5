// Documents cut, one after another, into sequences of equal length, without copying them: sequence n is made
// when it is asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/tokens/corpus.h"
#include "engine/tokens/token_store.h"

namespace fp4t {

class PackedDocuments {
 public:
  // The documents of `order`, in that order. A document that crosses the end of a sequence goes on in the
  // next as a document of its own, its last token there trained on the continuation. The last sequence is
  // filled with untrained <eod>.
  PackedDocuments(const TokenStore& store, std::vector<int64_t> order, int64_t length,
                  int32_t end_of_document);

  int64_t sequences() const;
  int64_t tokens() const { return ends_.empty() ? 0 : ends_.back(); }
  // Throws BadDataError for what is no token.
  Sequence sequence(int64_t n) const;

 private:
  const TokenStore& store_;
  std::vector<int64_t> order_, ends_;  // documents, and where each ends in the row of them all
  int64_t length_;
  int32_t eod_;
};

// Appends tokens of a document that goes on with `next`, -1 when it ends there or that is no target.
// `trained`: of each token whether it is a target; null: all are.
void append_piece(Sequence& sequence, const int32_t* tokens, size_t count, int32_t next,
                  const uint8_t* trained = nullptr);
// Fills a sequence up with untrained <eod>.
void fill_up(Sequence& sequence, int64_t length, int32_t end_of_document);

}  // namespace fp4t
