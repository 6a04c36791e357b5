// UTF-8 by the byte (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF). The one place that
// knows which bytes follow which; inline, since tokenizers ask for each character of a corpus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fp4t {

// The bytes from a place that belong to one character, whole or cut short (what Unicode 15, section 3.9,
// calls a maximal subpart), and how many the character has: 0 where no character begins with that byte.
struct Utf8Part {
  size_t bytes, needed;
  bool whole() const { return bytes == needed; }
};

// `at` is within the text. Of a byte that begins nothing, that byte.
inline Utf8Part utf8_part(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(at);
  if (lead < 0x80) return {1, 1};
  if (lead < 0xC2 || lead > 0xF4) return {1, 0};
  const size_t needed = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // Of the second byte: a shorter form exists below, surrogates and what is beyond U+10FFFF lie above.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (at + 1 >= text.size() || byte(at + 1) < low || byte(at + 1) > high) return {1, needed};
  size_t n = 2;
  while (n < needed && at + n < text.size() && (byte(at + n) & 0xC0) == 0x80) ++n;
  return {n, needed};
}

}  // namespace fp4t
