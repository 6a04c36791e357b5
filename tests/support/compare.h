// Comparers of tensors, driven by the exactness class that an op claims (kernels/ops/exactness.h).
//   EXPECT_TRUE(matches(expected.view(), got.view(), Nmse(1e-10)));
// A failure prints the first differing elements with index, both values, hex bits and distance.
// NaN equals NaN (of any payload, but for Bitwise) and infinities equal themselves; a non-finite value
// on one side only is always a mismatch, whatever the bound.
#pragma once

#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/base/tensor.h"
#include "kernels/ops/exactness.h"

namespace fp4t::test {

testing::AssertionResult matches(const TensorView& expected, const TensorView& got, Exactness exactness);

// The three classes by name. Ulps count representable numbers of the tensor's own type between the two
// values; +0 and -0 are 0 apart. Integers have no ulps: use bitwise.
testing::AssertionResult matches_bitwise(const TensorView& expected, const TensorView& got);
testing::AssertionResult matches_ulp(const TensorView& expected, const TensorView& got, double max_ulps);
// sum (got - expected)^2 <= bound * sum expected^2, in FP64.
testing::AssertionResult matches_nmse(const TensorView& expected, const TensorView& got, double bound);

// Element i as FP64, for messages and references.
double element(const TensorView& t, int64_t i);
// The quotient that matches_nmse bounds; 0 when both sums are 0, infinite when only expected's is.
double nmse(const TensorView& expected, const TensorView& got);

}  // namespace fp4t::test
