// Claims that hold for every op of the CPU backend, as functions a test calls.
#pragma once

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/queue.h"
#include "kernels/formats/bf16.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

namespace fp4t::test {

using Values = std::vector<double>;

inline Values values_of(HostTensor& t) {
  Values out(static_cast<size_t>(t.elements()));
  for (size_t i = 0; i < out.size(); ++i) out[i] = element(t.view(), static_cast<int64_t>(i));
  return out;
}

inline HostTensor normal_tensor(DType dtype, const Shape& shape, uint64_t seed, float scale = 1.0f) {
  HostTensor t(dtype, shape);
  fill_normal(t, seed, scale);
  return t;
}

inline HostTensor zeros(DType dtype, const Shape& shape) {
  HostTensor t(dtype, shape);
  t.zero();
  return t;
}

inline HostTensor i32_tensor(const std::vector<int32_t>& values) {
  HostTensor t(DType::kI32, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), t.as<int32_t>());
  return t;
}

// The same values in the other dtype; to BF16 by rounding to nearest even.
inline HostTensor in_dtype(HostTensor& t, DType dtype) {
  HostTensor out(dtype, t.view().shape);
  for (int64_t i = 0; i < t.elements(); ++i) {
    const float x = static_cast<float>(element(t.view(), i));
    if (dtype == DType::kF32) {
      out.as<float>()[i] = x;
    } else {
      out.as<Bf16>()[i] = f32_to_bf16(x);
    }
  }
  return out;
}

// max |got - expected| <= tolerance * max |expected|, with no non-finite value anywhere.
inline testing::AssertionResult near_values(const Values& expected, const TensorView& got, double tolerance) {
  if (static_cast<int64_t>(expected.size()) != got.elements()) {
    return testing::AssertionFailure() << expected.size() << " values against " << got.shape.text();
  }
  double largest = 0;
  for (double e : expected) largest = std::max(largest, std::fabs(e));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double g = element(got, static_cast<int64_t>(i));
    if (!(std::fabs(g - expected[i]) <= tolerance * largest)) {
      return testing::AssertionFailure() << "element " << i << " of " << got.shape.text() << ": expected "
                                         << expected[i] << ", got " << g << ", largest " << largest;
    }
  }
  return testing::AssertionSuccess();
}

// compute(queue) returns the outputs; they must be the same bytes with 1, 2 and 3 threads.
inline void expect_same_with_any_threads(const std::function<std::vector<HostTensor>(Queue&)>& compute) {
  Queue single = Queue::cpu(1);
  const std::vector<HostTensor> expected = compute(single);
  for (int threads : {2, 3}) {
    Queue queue = Queue::cpu(threads);
    const std::vector<HostTensor> got = compute(queue);
    ASSERT_EQ(expected.size(), got.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(expected[i].same_bytes(got[i])) << "output " << i << " with " << threads << " threads";
    }
  }
}

// The gradient of loss() by central differences in FP64 at every `stride`-th element of x, against an
// analytic gradient: the error is measured against the largest difference quotient.
inline testing::AssertionResult gradient_matches(Values& x, const std::function<double()>& loss,
                                                 const TensorView& gradient, double tolerance,
                                                 size_t stride) {
  constexpr double kStep = 1e-5;
  if (static_cast<int64_t>(x.size()) != gradient.elements()) {
    return testing::AssertionFailure() << x.size() << " values, gradient " << gradient.shape.text();
  }
  double largest = 0, worst = 0;
  size_t where = 0;
  for (size_t i = 0; i < x.size(); i += stride) {
    const double kept = x[i];
    x[i] = kept + kStep;
    const double above = loss();
    x[i] = kept - kStep;
    const double below = loss();
    x[i] = kept;
    const double numeric = (above - below) / (2 * kStep);
    const double error = std::fabs(numeric - element(gradient, static_cast<int64_t>(i)));
    largest = std::max(largest, std::fabs(numeric));
    if (!(error <= worst)) worst = error, where = i;
  }
  if (worst <= tolerance * largest && (largest > 0 || x.empty())) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "element " << where << " is off by " << worst << ", the largest is "
                                     << largest;
}

inline double inner(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace fp4t::test
