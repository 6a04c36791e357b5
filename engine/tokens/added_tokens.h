// Tokens that are found in a text before it is cut into words: the `added_tokens` of a tokenizer.json,
// special or not. Of several that begin at one place the longest is taken, and the search goes on behind it.
// Rules for words and for white space around a token as in Hugging Face's tokenizers (AddedVocabulary).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace fp4t {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;      // never made from text, unless asked for; left out of decoded text
  bool single_word = false;  // not inside a word
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // and behind it
  bool normalized = false;   // looked for after normalisation
};

class AddedTokenFinder {
 public:
  void add(const AddedToken& token, const std::string& pattern);
  bool empty() const { return tokens_.empty(); }

  // Calls text(begin, end) for the stretches between tokens, none of them empty, and token(id) for tokens, in
  // order. Special tokens are passed over, as text, unless `specials`. `all` is well-formed.
  void split(std::string_view all, bool specials, const std::function<void(size_t, size_t)>& text,
             const std::function<void(int32_t)>& token) const;

 private:
  struct Node {
    std::map<char, size_t> next;
    int token = -1;  // index in tokens_
  };
  // The longest token that begins at `at`: its index and end, or -1.
  int longest(std::string_view all, size_t at, size_t& end) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_{1};
  bool begins_[256] = {};  // whether a token begins with the byte
};

}  // namespace fp4t
