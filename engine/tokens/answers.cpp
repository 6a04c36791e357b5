#include "engine/tokens/answers.h"

#include <algorithm>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

constexpr std::string_view kSpace = " \t\r\n\f\v";
constexpr size_t kMostDigits = 1000;  // comparing multiplies: bounded work
constexpr std::string_view kCurrencies[] = {"\\$", "$", "\xE2\x82\xAC", "\xC2\xA3"};  // dollar, euro, pound

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool eat(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

void eat_space(std::string_view& text) {
  while (!text.empty()) {
    if (kSpace.find(text[0]) != std::string_view::npos) {
      text.remove_prefix(1);
    } else if (!eat(text, "\\,") && !eat(text, "\\!") && !eat(text, "\\;") && !eat(text, "\\ ")) {
      return;
    }
  }
}

void drop_leading_zeros(std::string& digits) {
  digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size() - 1));
}

// Digits, in groups of three where commas ("{,}" in LaTeX) stand between them.
bool eat_whole(std::string_view& text, std::string& digits) {
  size_t group = 0;
  bool grouped = false;
  while (!text.empty() && digits.size() <= kMostDigits) {
    if (is_digit(text[0])) {
      digits += text[0];
      ++group;
      text.remove_prefix(1);
      continue;
    }
    std::string_view rest = text;
    const bool comma = eat(rest, "{,}") || eat(rest, ",\\!") || eat(rest, ",");
    if (!comma || digits.empty() || rest.empty() || !is_digit(rest[0])) break;
    if (grouped ? group != 3 : group > 3) return false;
    grouped = true;
    group = 0;
    text = rest;
  }
  return digits.size() <= kMostDigits && (!grouped || group == 3);
}

// Whole or decimal, without a sign.
bool eat_decimal(std::string_view& text, ExactNumber& out) {
  if (!eat_whole(text, out.numerator)) return false;
  out.denominator = "1";
  const bool whole = !out.numerator.empty();
  if (text.size() >= 2 && text[0] == '.' && is_digit(text[1])) {
    text.remove_prefix(1);
    while (!text.empty() && is_digit(text[0]) && out.numerator.size() <= kMostDigits) {
      out.numerator += text[0];
      out.denominator += '0';
      text.remove_prefix(1);
    }
  } else if (!whole) {
    return false;
  }
  return out.numerator.size() <= kMostDigits;
}

bool eat_braced_whole(std::string_view& text, std::string& digits) {
  return eat(text, "{") && eat_whole(text, digits) && !digits.empty() && eat(text, "}");
}

// A decimal, a/b of whole numbers, or \frac{a}{b}.
bool eat_unsigned(std::string_view& text, ExactNumber& out) {
  if (eat(text, "\\frac") || eat(text, "\\dfrac") || eat(text, "\\tfrac")) {
    return eat_braced_whole(text, out.numerator) && eat_braced_whole(text, out.denominator);
  }
  if (!eat_decimal(text, out)) return false;
  std::string_view rest = text;
  eat_space(rest);
  if (!eat(rest, "/")) return true;
  eat_space(rest);
  std::string below;
  if (out.denominator != "1" || !eat_whole(rest, below) || below.empty()) return false;
  out.denominator = below;
  text = rest;
  return true;
}

// What may stand behind a number: a percent sign, then words without digits or operators.
bool is_unit(std::string_view text) {
  if (!eat(text, "\\%")) eat(text, "%");
  if (text.empty() || text == ".") return true;
  const bool parted = kSpace.find(text[0]) != std::string_view::npos || text.starts_with("\\text") ||
                      text.starts_with("\\,") || text.starts_with("\\ ") || text.starts_with(". ");
  return parted && text.find_first_of("0123456789+-*/^=<>") == std::string_view::npos;
}

bool eat_sign(std::string_view& text, bool& negative) {
  if (eat(text, "-") || eat(text, "\xE2\x88\x92")) return negative = true;  // hyphen or minus sign
  return eat(text, "+");
}

