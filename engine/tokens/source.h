// One source of training sequences. The n-th sequence is a pure function of the source and n.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "engine/tokens/corpus.h"
#include "engine/tokens/documents.h"
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

// Documents as sequences of `length` tokens, cut as PackedDocuments does it.
std::vector<Sequence> pack_documents(const std::vector<std::vector<int32_t>>& documents, int64_t length,
                                     int32_t end_of_document);

std::unique_ptr<DataSource> make_document_source(const DataSourceSpec& spec, int64_t length, uint64_t seed,
                                                 uint32_t index, const Tokenizer& tokenizer);
std::unique_ptr<DataSource> make_generated_source(const DataSourceSpec& spec, int64_t length, uint64_t seed,
                                                  uint32_t index, const Tokenizer& tokenizer);
std::unique_ptr<DataSource> make_random_source(const DataSourceSpec& spec, int64_t length, uint64_t seed,
                                               uint32_t index, const Tokenizer& tokenizer);

}  // namespace fp4t
