// Tensor and block scales at their limits, headroom, and which cells are legal.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/formats/legal.h"
#include "kernels/formats/mxfp8.h"
#include "kernels/formats/nvfp4.h"

namespace fp4t {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TensorScale scale_of(float amax, ScaleRound round = ScaleRound::kFp32) {
  return nvfp4_tensor_scale(ScaleRule::kAmax, round, Headroom::kNone, amax);
}

TEST(TensorScale, zero_and_infinite_maxima_encode_by_one_and_tiny_ones_stay_finite) {
  for (float amax : {0.0f, kInf}) {
    EXPECT_EQ(scale_of(amax).encode, 1.0f);
    EXPECT_EQ(scale_of(amax).decode, 1.0f);
  }
  for (float amax : {1e-45f, 1e-39f, 1.2e-38f, 1e-30f, 1.0f, 1e30f, 3.39e38f}) {
    for (ScaleRound round : {ScaleRound::kFp32, ScaleRound::kPow2}) {
      const TensorScale s = scale_of(amax, round);
      EXPECT_TRUE(std::isfinite(s.encode) && s.encode > 0) << amax;
      EXPECT_TRUE(std::isfinite(s.decode) && s.decode > 0) << amax;
    }
  }
}

TEST(TensorScale, powers_of_two_round_up_and_end_at_the_smallest_normal) {
  for (int e = -130; e < 127; ++e) {
    for (float f : {1.0f, 1.0000001f, 1.5f, 1.9999999f}) {
      const float decode = std::ldexp(f, e);
      if (decode == 0) continue;
      const float up = round_up_to_pow2(decode);
      int exponent;
      EXPECT_EQ(std::frexp(up, &exponent), 0.5f) << decode;
      EXPECT_GE(up, decode);
      EXPECT_GE(up, 0x1p-126f);
      EXPECT_TRUE(up < 2 * decode || up == 0x1p-126f) << decode;
    }
  }
  const TensorScale s = scale_of(3.0f, ScaleRound::kPow2);
  EXPECT_EQ(s.encode * s.decode, 1.0f);
}

TEST(BlockScale, the_maximum_lands_between_5_667_and_6_375_and_with_headroom_never_above_6) {
  // NUMERICS.md sections 1.2 and 2.2; block maxima over the range of normal scales.
  for (Headroom headroom : {Headroom::kNone, Headroom::k17over16}) {
    const TensorScale t = nvfp4_tensor_scale(ScaleRule::kAmax, ScaleRound::kFp32, headroom, 1.0f);
    const float multiplier = nvfp4_block_multiplier(headroom, t.encode);
    float low = 7, high = 0;
    for (int i = 0; i < 20000; ++i) {
      const float amax = std::exp2(-14.0f * static_cast<float>(i) / 20000);
      const float s = e4m3_value(nvfp4_block_scale(amax, multiplier));
      const float y = amax * nvfp4_encode_factor(s, t.decode);
      low = std::fmin(low, y);
      high = std::fmax(high, y);
    }
    const float ratio = headroom == Headroom::kNone ? 1.0f : 16.0f / 17.0f;
    EXPECT_NEAR(low, ratio * 6 * 17 / 18, 2e-3);
    EXPECT_NEAR(high, ratio * 6 * 17 / 16, 2e-3);
    if (headroom == Headroom::k17over16) {
      EXPECT_LE(high, 6.0f * (1 + 1e-6f));
    }
  }
}

TEST(BlockScale, keeps_a_normal_scale_to_2_to_minus_14_8_and_a_nonzero_one_to_2_to_minus_18_8) {
  const float multiplier = nvfp4_block_multiplier(Headroom::kNone, scale_of(1.0f).encode);
  float smallest_normal = 1, smallest_nonzero = 1;
  for (int i = 0; i < 22000; ++i) {
    const float amax = std::exp2(-static_cast<float>(i) / 1000);
    const uint32_t s = nvfp4_block_scale(amax, multiplier);
    if (s >= 8) smallest_normal = amax;
    if (s > 0) smallest_nonzero = amax;
  }
  EXPECT_NEAR(std::log2(smallest_normal), -14.9, 0.15);
  EXPECT_NEAR(std::log2(smallest_nonzero), -18.85, 0.15);
}

TEST(BlockScale, zero_scales_encode_by_the_largest_float_not_infinity) {
  EXPECT_EQ(nvfp4_encode_factor(0.0f, 1.0f), std::numeric_limits<float>::max());
  EXPECT_EQ(nvfp4_encode_factor(1.0f, 0.0f), std::numeric_limits<float>::max());
}

TEST(Mxfp8, scale_is_rounded_up_so_no_finite_value_saturates) {
  for (uint32_t b = 1; b < 0x7F80; ++b) {
    const float amax = bf16_to_f32({static_cast<uint16_t>(b)});
    const uint32_t scale = mxfp8_block_scale(amax);
    const double y = double{amax} * std::ldexp(1.0, 127 - static_cast<int>(scale));
    ASSERT_LE(y, 448.0) << amax;
    if (scale > 0 && scale < 254) {
      ASSERT_GT(y, 223.0) << amax << ": a smaller scale would do";
    }
  }
  EXPECT_EQ(mxfp8_block_scale(0), 0u);
  EXPECT_EQ(mxfp8_block_scale(kInf), 254u);
  EXPECT_EQ(mxfp8_block_scale(448.0f), 127u);
  EXPECT_EQ(mxfp8_block_scale(450.0f), 128u) << "not 127, where 449 and more would saturate";
}

TEST(Legal, illegal_combinations_name_their_reason) {
  const QuantSpec nvfp4{.format = Format::kNvfp4};
  EXPECT_EQ(conflict_in(nvfp4), "");
  EXPECT_EQ(conflict_in({.format = Format::kMxfp8, .source = Source::kForward}), "");
  const auto expect = [](const QuantSpec& s, const char* word) {
    EXPECT_NE(conflict_in(s).find(word), std::string::npos) << describe(s) << ": " << conflict_in(s);
  };
  QuantSpec s = nvfp4;
  s.headroom = Headroom::k17over16;
  expect(s, "headroom");
  s = nvfp4;
  s.rounding = Rounding::kStochastic;
  s.scale_rule = ScaleRule::kFourOverSix;
  expect(s, "four_over_six");
  s = nvfp4;
  s.hadamard = 16;
  s.block = BlockShape::k16x16;
  expect(s, "16x16");
  s = nvfp4;
  s.hadamard = 48;
  expect(s, "hadamard");
  s = nvfp4;
  s.scale_scope = ScaleScope::kRow;
  s.block = BlockShape::k16x16;
  expect(s, "scale_scope row");
  expect({.format = Format::kMxfp8, .hadamard = 16}, "mxfp8");
  expect({.format = Format::kBf16, .rounding = Rounding::kStochastic}, "bf16");
  QuantSpec eden{
      .format = Format::kNvfp4, .rounding = Rounding::kMsEden, .hadamard = 128, .signs = Signs::kFresh};
  EXPECT_EQ(conflict_in(eden), "");
  for (auto change : {+[](QuantSpec& e) { e.signs = Signs::kFixed; }, +[](QuantSpec& e) { e.hadamard = 0; },
                      +[](QuantSpec& e) { e.scale_round = ScaleRound::kPow2; },
                      +[](QuantSpec& e) { e.scale_scope = ScaleScope::kRow; },
                      +[](QuantSpec& e) { e.scale_rule = ScaleRule::kFourOverSix; }}) {
    QuantSpec bad = eden;
    change(bad);
    EXPECT_NE(conflict_in(bad), "") << describe(bad);
  }
}

}  // namespace
}  // namespace fp4t
