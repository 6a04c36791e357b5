// Exact arithmetic expressions over whole numbers: + - * / and parentheses, evaluated as rationals in
// bounded time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fp4t {

struct Rational {
  int64_t numerator = 0;
  int64_t denominator = 1;  // > 0, reduced
  bool operator==(const Rational&) const = default;
};

struct ParsedExpression {
  Rational value;
  std::vector<int64_t> numbers;  // literals in order of appearance
};

// Nothing when the text is not an expression of at most 256 characters and 32 levels, divides by zero, or
// overflows 64 bits.
std::optional<ParsedExpression> parse_expression(const std::string& text);

}  // namespace fp4t
