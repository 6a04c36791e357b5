// What recipe and file agree on about tokens that mark documents, and about the file itself.
#pragma once

#include <utility>
#include <vector>

#include "engine/tokens/tokenizer.h"

namespace fp4t {

// Tokens that begin and end a document, the first -1 when there is none, and the specification's keys filled
// in: those of the recipe, or else what the file's post-processor puts in front (`prefix`) and the one name
// of an end that the file has (`names`: of each id the content of an added token, or ""). Throws RecipeError.
std::pair<int32_t, int32_t> choose_document_tokens(TokenizerSpec& spec, const std::vector<std::string>& names,
                                                   const std::vector<int32_t>& prefix,
                                                   const Tokenizer& tokenizer);

// Fills in vocabulary and hash; where the recipe gives them, they must be the file's. Throws RecipeError,
// BadDataError.
void check_file_facts(TokenizerSpec& spec, int64_t vocabulary, const std::string& hash);

}  // namespace fp4t
