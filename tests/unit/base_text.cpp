#include "kernels/base/text.h"

#include <gtest/gtest.h>

#include "kernels/base/utf8.h"

namespace fp4t {
namespace {

TEST(Text, ordinary_text_of_any_language_stays) {
  for (const char* text : {"", "plain", "a b\\c 'q' \"r\"", "größe", "日本語", "\xF0\x9F\x99\x82"}) {
    EXPECT_EQ(printable(text), text);
    EXPECT_EQ(printable_lines(text), text);
  }
}

TEST(Text, what_moves_a_terminals_text_becomes_an_escape) {
  EXPECT_EQ(printable("a\x1b[2Jb"), "a\\x1b[2Jb");
  EXPECT_EQ(printable("one\ntwo\rthree\tfour"), "one\\ntwo\\rthree\\tfour");
  EXPECT_EQ(printable(std::string_view("a\0b\x7f", 4)), "a\\x00b\\x7f");
  EXPECT_EQ(printable("\xC2\x9B"), "\\u009b");  // CSI in one character
  EXPECT_EQ(printable("\xE2\x80\xAE"
                      "cba"),
            "\\u202ecba");                          // right-to-left override
  EXPECT_EQ(printable("\xE2\x80\xA8"), "\\u2028");  // line separator
  EXPECT_EQ(printable_lines("one\n\ttwo\r\x1b"), "one\n\ttwo\\r\\x1b");
}

TEST(Text, bytes_that_are_not_utf8_become_escapes) {
  EXPECT_EQ(printable("\xff"), "\\xff");
  EXPECT_EQ(printable("\xC3"), "\\xc3");                             // cut short
  EXPECT_EQ(printable("\xC0\x80"), "\\xc0\\x80");                    // NUL in a longer form
  EXPECT_EQ(printable("\xED\xA0\x80"), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(printable("\xF4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond U+10FFFF
}

TEST(Text, only_well_formed_characters_have_a_length) {
  EXPECT_EQ(utf8_length("a", 0), 1u);
  EXPECT_EQ(utf8_length("a", 1), 0u);
  EXPECT_EQ(utf8_length("ü", 0), 2u);
  EXPECT_EQ(utf8_length("ü", 1), 0u);
  EXPECT_EQ(utf8_length("\xE0\x9F\xBF", 0), 0u);
  EXPECT_EQ(utf8_length("\xF0\x8F\xBF\xBF", 0), 0u);
}

TEST(Text, parts_of_a_character_end_where_it_cannot_go_on) {
  const struct {
    const char* text;
    size_t bytes, needed;
  } cases[] = {{"a", 1, 1},
               {"\xE2\x82\xAC", 3, 3},
               {"\xE2\x82", 2, 3},
               {"\xE2\x82"
                "A",
                2, 3},
               {"\xF0\x9F\x98", 3, 4},
               {"\xED\xA0\x80", 1, 3},
               {"\xF4\x90\x80\x80", 1, 4},
               {"\xC0\x80", 1, 0},
               {"\x80", 1, 0},
               {"\xF5", 1, 0}};
  for (const auto& c : cases) {
    const Utf8Part part = utf8_part(c.text, 0);
    EXPECT_EQ(part.bytes, c.bytes) << printable(c.text);
    EXPECT_EQ(part.needed, c.needed) << printable(c.text);
    EXPECT_EQ(part.whole(), utf8_length(c.text, 0) > 0) << printable(c.text);
  }
}

TEST(Text, long_text_is_cut_between_characters) {
  EXPECT_EQ(printable(std::string(1001, 'x')), std::string(1000, 'x') + "...");
  EXPECT_EQ(printable("aüb", 2), "a...");
  EXPECT_EQ(printable("aüb", 3), "aü...");
  EXPECT_EQ(printable("aüb", 4), "aüb");
  EXPECT_EQ(printable_lines(std::string(1001, 'x')).size(), 1001u);
}

}  // namespace
}  // namespace fp4t
