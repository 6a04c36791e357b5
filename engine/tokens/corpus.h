// Training data: the sequences of a stage as a pure function of (seed, global sample counter).
// A sample is `length` tokens with their targets; it comes from one source, sources are mixed by weight
// with a low-discrepancy schedule that needs no state, and each epoch of a source visits every sequence
// exactly once in an order of its own. Held-out documents never appear.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

// One packed sequence: `length` entries each. Documents are masked from each other; the last token of a
// document has no target (-1) unless it is followed by its own continuation.
struct Sequence {
  std::vector<int32_t> tokens, targets, positions, doc_begin;
};

class Corpus {
 public:
  virtual ~Corpus() = default;
  // Sample number `sample_id` of the run's stage, any id >= 0.
  virtual Sequence sample(int64_t sample_id) const = 0;
  // Index of the source that it comes from.
  virtual int source_of(int64_t sample_id) const = 0;
  virtual std::vector<std::string> source_names() const = 0;
  // Held-out sequences of one source: at most about `max_tokens` tokens, always the same ones.
  virtual std::vector<Sequence> held_out(int source, int64_t max_tokens) const = 0;
  // Path-independent hash of what the data is (sizes, hashes, options); goes into the checkpoint.
  virtual std::string fingerprint() const = 0;
  // Facts for the log: documents, tokens, held-out tokens, sequences an epoch, by source.
  virtual std::string describe() const = 0;
};

// Throws MissingInputError, BadDataError.
std::unique_ptr<Corpus> make_corpus(const std::vector<DataSourceSpec>& sources, int64_t length, uint64_t seed,
                                    const Tokenizer& tokenizer);

}  // namespace fp4t
