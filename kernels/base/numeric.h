// Integer arithmetic that says what it means; 64-bit throughout (DESIGN.md section 5).
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/base/check.h"

namespace fp4t {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t align_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

// a / b, throws unless b divides a.
inline int64_t div_exact(int64_t a, int64_t b) {
  FP4T_CHECK(b != 0 && a % b == 0, a, " is not a multiple of ", b);
  return a / b;
}

// Conversion that throws when the value does not fit.
template <class To>
To narrow(int64_t value) {
  FP4T_CHECK(value >= static_cast<int64_t>(std::numeric_limits<To>::min()) &&
                 value <= static_cast<int64_t>(std::numeric_limits<To>::max()),
             value, " does not fit the narrower type");
  return static_cast<To>(value);
}

}  // namespace fp4t
