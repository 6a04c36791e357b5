// Answers: where they are found, what counts as a number, and that nothing runs away.
#include "engine/tokens/answers.h"

#include <gtest/gtest.h>

#include <chrono>

#include "kernels/base/check.h"

namespace fp4t {
namespace {

bool same(const char* a, const char* b) {
  const auto x = parse_number(a), y = parse_number(b);
  EXPECT_TRUE(x && y) << a << " and " << b;
  return x && y && *x == *y;
}

TEST(Numbers, are_compared_exactly) {
  EXPECT_TRUE(same("1,234.50", "1234.5"));
  EXPECT_TRUE(same("$1,234,567", "1234567"));
  EXPECT_TRUE(same("-$5", "-5"));
  EXPECT_TRUE(same("$-5",
                   "\xE2\x88\x92"
                   "5"));
  EXPECT_TRUE(same("+7", "007"));
  EXPECT_TRUE(same("0.5", "1/2"));
  EXPECT_TRUE(same(".5", "\\frac{1}{2}"));
  EXPECT_TRUE(same("2 / 4", "\\dfrac{1}{2}"));
  EXPECT_TRUE(same("-0", "0.000"));
  EXPECT_TRUE(same("50%", "50"));
  EXPECT_TRUE(same("1{,}000\\text{ metres}", "1000"));
  EXPECT_TRUE(same("72 apples.", "72"));
  EXPECT_TRUE(same("72.", "72"));
  EXPECT_FALSE(same("1/3", "0.3333333333333333333333"));
  EXPECT_FALSE(same("0.1", "-0.1"));
  // More than 64 bits, more than a double tells apart.
  EXPECT_FALSE(same("100000000000000000000000000000001", "100000000000000000000000000000000"));
  EXPECT_TRUE(same("100000000000000000000000000000001.50", "100,000,000,000,000,000,000,000,000,000,001.5"));
}

TEST(Numbers, all_else_is_none) {
  for (const char* text :
       {"",           "-",     "x",         "1,23",         "1234,567",   "1,2345", "3/0",
        "10 or 12",   "2^3",   "\\sqrt{2}", "5x",           "1e3",        "0x10",   "1.2.3",
        "--5",        "1/2/3", "1.5/2",     "\\frac{1}{0}", "\\frac{1}2", "3 - 1",  "10, 12",
        "5 / person", "$",     "NaN",       "inf"}) {
    EXPECT_FALSE(parse_number(text)) << text;
  }
  EXPECT_FALSE(parse_number(std::string(100000, '7')));
}

TEST(Answers, the_last_marker_wins_whatever_follows) {
  const std::string text = "first #### 5\nno: #### 1,072 \n" + std::string(100000, 'x');
  EXPECT_EQ(after_hashes(text), "1,072");
  EXPECT_EQ(after_hashes("####"), "");
  EXPECT_FALSE(after_hashes("### 5"));
  EXPECT_EQ(inside_boxed("\\boxed{1} so \\boxed{\\frac{a_{1}}{b}} and " + std::string(1000, 'x')),
            "\\frac{a_{1}}{b}");
  EXPECT_EQ(inside_boxed("\\boxed{\\{1\\}}"), "\\{1\\}");
  EXPECT_FALSE(inside_boxed("\\boxed{5"));
  EXPECT_FALSE(inside_boxed("\\boxed{5} then \\boxed{6"));
  EXPECT_FALSE(inside_boxed("boxed{5}"));
}

AnswerSpec spec_of(const std::string& form, const std::string& pattern = "") {
  AnswerSpec spec;
  spec.form = form;
  spec.pattern = pattern;
  return spec;
}

TEST(Answers, are_read_in_every_form) {
  EXPECT_EQ(*AnswerReader(spec_of("exact")).of_completion(" 72 \n"), "72");
  EXPECT_EQ(*AnswerReader(spec_of("hash")).of_completion("so #### 72 "), "72");
  EXPECT_EQ(*AnswerReader(spec_of("boxed")).of_completion("$\\boxed{ 72 }$"), "72");
  const AnswerReader regex(spec_of("regex", "answer is (-?[0-9]+)"));
  EXPECT_EQ(*regex.of_completion("the answer is 3, no, the answer is -4."), "-4");
  EXPECT_FALSE(regex.of_completion("the answer is four"));
  EXPECT_EQ(*AnswerReader(spec_of("regex", "[0-9]+")).of_completion("1 22 333 x"), "333");
  for (const char* form : {"exact", "hash", "boxed"})
    EXPECT_FALSE(AnswerReader(spec_of(form)).of_completion(" "));
}

TEST(Answers, of_the_data_are_found_or_refused) {
  AnswerSpec spec = spec_of("boxed");
  spec.gold = "hash";
  const AnswerReader reader(spec);
  EXPECT_EQ(reader.of_data("48/2 = 24\n#### 1,072"), "1,072");
  EXPECT_THROW(reader.of_data("1,072"), BadDataError);
  EXPECT_THROW(reader.of_data("#### many"), BadDataError);
  EXPECT_EQ(reader.equal("1072.0", "1,072"), true);
  EXPECT_EQ(reader.equal("1071", "1,072"), false);
  EXPECT_EQ(reader.equal("\\sqrt{2}", "1,072"), std::nullopt);
  spec.compare = "text";
  const AnswerReader text(spec);
  EXPECT_EQ(text.of_data("#### many"), "many");
  EXPECT_EQ(text.equal("many", "many"), true);
  EXPECT_EQ(text.equal("Many", "many"), false);
}

TEST(Patterns, that_are_none_are_refused_with_their_place) {
  try {
    AnswerReader(spec_of("regex", "a(b"));
    FAIL() << "accepted";
  } catch (const RecipeError& e) {
    EXPECT_NE(std::string(e.what()).find("at character 4"), std::string::npos) << e.what();
  }
}

// Exponential, and quadratic in ways that limits per match do not see.
TEST(Patterns, give_up_in_bounded_time) {
  const auto begin = std::chrono::steady_clock::now();
  for (const char* pattern :
       {"(a+)+$", "(a|aa)+$", "(a*)*!!", "(a*)(a*)(a*)(a*)!!", "a.{0,400}!!", "(?:a?){60}a{60}!!"}) {
    const Pattern p(pattern);
    EXPECT_EQ(p.occurs(std::string(30000, 'a') + "!"), Pattern::Outcome::kGaveUp) << pattern;
    EXPECT_EQ(p.last(std::string(30000, 'a') + "!").outcome, Pattern::Outcome::kGaveUp) << pattern;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(Pattern("a").occurs(std::string(size_t{2} << 20, 'a')), Pattern::Outcome::kGaveUp);
}

// Items that swallow a whole text at one step, from every character anew; many matches in a long text.
TEST(Patterns, take_bounded_time_over_long_texts) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string letters(150000, 'a');
  for (const char* pattern : {"[a-z]+\\d", "(?>[a-z]+)\\d", "[a-z]++(?=\\d)", "(?=[a-z]*+\\d)[a-z]"}) {
    const Pattern p(pattern);
    EXPECT_EQ(p.occurs(letters), Pattern::Outcome::kGaveUp) << pattern;
    EXPECT_EQ(p.last(letters).outcome, Pattern::Outcome::kGaveUp) << pattern;
    EXPECT_EQ(p.last(letters + "\xff").outcome, Pattern::Outcome::kGaveUp) << pattern;
  }
  std::string numbers;
  for (int i = 0; i < 100000; ++i) numbers += "1 ";
  numbers += "27 ";
  const Pattern number("(-?\\d+)");
  EXPECT_EQ(number.last(numbers).text, "27");
  EXPECT_EQ(number.last(numbers + "\xff").outcome, Pattern::Outcome::kGaveUp);
  EXPECT_EQ(number.last("1 \xff 2 \xff").text, "2");
  EXPECT_EQ(Pattern("answer: (.*)").last(letters + "\nanswer: 7").text, "7");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(Patterns, read_any_bytes) {
  const std::string broken =
      "\xff\xfe"
      "12"
      "\xc3";
  EXPECT_EQ(Pattern("[0-9]+").last(broken).text, "12");
  EXPECT_EQ(Pattern("^\\p{L}+$").occurs("\xC3\xA4\xC3\xB6"), Pattern::Outcome::kFound);
  EXPECT_EQ(Pattern("^.$").occurs("\xff"), Pattern::Outcome::kAbsent);
  EXPECT_EQ(Pattern("x*").last("abc").outcome, Pattern::Outcome::kAbsent);  // nothing but empty matches
  EXPECT_EQ(Pattern("(a)|b").last("a b").text, "");                         // the last match has no group 1
}

}  // namespace
}  // namespace fp4t
