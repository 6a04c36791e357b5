// The comparers themselves: a comparer that accepts too much would hide every other failure.
#include "tests/support/compare.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/tensors.h"

namespace fp4t::test {
namespace {

HostTensor f32(const std::vector<float>& values) {
  HostTensor t(DType::kF32, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) t.as<float>()[i] = values[i];
  return t;
}

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInf = std::numeric_limits<float>::infinity();

TEST(Compare, bitwise_sees_one_bit_and_the_sign_of_zero) {
  HostTensor a = f32({1, 0, kNan}), same = f32({1, 0, kNan});
  HostTensor next = f32({std::nextafter(1.0f, 2.0f), 0, kNan}), minus = f32({1, -0.0f, kNan});
  EXPECT_TRUE(matches(a.view(), same.view(), Bitwise()));
  EXPECT_FALSE(matches(a.view(), next.view(), Bitwise()));
  EXPECT_FALSE(matches(a.view(), minus.view(), Bitwise()));
}

TEST(Compare, ulps_count_representable_numbers_across_zero) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  HostTensor a = f32({tiny, 1, 0}), b = f32({-tiny, 1, -0.0f});
  EXPECT_TRUE(matches(a.view(), b.view(), Ulp(2)));
  EXPECT_FALSE(matches(a.view(), b.view(), Ulp(1)));
  HostTensor c(DType::kBf16, {1}), d(DType::kBf16, {1});
  c.as<Bf16>()[0] = {0x3F80};
  d.as<Bf16>()[0] = {0x3F83};
  EXPECT_TRUE(matches(c.view(), d.view(), Ulp(3)));
  EXPECT_FALSE(matches(c.view(), d.view(), Ulp(2)));
}

TEST(Compare, nmse_is_error_energy_over_signal_energy) {
  HostTensor a = f32({3, 4}), b = f32({3, 4.5f});
  EXPECT_DOUBLE_EQ(nmse(a.view(), b.view()), 0.25 / 25);
  EXPECT_TRUE(matches(a.view(), b.view(), Nmse(0.0101)));
  EXPECT_FALSE(matches(a.view(), b.view(), Nmse(0.0099)));
  HostTensor zero = f32({0, 0}), off = f32({0, 1e-20f});
  EXPECT_TRUE(matches(zero.view(), zero.view(), Nmse(0)));
  EXPECT_FALSE(matches(zero.view(), off.view(), Nmse(1)));
}

TEST(Compare, non_finite_values_match_only_themselves) {
  HostTensor a = f32({kNan, kInf, 1}), finite = f32({1, kInf, 1}), sign = f32({kNan, -kInf, 1});
  for (const Exactness e : {Ulp(1e9), Nmse(1e9)}) {
    EXPECT_TRUE(matches(a.view(), a.view(), e));
    EXPECT_FALSE(matches(a.view(), finite.view(), e));
    EXPECT_FALSE(matches(finite.view(), a.view(), e));
    EXPECT_FALSE(matches(a.view(), sign.view(), e));
  }
}

TEST(Compare, shapes_and_types_must_agree) {
  HostTensor a = f32({1, 2}), longer = f32({1, 2, 3});
  HostTensor other(DType::kI32, {2});
  for (const Exactness e : {Bitwise(), Ulp(1e9), Nmse(1e9)}) {
    EXPECT_FALSE(matches(a.view(), longer.view(), e));
    EXPECT_FALSE(matches(a.view(), other.view(), e));
  }
}

TEST(Compare, a_failure_prints_index_values_and_hex) {
  HostTensor a(DType::kF32, {2, 2}), b(DType::kF32, {2, 2});
  a.zero();
  b.zero();
  b.as<float>()[3] = 1;
  const std::string text = matches_bitwise(a.view(), b.view()).message();
  EXPECT_NE(text.find("[1, 1]"), std::string::npos) << text;
  EXPECT_NE(text.find("0x3f800000"), std::string::npos) << text;
}

}  // namespace
}  // namespace fp4t::test
