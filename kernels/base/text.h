// Foreign text in messages. Names of files and tensors, keys and values of recipes, arguments and what other
// libraries say may hold anything; printed as they are, they could clear a terminal, reverse its text or
// forge a line of a log. Whatever quotes such text in a message passes it through printable().
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fp4t {

// Bytes of the UTF-8 character (RFC 3629) that begins at `at`; 0 where none does.
size_t utf8_length(std::string_view text, size_t at);

// As it may stand in one line: control characters, separators of lines, overrides of the direction of text
// (what Unicode calls Cc, Zl, Zp and Bidi_Control) and bytes that are not UTF-8 become escapes as C writes
// them (\n, \x1b, \u202e); the rest stays. Of more than `most` bytes the beginning, and "...".
std::string printable(std::string_view text, size_t most = 1000);

// For messages of many lines: as printable(), but line feeds and tabs stay and nothing is cut.
std::string printable_lines(std::string_view text);

}  // namespace fp4t
