// UTF-8 as tokenizers need it: where text is well-formed (kernels/base/utf8.h; the length of one character:
// utf8_length of kernels/base/text.h), whole characters out of a stream of bytes, and the alphabet of
// byte-level vocabularies.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace fp4t {

// End of the longest well-formed stretch that begins at `at`; of the longest without a well-formed character.
size_t well_formed_end(std::string_view text, size_t at);
size_t ill_formed_end(std::string_view text, size_t at);
bool is_well_formed(std::string_view text);

void append_character(std::string& text, uint32_t code_point);
// Of the well-formed character at `at`.
uint32_t code_point_at(std::string_view text, size_t at);

// Bytes in, whole characters out: what may yet become a character is kept back; what cannot any more becomes
// U+FFFD, one for each part of a character (Unicode 15, section 3.9, "substitution of maximal subparts").
class CharacterStream {
 public:
  std::string push(std::string_view bytes);
  // What was kept back, as U+FFFD; the stream is empty then.
  std::string finish();

 private:
  std::string pending_;
};
// Ill-formed parts become U+FFFD.
std::string with_replacements(std::string_view bytes);

// The alphabet of byte-level vocabularies (GPT-2): every byte is written as one character, those that print
// and are no spaces as themselves (Latin-1), the others as U+0100 and up in the order of their values.
const std::array<uint32_t, 256>& byte_alphabet();
// The bytes that a text in that alphabet stands for; false when a character is not of the alphabet.
bool bytes_of_alphabet(std::string_view text, std::string& bytes);

}  // namespace fp4t
