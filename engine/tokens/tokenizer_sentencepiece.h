// A SentencePiece .model (Llama 2, Mistral, Gemma and their kin), by the library itself: normalisation, white
// space and byte pieces are the model's own. Ill-formed bytes become U+FFFD there, so such text does not come
// back.
#pragma once

#include <memory>

#include "engine/tokens/tokenizer.h"

namespace fp4t {

// Fills in what the specification leaves to the file: vocabulary, hash, begin_of_document (the model's bos,
// if it has one) and end_of_document (its eos). Throws MissingInputError, BadDataError naming the file,
// RecipeError for texts that are no token, and where this program was built without the library.
std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(TokenizerSpec& spec);

}  // namespace fp4t
