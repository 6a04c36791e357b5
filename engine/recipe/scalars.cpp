#include "engine/recipe/scalars.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <regex>

#include "kernels/base/text.h"

namespace fp4t {

namespace {

// What is wrong with a text as a number, or "" and the text without underscores.
std::string tidy_number(const std::string& text, std::string& digits) {
  static const std::regex number("[+-]?([0-9]+(\\.[0-9]*)?|\\.[0-9]+)([eE][+-]?[0-9]+)?");
  static const std::regex leading_zero("[+-]?0[0-9].*");
  static const std::regex special("[+-]?\\.?(inf|nan)(inity)?");
  digits.clear();
  for (size_t i = 0; i < text.size(); ++i) {
    const auto digit_at = [&](size_t k) { return std::isdigit(static_cast<unsigned char>(text[k])) != 0; };
    const bool separates =
        text[i] == '_' && i > 0 && i + 1 < text.size() && digit_at(i - 1) && digit_at(i + 1);
    if (!separates) digits += text[i];
  }
  std::string lower = digits;
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  if (digits.size() > 100) return "too long for a number";
  if (std::regex_match(lower, special)) return "infinities and NaN are not supported";
  if (lower.starts_with("0x") || lower.starts_with("0o")) return "write it in decimal";
  if (!std::regex_match(digits, number)) return "not a number";
  if (std::regex_match(digits, leading_zero)) return "a leading zero means octal to YAML; leave it out";
  if (digits[0] == '+') digits.erase(0, 1);
  return "";
}

template <class Int>
std::string read_whole(const std::string& text, Int& out) {
  std::string digits;
  std::string why = tidy_number(text, digits);
  if (!why.empty()) return why;
  if (digits.find_first_of(".eE") == std::string::npos) {
    if (!std::is_signed_v<Int> && digits[0] == '-') return "negative";
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), out);
    return error == std::errc() && end == digits.data() + digits.size() ? "" : "too large";
  }
  double value = 0;
  why = read_double(text, value);
  if (!why.empty()) return why;
  if (value != std::floor(value)) return "not a whole number";
  if (std::abs(value) > 9007199254740992.0) return "too large for a whole number in this form";
  if (!std::is_signed_v<Int> && value < 0) return "negative";
  out = static_cast<Int>(value);
  return "";
}

}  // namespace

std::string read_int(const std::string& text, int64_t& out) { return read_whole(text, out); }
std::string read_uint(const std::string& text, uint64_t& out) { return read_whole(text, out); }

std::string read_double(const std::string& text, double& out) {
  std::string digits;
  const std::string why = tidy_number(text, digits);
  if (!why.empty()) return why;
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error == std::errc::result_out_of_range) return "out of the range of a double";
  if (error != std::errc() || end != digits.data() + digits.size() || !std::isfinite(value))
    return "not a number";
  out = value;
  return "";
}

std::string read_bool(const std::string& text, bool& out) {
  if (text == "true" || text == "false") {
    out = text == "true";
    return "";
  }
  std::string lower = text;
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* yes : {"yes", "on", "y", "1", "true"}) {
    if (lower == yes) return "write true";
  }
  for (const char* no : {"no", "off", "n", "0", "false"}) {
    if (lower == no) return "write false";
  }
  return "not a boolean";
}

std::string write_double(double v) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), v);
  return std::string(buffer, result.ptr);
}

std::string write_text(const std::string& v) {
  static const std::regex plain("[A-Za-z_/][A-Za-z0-9_./-]*");
  static const std::regex reserved("true|false|yes|no|on|off|y|n|null", std::regex::icase);
  if (v.size() < 200 && std::regex_match(v, plain) && !std::regex_match(v, reserved)) return v;
  std::string out = "\"";
  for (const char c : v) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  // The escapes are YAML's, too.
  return printable(out, std::string::npos) + "\"";
}

}  // namespace fp4t
