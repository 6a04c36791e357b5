// Documents as tokens: read from text into memory, or lying in files that other programs made. Whatever their
// form, a document is a range of one long row of tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

class TokenStore {
 public:
  virtual ~TokenStore() = default;
  int64_t documents() const { return static_cast<int64_t>(begins_.size()) - 1; }
  int64_t tokens() const { return begins_.back(); }
  int64_t size(int64_t document) const { return begin(document + 1) - begin(document); }
  // Tokens [from, to) of a document. Throws BadDataError naming file and byte for what is no token.
  void read(int64_t document, int64_t from, int64_t to, int32_t* out) const {
    read_tokens(begin(document) + from, to - from, out);
  }
  // Of the tokens of a document from `from` on, whether each is a target; null: all are.
  const uint8_t* trained(int64_t document, int64_t from) const {
    return trained_.empty() ? nullptr : trained_.data() + begin(document) + from;
  }
  // Looks at every token, and at hashes where a file's writer noted them. Throws as read().
  virtual void check_tokens() const {}
  // Path-independent: of names, contents and options.
  virtual std::string hash() const = 0;
  virtual int64_t files() const = 0;

 protected:
  virtual void read_tokens(int64_t from, int64_t count, int32_t* out) const = 0;
  std::vector<int64_t> begins_ = {0};  // of each document, and the end of the last
  std::vector<uint8_t> trained_;       // of each token; empty: all are

 private:
  int64_t begin(int64_t document) const { return begins_[static_cast<size_t>(document)]; }
};

// Whether a kind of source is files of tokens; whether it is files at all.
bool is_token_file_kind(const std::string& kind);
bool has_documents(const std::string& kind);

// Of a source of kind text, jsonl, megatron, llmc or nanogpt. Throws MissingInputError; BadDataError naming
// the file, and line or byte.
std::unique_ptr<TokenStore> open_token_store(const DataSourceSpec& spec, const Tokenizer& tokenizer);

}  // namespace fp4t
