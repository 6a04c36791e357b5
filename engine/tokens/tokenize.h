// Text files and JSON lines to files of tokens in Megatron-LM's form (token_files.h), tokenised by several
// threads. Beside PREFIX.bin and PREFIX.idx stands PREFIX.tokens.json: which tokenizer made them, of which
// inputs, and their hashes. Training refuses them with another tokenizer, and tells a changed file by the
// hashes.
#pragma once

#include <cstdint>
#include <string>

#include "engine/recipe/recipe.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

struct TokenizeReport {
  int64_t files = 0, documents = 0, tokens = 0, bytes = 0;
  double seconds = 0;
  std::string fingerprint;  // of tokenizer, inputs and options
};

// `source`: paths, kind and options of text or jsonl. The files appear under their names when they are
// complete. Throws MissingInputError, BadDataError naming file and line, SaveError; RecipeError when one of
// the files is there and `replace` is not given.
TokenizeReport tokenize_files(const DataSourceSpec& source, const Tokenizer& tokenizer,
                              const std::string& prefix, int threads, bool replace);

}  // namespace fp4t
