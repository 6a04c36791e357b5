// How closely a body must follow the CPU body: the claim that parity tests check (kernels/ops/op_list.inc).
#pragma once

#include <cstdint>

namespace fp4t {

struct Exactness {
  enum class Kind : uint8_t { kBitwise, kUlp, kNmse };
  Kind kind;
  double bound;  // ulps, or mean squared error over mean square
};

constexpr Exactness Bitwise() { return {Exactness::Kind::kBitwise, 0}; }
constexpr Exactness Ulp(double n) { return {Exactness::Kind::kUlp, n}; }
constexpr Exactness Nmse(double eps) { return {Exactness::Kind::kNmse, eps}; }

}  // namespace fp4t
