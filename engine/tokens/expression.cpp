#include "engine/tokens/expression.h"

#include <numeric>

namespace fp4t {

namespace {

bool reduce(Rational& r) {
  if (r.denominator == 0 || r.numerator == INT64_MIN || r.denominator == INT64_MIN) return false;
  const int64_t g = std::gcd(r.numerator, r.denominator);
  if (g > 1) {
    r.numerator /= g;
    r.denominator /= g;
  }
  if (r.denominator < 0) {
    r.numerator = -r.numerator;
    r.denominator = -r.denominator;
  }
  return true;
}

// a op b; false on division by zero or overflow.
bool apply(char op, Rational& a, const Rational& b) {
  Rational out;
  bool bad = false;
  if (op == '+' || op == '-') {
    int64_t left, right;
    bad = __builtin_mul_overflow(a.numerator, b.denominator, &left) ||
          __builtin_mul_overflow(b.numerator, a.denominator, &right) ||
          (op == '+' ? __builtin_add_overflow(left, right, &out.numerator)
                     : __builtin_sub_overflow(left, right, &out.numerator)) ||
          __builtin_mul_overflow(a.denominator, b.denominator, &out.denominator);
  } else {
    const int64_t n = op == '*' ? b.numerator : b.denominator, d = op == '*' ? b.denominator : b.numerator;
    bad = __builtin_mul_overflow(a.numerator, n, &out.numerator) ||
          __builtin_mul_overflow(a.denominator, d, &out.denominator);
  }
  if (bad || !reduce(out)) return false;
  a = out;
  return true;
}

// sum := product (('+' | '-') product)*; product := atom (('*' | '/') atom)*; atom := number | '(' sum ')'
class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  std::optional<ParsedExpression> run() {
    ParsedExpression out;
    if (text_.size() > 256 || !chain(out.value, 0, true) || position_ != text_.size()) return std::nullopt;
    out.numbers = std::move(numbers_);
    return out;
  }

 private:
  char peek() const { return position_ < text_.size() ? text_[position_] : '\0'; }

  bool chain(Rational& value, int depth, bool sum) {
    auto part = [&](Rational& out) { return sum ? chain(out, depth, false) : atom(out, depth); };
    if (!part(value)) return false;
    const char first = sum ? '+' : '*', second = sum ? '-' : '/';
    while (peek() == first || peek() == second) {
      const char op = text_[position_++];
      Rational right;
      if (!part(right) || !apply(op, value, right)) return false;
    }
    return true;
  }

  bool atom(Rational& value, int depth) {
    if (depth > 32) return false;
    if (peek() == '(') {
      ++position_;
      if (!chain(value, depth + 1, true) || peek() != ')') return false;
      ++position_;
      return true;
    }
    int64_t number = 0;
    int digits = 0;
    while (peek() >= '0' && peek() <= '9') {
      if (++digits > 15) return false;
      number = number * 10 + (text_[position_++] - '0');
    }
    if (digits == 0) return false;
    numbers_.push_back(number);
    value = {number, 1};
    return true;
  }

  const std::string& text_;
  size_t position_ = 0;
  std::vector<int64_t> numbers_;
};

}  // namespace

std::optional<ParsedExpression> parse_expression(const std::string& text) { return Parser(text).run(); }

}  // namespace fp4t
