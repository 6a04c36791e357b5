// What a tokenizer.json says, as far as it decides ids.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "engine/tokens/added_tokens.h"
#include "engine/tokens/bpe.h"

namespace fp4t {

// One step of cutting a text into words.
struct CutStep {
  enum class Kind {
    kSplit,        // at each match of `pattern`
    kPrefixSpace,  // a space in front of a piece that has none
  };
  Kind kind = Kind::kSplit;
  std::string pattern;     // as SplitPattern takes it
  bool keeps_gaps = true;  // what lies between matches is a piece too, or dropped
};

struct TokenizerFile {
  std::vector<std::string> tokens;  // of each id the bytes that it stands for; empty: no such id
  std::vector<std::string>
      spelling;  // of each id the bytes that merges make it from; empty: not made from text
  std::vector<Merge> merges;
  bool ignore_merges = false;
  bool composes = false;  // NFC first
  std::vector<AddedToken> added;
  std::vector<CutStep> steps;
  std::vector<int32_t> prefix;  // what the file's post-processor puts in front of a text
};

// Throws MissingInputError; BadDataError naming the file and the place in it, also for parts that are not
// supported.
TokenizerFile read_tokenizer_file(const std::string& path);

}  // namespace fp4t
