#include "engine/tokens/added_tokens.h"

#include <algorithm>

#include "engine/tokens/split_pattern.h"
#include "engine/tokens/utf8.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// What counts as a character of a word (Unicode technical standard 18, annex C).
constexpr const char* kWordCharacter = R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}])";

bool is_white_space(uint32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_word_character(std::string_view character) {
  const SplitPattern pattern(kWordCharacter);  // tokens with single_word are rare
  SplitPattern::Matcher matcher(pattern);
  size_t begin, end;
  return matcher.find(character, 0, begin, end);
}

// Beginning of the character that ends at `end`.
size_t character_before(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

bool ends_with_word(std::string_view text) {
  return !text.empty() && is_word_character(text.substr(character_before(text, text.size())));
}
bool starts_with_word(std::string_view text) {
  return !text.empty() && is_word_character(text.substr(0, utf8_length(text, 0)));
}

size_t trailing_space_begin(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    const size_t at = character_before(text, end);
    if (!is_white_space(code_point_at(text, at))) break;
    end = at;
  }
  return end;
}
size_t leading_space_end(std::string_view text) {
  size_t at = 0;
  while (at < text.size() && is_white_space(code_point_at(text, at))) at += utf8_length(text, at);
  return at;
}

}  // namespace

void AddedTokenFinder::add(const AddedToken& token, const std::string& pattern) {
  if (pattern.empty()) return;
  size_t node = 0;
  for (const char c : pattern) {
    const auto [it, is_new] = nodes_[node].next.emplace(c, nodes_.size());
    node = it->second;
    if (is_new) nodes_.emplace_back();
  }
  if (nodes_[node].token >= 0) return;
  nodes_[node].token = static_cast<int>(tokens_.size());
  tokens_.push_back(token);
  begins_[static_cast<uint8_t>(pattern[0])] = true;
}

int AddedTokenFinder::longest(std::string_view all, size_t at, size_t& end) const {
  int found = -1;
  size_t node = 0;
  for (; at < all.size(); ++at) {
    const auto it = nodes_[node].next.find(all[at]);
    if (it == nodes_[node].next.end()) break;
    node = it->second;
    if (nodes_[node].token < 0) continue;
    found = nodes_[node].token;
    end = at + 1;
  }
  return found;
}

void AddedTokenFinder::split(std::string_view all, bool specials,
                             const std::function<void(size_t, size_t)>& text,
                             const std::function<void(int32_t)>& token) const {
  size_t done = 0;  // everything before it has been handed out
  size_t at = 0;
  while (at < all.size()) {
    size_t end = 0;
    const int index = begins_[static_cast<uint8_t>(all[at])] ? longest(all, at, end) : -1;
    if (index < 0) {
      ++at;
      continue;
    }
    const AddedToken& t = tokens_[static_cast<size_t>(index)];
    size_t begin = at, stop = end;
    at = end;  // also behind a token that is not taken
    if (t.special && !specials) continue;
    if (t.single_word && (ends_with_word(all.substr(0, begin)) || starts_with_word(all.substr(stop))))
      continue;
    if (t.lstrip) begin = std::max(trailing_space_begin(all.substr(0, begin)), done);
    if (t.rstrip) stop += leading_space_end(all.substr(stop));
    if (done < begin) text(done, begin);
    token(t.id);
    done = stop;
  }
  if (done < all.size()) text(done, all.size());
}

}  // namespace fp4t
