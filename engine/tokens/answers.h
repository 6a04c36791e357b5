// Final answers in texts: where they stand, and whether two of them are the same. All in time that grows with
// the length of the text alone.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "engine/recipe/recipe.h"
#include "engine/tokens/pattern.h"

namespace fp4t {

// An exact number of any size: value = numerator / denominator, decimal digits without leading zeros.
struct ExactNumber {
  bool negative = false;  // never of zero
  std::string numerator, denominator;
};

// "72", "-1,234.50", "+7", "3/4", "$18", "50%", "72 apples.", "\frac{3}{4}", "\$5\text{ million}": a number,
// maybe with a currency sign before it, a percent sign or words without digits behind it. Commas only between
// thousands. Nothing for all else, such as "1,23", "3/0", "10 or 12", "2^3", "\sqrt{2}".
std::optional<ExactNumber> parse_number(std::string_view text);
bool operator==(const ExactNumber& a, const ExactNumber& b);

// Without white space at both ends.
std::string_view trimmed(std::string_view text);

// The rest of the line behind the last "####"; the last \boxed{...} with its braces balanced. Nothing where
// there is no marker, or the last one is not closed. There is no window at the end: text may follow.
std::optional<std::string_view> after_hashes(std::string_view text);
std::optional<std::string_view> inside_boxed(std::string_view text);

// What an AnswerSpec means.
class AnswerReader {
 public:
  // Throws RecipeError for a pattern that is none.
  explicit AnswerReader(const AnswerSpec& spec);
  // The answer of a completion. Nothing when it has none.
  std::optional<std::string> of_completion(std::string_view text) const;
  // The answer in a row of the data. Throws BadDataError saying what is missing.
  std::string of_data(std::string_view text) const;
  // Whether they are the same; nothing when the completion's is not of the kind that is compared.
  std::optional<bool> equal(const std::string& completion, const std::string& data) const;

 private:
  AnswerSpec spec_;
  std::optional<Pattern> pattern_;
};

}  // namespace fp4t
