// Where the library is missing.
#include "engine/tokens/tokenizer_sentencepiece.h"

namespace fp4t {

std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(TokenizerSpec&) {
  throw RecipeError(
      "tokenizer.kind: sentencepiece, and this program was built without SentencePiece "
      "(libsentencepiece-dev); allowed: bytes, ids, json");
}

}  // namespace fp4t
