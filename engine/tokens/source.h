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

// Documents of a text or jsonl source in file order. Neither kind has a byte order mark or a NUL in them.
struct Documents {
  // Where a document begins.
  struct Place {
    size_t file;   // index in `files`
    int64_t line;  // from 1
  };
  std::vector<std::string> texts;
  std::vector<Place> places;  // of each text
  std::vector<std::string> files;
  std::string hash;  // over names without folders, and contents
  int64_t bytes = 0;
  bool breaks_count = true;  // a line break of a text is one of its file (not so in JSONL)

  // Throws BadDataError naming file and line.
  std::vector<int32_t> tokens(size_t document, const Tokenizer& tokenizer) const;
};
// Throws MissingInputError, BadDataError naming file and line.
Documents read_documents(const DataSourceSpec& spec);
// By document, whether training never sees it. Throws BadDataError when that is all of them, or none though
// a fraction is given.
std::vector<bool> held_out_documents(const DataSourceSpec& spec, size_t documents);

}  // namespace fp4t
