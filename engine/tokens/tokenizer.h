// Text to token ids and back. Kind bytes: ids 0..255 are bytes, <eod> is 256. Kind ids: a text is whole
// numbers with white space between, each a token that another program made; <eod> is the last.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/recipe/recipe.h"
#include "kernels/base/check.h"

namespace fp4t {

// A text that is no sequence of tokens, and the byte of it where that shows.
struct NoTokenError : BadDataError {
  NoTokenError(const std::string& m, size_t byte) : BadDataError(m), at(byte) {}
  size_t at;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t vocabulary() const = 0;
  virtual int32_t end_of_document() const = 0;
  // Special tokens are never made from text. Throws NoTokenError.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // Bytes of the tokens; special tokens are left out.
  virtual std::string decode(const std::vector<int32_t>& tokens) const = 0;
  // The one token of a text such as "\n" or "<eod>"; throws RecipeError when it is not one token.
  virtual int32_t single_token(const std::string& text) const = 0;
  // Tokens at which a text shown to a person ends.
  virtual std::vector<int32_t> line_ends() const = 0;
  // Hash of everything that decides its ids (part of data fingerprints).
  virtual std::string fingerprint() const = 0;
};

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerSpec& spec);

}  // namespace fp4t
