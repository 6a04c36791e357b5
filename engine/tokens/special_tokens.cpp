#include "engine/tokens/special_tokens.h"

#include <algorithm>

#include "kernels/base/text.h"

namespace fp4t {

namespace {

constexpr const char* kNone = "none";

// Of families that this program trains, in the order in which they are looked for: where a base model's
// vocabulary has several, the first is what its documents were separated by.
constexpr const char* kUsualEnds[] = {"<|endoftext|>", "<|end_of_text|>", "</s>",
                                      "<eos>",         "<|eos|>",         "<eod>"};

int32_t token_of_key(const char* key, const std::string& text, const Tokenizer& tokenizer) {
  try {
    return tokenizer.single_token(text);
  } catch (const RecipeError& e) {
    throw RecipeError(std::string("tokenizer.") + key + ": " + e.what());
  }
}

}  // namespace

std::pair<int32_t, int32_t> choose_document_tokens(TokenizerSpec& spec, const std::vector<std::string>& names,
                                                   const std::vector<int32_t>& prefix,
                                                   const Tokenizer& tokenizer) {
  if (spec.end_of_document.empty()) {
    for (const char* usual : kUsualEnds) {
      if (!spec.end_of_document.empty()) break;
      if (std::find(names.begin(), names.end(), usual) != names.end()) spec.end_of_document = usual;
    }
    if (spec.end_of_document.empty()) {
      throw RecipeError(
          "tokenizer.end_of_document: missing, and " + printable(spec.path) +
          " has no token with a usual name for it, such as <|endoftext|>; allowed: a token's text");
    }
  }
  if (spec.begin_of_document.empty()) {
    if (prefix.size() > 1) {
      throw RecipeError(detail::concat("tokenizer.begin_of_document: missing, and ", printable(spec.path),
                                       " puts ", prefix.size(),
                                       " tokens in front of a text; allowed: one token's text, or none"));
    }
    spec.begin_of_document = prefix.empty() ? kNone : names[static_cast<size_t>(prefix[0])];
  }
  const int32_t end = token_of_key("end_of_document", spec.end_of_document, tokenizer);
  const bool begins = spec.begin_of_document != kNone;
  return {begins ? token_of_key("begin_of_document", spec.begin_of_document, tokenizer) : -1, end};
}

void check_file_facts(TokenizerSpec& spec, int64_t vocabulary, const std::string& hash) {
  if (spec.vocabulary != 0 && spec.vocabulary != vocabulary) {
    throw RecipeError(detail::concat("tokenizer.vocabulary: found ", spec.vocabulary, "; ",
                                     printable(spec.path), " has ", vocabulary,
                                     " tokens, allowed: that, or 0"));
  }
  if (!spec.hash.empty() && spec.hash != hash) {
    throw BadDataError(detail::concat("tokenizer.hash: found ", printable(spec.hash), "; ",
                                      printable(spec.path), " has the hash ", hash,
                                      ": it is another tokenizer than was meant"));
  }
  spec.vocabulary = vocabulary;
  spec.hash = hash;
}

}  // namespace fp4t
