// A tokenizer.json as Hugging Face's tokenizers library writes it: byte-level BPE (GPT-2, cl100k, Qwen2 and
// Qwen3, Llama 3 and their kin). Ids are those of the library for every text that is well-formed; bytes that
// are no UTF-8, which the library cannot be given, are words of their own, so that every text comes back byte
// by byte. What such a file may hold and this does not do is refused by its place in the file; what has no
// effect on ids (truncation, padding, offsets) is passed over.
#pragma once

#include <memory>
#include <string>

#include "engine/tokens/tokenizer.h"

namespace fp4t {

// Fills in what the specification leaves to the file: vocabulary, begin_of_document, end_of_document, hash.
// Throws MissingInputError, BadDataError naming the file and the place in it, RecipeError for texts that are
// no token.
std::unique_ptr<Tokenizer> make_json_tokenizer(TokenizerSpec& spec);

}  // namespace fp4t
