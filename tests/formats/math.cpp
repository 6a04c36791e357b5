// The functions of kernels/formats/math.h against double over a sweep of all FP32 bit patterns.
#include "kernels/formats/math.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace fp4t {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// Prime, so that the sweep meets every exponent with every kind of mantissa.
constexpr uint32_t kStride = 251;

double ulp_at(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::ldexp(1.0, std::max(exponent, -125) - 24);
}

double exact_sigmoid(double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }

// Largest error in ulp of the exact result over the bit patterns [first, last].
template <class F, class G>
double worst_ulp(F&& f, G&& exact, uint32_t first, uint32_t last) {
  double worst = 0;
  for (uint64_t u = first; u <= last; u += kStride) {
    const float x = float_of(static_cast<uint32_t>(u));
    const double want = exact(static_cast<double>(x));
    const double got = static_cast<double>(f(x));
    if (std::isinf(got) || std::abs(want) > double{std::numeric_limits<float>::max()}) {
      EXPECT_EQ(got, static_cast<double>(static_cast<float>(want))) << "at " << x;
      continue;
    }
    const double error = std::abs(got - want) / ulp_at(want);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

constexpr uint32_t kPositiveInf = 0x7F800000u, kNegativeZero = 0x80000000u, kNegativeInf = 0xFF800000u;

TEST(Math, exp_is_within_one_ulp) {
  const auto exact = [](double x) { return std::exp(x); };
  EXPECT_LT(worst_ulp(exp_f32, exact, 0, kPositiveInf), 1.0);
  EXPECT_LT(worst_ulp(exp_f32, exact, kNegativeZero, kNegativeInf), 1.0);
}

TEST(Math, log_is_within_one_ulp) {
  EXPECT_LT(worst_ulp(
                log_f32, [](double x) { return std::log(x); }, 1, kPositiveInf - 1),
            1.0);
}

TEST(Math, sigmoid_is_within_one_and_a_half_ulp) {
  EXPECT_LT(worst_ulp(sigmoid_f32, exact_sigmoid, 0, kPositiveInf), 1.5);
  EXPECT_LT(worst_ulp(sigmoid_f32, exact_sigmoid, kNegativeZero, kNegativeInf), 1.5);
}

TEST(Math, silu_is_within_two_and_a_half_ulp_until_sigmoid_is_subnormal) {
  const auto exact = [](double x) { return x * exact_sigmoid(x); };
  EXPECT_LT(worst_ulp(silu_f32, exact, 0, kPositiveInf - 1), 2.5);
  EXPECT_LT(worst_ulp(silu_f32, exact, kNegativeZero, bits_of(-87.0f)), 2.5);
  for (uint64_t u = bits_of(-87.0f); u < kNegativeInf; u += kStride) {
    const float x = float_of(static_cast<uint32_t>(u));
    ASSERT_LT(std::abs(double{silu_f32(x)} - exact(double{x})), 0x1p-141) << "at " << x;
  }
}

TEST(Math, silu_grad_is_the_derivative) {
  for (const uint32_t sign : {0u, kNegativeZero}) {
    for (uint32_t u = 0; u < kPositiveInf; u += kStride) {
      const float x = float_of(u | sign);
      const double s = exact_sigmoid(double{x}), c = exact_sigmoid(-double{x});
      const double want = s * (1 + double{x} * c);
      ASSERT_LE(std::abs(double{silu_grad_f32(x)} - want), 0x1p-22 * std::max(1.0, std::abs(want)))
          << "at " << x;
    }
  }
}

TEST(Math, special_values) {
  EXPECT_EQ(bits_of(exp_f32(0.0f)), bits_of(1.0f));
  EXPECT_EQ(bits_of(exp_f32(-0.0f)), bits_of(1.0f));
  EXPECT_EQ(bits_of(exp_f32(-kInf)), 0u);
  EXPECT_EQ(bits_of(exp_f32(-1e30f)), 0u);
  EXPECT_EQ(exp_f32(kInf), kInf);
  EXPECT_EQ(exp_f32(88.8f), kInf);
  EXPECT_LT(exp_f32(88.72f), kInf);
  EXPECT_EQ(bits_of(log_f32(1.0f)), 0u);
  EXPECT_EQ(log_f32(0.0f), -kInf);
  EXPECT_EQ(log_f32(-0.0f), -kInf);
  EXPECT_EQ(log_f32(kInf), kInf);
  EXPECT_TRUE(std::isnan(log_f32(-1.0f)));
  EXPECT_TRUE(std::isnan(log_f32(-kInf)));
  EXPECT_EQ(sigmoid_f32(0.0f), 0.5f);
  EXPECT_EQ(bits_of(sigmoid_f32(-kInf)), 0u);
  EXPECT_EQ(sigmoid_f32(kInf), 1.0f);
  EXPECT_EQ(silu_f32(0.0f), 0.0f);
  EXPECT_EQ(silu_grad_f32(0.0f), 0.5f);
  for (const float nan : {kNan, -kNan, float_of(0x7F800001u), float_of(0xFFFFFFFFu)}) {
    EXPECT_TRUE(std::isnan(exp_f32(nan)));
    EXPECT_TRUE(std::isnan(log_f32(nan)));
    EXPECT_TRUE(std::isnan(sigmoid_f32(nan)));
    EXPECT_TRUE(std::isnan(silu_f32(nan)));
    EXPECT_TRUE(std::isnan(silu_grad_f32(nan)));
  }
}

// The loops below are what the CPU bodies do; GCC vectorises the first and may not the second.
template <class F>
void expect_vector_equals_scalar(F&& f, const std::vector<float>& x) {
  std::vector<float> vectorised(x.size());
  for (size_t i = 0; i < x.size(); ++i) vectorised[i] = f(x[i]);
  for (size_t i = 0; i < x.size(); ++i) {
    volatile float one = x[i];
    ASSERT_EQ(bits_of(vectorised[i]), bits_of(f(one))) << "at " << x[i];
  }
}

TEST(Math, vector_and_scalar_give_the_same_bits) {
  std::vector<float> x;
  for (uint64_t u = 0; u < kPositiveInf; u += 4093) {
    x.push_back(float_of(static_cast<uint32_t>(u)));
    x.push_back(float_of(static_cast<uint32_t>(u) | kNegativeZero));
  }
  expect_vector_equals_scalar([](float v) { return exp_f32(v); }, x);
  expect_vector_equals_scalar([](float v) { return log_f32(std::abs(v)); }, x);
  expect_vector_equals_scalar([](float v) { return sigmoid_f32(v); }, x);
  expect_vector_equals_scalar([](float v) { return silu_f32(v); }, x);
  expect_vector_equals_scalar([](float v) { return silu_grad_f32(v); }, x);
}

// Pins the bits: another compiler, vector width or device must give exactly these.
TEST(Math, bits_over_a_sweep_are_pinned) {
  uint64_t hash = 1469598103934665603ull;
  const auto mix = [&](float v) { hash = (hash ^ bits_of(v)) * 1099511628211ull; };
  for (uint32_t u = 0x3A000000u; u < 0x43000000u; u += 65521) {
    for (const float x : {float_of(u), -float_of(u)}) {
      mix(exp_f32(x));
      mix(log_f32(std::abs(x)));
      mix(sigmoid_f32(x));
      mix(silu_f32(x));
      mix(silu_grad_f32(x));
    }
  }
  EXPECT_EQ(hash, 5624218357909125692u);
}

}  // namespace
}  // namespace fp4t
