// One source of training sequences. The n-th sequence is a pure function of the source and n.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "engine/tokens/corpus.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

class DataSource {
 public:
  virtual ~DataSource() = default;
  virtual Sequence sequence(int64_t n) const = 0;
  virtual std::vector<Sequence> held_out(int64_t max_tokens) const = 0;
  virtual std::string fingerprint() const = 0;
  virtual std::string describe() const = 0;
};

// Cuts documents, one after another, into sequences of `length` tokens. A document that crosses the end of a
// sequence goes on in the next as a document of its own, its last token there trained on the continuation.
// The last sequence is filled with untrained <eod>.
std::vector<Sequence> pack_documents(const std::vector<std::vector<int32_t>>& documents, int64_t length,
                                     int32_t end_of_document);

std::unique_ptr<DataSource> make_document_source(const DataSourceSpec& spec, int64_t length, uint64_t seed,
                                                 uint32_t index, const Tokenizer& tokenizer);
std::unique_ptr<DataSource> make_generated_source(const DataSourceSpec& spec, int64_t length, uint64_t seed,
                                                  uint32_t index, const Tokenizer& tokenizer);
std::unique_ptr<DataSource> make_random_source(const DataSourceSpec& spec, int64_t length, uint64_t seed,
                                               uint32_t index, const Tokenizer& tokenizer);

// Documents of a text or jsonl source in file order. Throws MissingInputError, BadDataError.
struct Documents {
  std::vector<std::string> texts;
  std::string hash;  // over names without folders, and contents
  int64_t bytes = 0, files = 0;
};
Documents read_documents(const DataSourceSpec& spec);

}  // namespace fp4t