// Product of decimal digits, without leading zeros; both have at most kMostDigits + 1.
std::string product(const std::string& a, const std::string& b) {
  std::vector<uint32_t> sums(a.size() + b.size(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t k = 0; k < b.size(); ++k) {
      sums[i + k + 1] += static_cast<uint32_t>(a[i] - '0') * static_cast<uint32_t>(b[k] - '0');
    }
  }
  std::string out(sums.size(), '0');
  uint32_t carry = 0;
  for (size_t i = sums.size(); i-- > 0;) {
    carry += sums[i];
    out[i] = static_cast<char>('0' + carry % 10);
    carry /= 10;
  }
  drop_leading_zeros(out);
  return out;
}

}  // namespace

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

std::optional<ExactNumber> parse_number(std::string_view text) {
  text = trimmed(text);
  ExactNumber out;
  bool signed_already = eat_sign(text, out.negative);
  for (const std::string_view currency : kCurrencies) {
    if (eat(text, currency)) break;
  }
  if (!signed_already) eat_sign(text, out.negative);
  if (!eat_unsigned(text, out) || !is_unit(text)) return std::nullopt;
  drop_leading_zeros(out.numerator);
  drop_leading_zeros(out.denominator);
  if (out.denominator == "0") return std::nullopt;
  if (out.numerator == "0") out.negative = false;
  return out;
}

bool operator==(const ExactNumber& a, const ExactNumber& b) {
  return a.negative == b.negative &&
         product(a.numerator, b.denominator) == product(b.numerator, a.denominator);
}

std::optional<std::string_view> after_hashes(std::string_view text) {
  constexpr std::string_view kMarker = "####";
  const size_t at = text.rfind(kMarker);
  if (at == std::string_view::npos) return std::nullopt;
  text.remove_prefix(at + kMarker.size());
  return trimmed(text.substr(0, text.find('\n')));
}

std::optional<std::string_view> inside_boxed(std::string_view text) {
  constexpr std::string_view kMarker = "\\boxed{";
  const size_t at = text.rfind(kMarker);
  if (at == std::string_view::npos) return std::nullopt;
  text.remove_prefix(at + kMarker.size());
  int64_t depth = 1;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;  // an escaped brace is a sign
    } else if (text[i] == '{') {
      ++depth;
    } else if (text[i] == '}' && --depth == 0) {
      return trimmed(text.substr(0, i));
    }
  }
  return std::nullopt;
}

AnswerReader::AnswerReader(const AnswerSpec& spec) : spec_(spec) {
  if (spec.form == "regex") pattern_.emplace(spec.pattern);
}

std::optional<std::string> AnswerReader::of_completion(std::string_view text) const {
  std::optional<std::string_view> found;
  if (pattern_) {
    Pattern::Found match = pattern_->last(text);
    if (match.outcome != Pattern::Outcome::kFound) return std::nullopt;
    return std::string(trimmed(match.text));
  }
  if (spec_.form == "exact") found = trimmed(text);
  if (spec_.form == "hash") found = after_hashes(text);
  if (spec_.form == "boxed") found = inside_boxed(text);
  if (!found || found->empty()) return std::nullopt;
  return std::string(*found);
}

std::string AnswerReader::of_data(std::string_view text) const {
  std::optional<std::string_view> found;
  if (spec_.gold == "exact") found = trimmed(text);
  if (spec_.gold == "hash") found = after_hashes(text);
  if (spec_.gold == "boxed") found = inside_boxed(text);
  if (!found || found->empty()) {
    const char* where = spec_.gold == "hash"    ? " behind ####"
                        : spec_.gold == "boxed" ? " inside \\boxed{}"
                                                : "";
    throw BadDataError(detail::concat("no answer", where, " (answer.gold ", spec_.gold, ")"));
  }
  if (spec_.compare == "number" && !parse_number(*found)) {
    throw BadDataError(detail::concat("the answer '", printable(*found, 60),
                                      "' is no number; answer.compare: text takes it as it is"));
  }
  return std::string(*found);
}

std::optional<bool> AnswerReader::equal(const std::string& completion, const std::string& data) const {
  if (spec_.compare == "text") return completion == data;
  const auto given = parse_number(completion), wanted = parse_number(data);
  FP4T_CHECK(wanted.has_value(), "answer '", data, "'");
  if (!given) return std::nullopt;
  return *given == *wanted;
}

}  // namespace fp4t
