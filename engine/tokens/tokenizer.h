// Text to token ids and back.
//   bytes          ids 0 to 255 are bytes, <eod> is 256
//   ids            a text is numbers with white space between, tokens of another program's; <eod> is the last
//   json           byte-level BPE of a tokenizer.json (tokenizer_json.h)
//   sentencepiece  a SentencePiece .model (tokenizer_sentencepiece.h)
// A tokenizer is const after it is made and may be used by many threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/recipe/problems.h"
#include "engine/recipe/recipe.h"
#include "engine/tokens/utf8.h"
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
  // Whether a text gets a space in front (SentencePiece's dummy prefix).
  virtual bool puts_a_space_in_front() const { return false; }
  // What stands in front of every document and prompt; -1: nothing.
  virtual int32_t begin_of_document() const { return -1; }
  // Special tokens are never made from text. Throws NoTokenError.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // The same, but texts of special tokens are those tokens: for text that the user's own program marked up.
  virtual std::vector<int32_t> encode_marked(std::string_view text) const { return encode(text); }
  // Bytes of the tokens as a text of their own; special tokens are left out. What is no token is U+FFFD: a
  // model may have more rows than there are tokens (model.vocabulary).
  virtual std::string decode(const std::vector<int32_t>& tokens) const = 0;
  // Bytes of one token where it goes on with a text; of special tokens none.
  virtual std::string piece(int32_t token) const = 0;
  // The one token of a text such as "\n", "<eod>" or "<|im_end|>"; throws RecipeError when it is not one
  // token.
  virtual int32_t single_token(const std::string& text) const = 0;
  // Tokens at which a text shown to a person ends.
  virtual std::vector<int32_t> line_ends() const = 0;
  // Hash of everything that decides its ids (part of data fingerprints).
  virtual std::string fingerprint() const = 0;

  // A prompt: begin_of_document, if there is one, and the text.
  std::vector<int32_t> prompt(std::string_view text) const;
  // Form of conversations (chat.h); "": prompts are plain text.
  const std::string& chat() const { return chat_; }
  void set_chat(const std::string& form) { chat_ = form; }
  // Tokens that go on with a text, as well-formed UTF-8: parts of characters become U+FFFD.
  std::string continuation(const std::vector<int32_t>& tokens) const;

 private:
  std::string chat_;
};

// Tokens one by one to whole characters.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // What this token makes complete, maybe nothing yet.
  std::string push(int32_t token) { return characters_.push(tokenizer_.piece(token)); }
  std::string finish() { return characters_.finish(); }

 private:
  const Tokenizer& tokenizer_;
  CharacterStream characters_;
};

// Throws RecipeError, MissingInputError, BadDataError.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerSpec& spec);

// Fills in what a recipe leaves to its tokenizer's file (vocabulary, hash, document tokens, with a chat form
// also the end tokens of RL), so that plan and checkpoints have it. Throws as make_tokenizer, with the key's
// place. Call before make_plan.
void complete_tokenizer(Recipe& recipe, const FieldPlaces& places = {});

}  // namespace fp4t
