// The element codecs, exhaustively: every code, every BF16 input, every midpoint, against definitions
// written here in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/formats/bf16.h"
#include "kernels/formats/e2m1.h"
#include "kernels/formats/e4m3.h"
#include "kernels/formats/e8m0.h"

namespace fp4t {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

double e2m1_by_definition(uint32_t code) {
  const double table[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) ? -table[code & 7] : table[code & 7];
}

double e4m3_by_definition(uint32_t code) {
  const int exponent = static_cast<int>(code >> 3 & 15), mantissa = static_cast<int>(code & 7);
  const double m = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) ? -m : m;
}

// The code of `count` ascending magnitudes that lies nearest to |y|, ties to the even code, saturating.
uint32_t nearest_code(double (*value)(uint32_t), uint32_t count, uint32_t sign_bit, float y) {
  const double a = std::fabs(static_cast<double>(y));
  uint32_t best = 0;
  for (uint32_t c = 1; c < count; ++c) {
    const double now = std::fabs(value(c) - a), before = std::fabs(value(best) - a);
    if (now < before || (now == before && c % 2 == 0)) best = c;
  }
  if (a >= value(count - 1)) best = count - 1;
  return best | (std::signbit(y) ? sign_bit : 0);
}

uint32_t e2m1_reference(float y) { return std::isnan(y) ? 7 : nearest_code(e2m1_by_definition, 8, 8, y); }
uint32_t e4m3_reference(float y) {
  return std::isnan(y) ? 0x7F : nearest_code(e4m3_by_definition, 127, 0x80, y);
}

// Every BF16, and the midpoints of every two neighbours of a format with the FP32 values beside them.
std::vector<float> inputs(double (*value)(uint32_t), uint32_t count) {
  std::vector<float> out;
  for (uint32_t b = 0; b < 65536; ++b) out.push_back(bf16_to_f32({static_cast<uint16_t>(b)}));
  for (uint32_t c = 0; c + 1 < count; ++c) {
    for (double sign : {1.0, -1.0}) {
      const float middle = static_cast<float>(sign * (value(c) + value(c + 1)) / 2);
      for (float y : {middle, std::nextafter(middle, kInf), std::nextafter(middle, -kInf)}) out.push_back(y);
    }
  }
  for (float y : {1e-45f, -1e-45f, 1e30f, -1e30f, 3.4e38f, kInf, -kInf, kNan, -kNan}) out.push_back(y);
  return out;
}

TEST(E2m1, all_codes_have_their_values_and_encode_to_themselves) {
  for (uint32_t c = 0; c < 16; ++c) {
    EXPECT_EQ(e2m1_value(c), static_cast<float>(e2m1_by_definition(c)));
    EXPECT_EQ(std::signbit(e2m1_value(c)), c >= 8) << c;
    EXPECT_EQ(e2m1_nearest(e2m1_value(c)), c);
    for (uint32_t r : {0u, 128u, 255u}) EXPECT_EQ(e2m1_stochastic(e2m1_value(c), r), c);
  }
}

TEST(E2m1, nearest_equals_the_definition_for_every_bf16_and_midpoint) {
  for (float y : inputs(e2m1_by_definition, 8)) {
    ASSERT_EQ(e2m1_nearest(y), e2m1_reference(y)) << y << " " << std::hex << bits_of(y);
    const float rounded = e2m1_round(y);
    ASSERT_EQ(bits_of(rounded), bits_of(e2m1_value(e2m1_reference(y)))) << y;
  }
}

TEST(E2m1, saturates_and_maps_nan_to_plus_six) {
  for (float y : {6.0f, 7.0f, 1e30f, kInf, kNan, -kNan}) EXPECT_EQ(e2m1_nearest(y), 7u) << y;
  for (float y : {-6.0f, -7.0f, -1e30f, -kInf}) EXPECT_EQ(e2m1_nearest(y), 15u) << y;
  EXPECT_EQ(e2m1_nearest(-0.0f), 8u);
  for (uint32_t r : {0u, 255u}) {
    for (float y : {7.0f, kInf, kNan, -kNan}) EXPECT_EQ(e2m1_stochastic(y, r), 7u) << y;
    EXPECT_EQ(e2m1_stochastic(-kInf, r), 15u);
    EXPECT_EQ(e2m1_stochastic(-0.0f, r), 8u);
  }
}

TEST(E4m3, all_codes_have_their_values_and_encode_to_themselves) {
  for (uint32_t c = 0; c < 256; ++c) {
    if ((c & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(e4m3_value(c)));
      continue;
    }
    EXPECT_EQ(e4m3_value(c), static_cast<float>(e4m3_by_definition(c)));
    EXPECT_EQ(std::signbit(e4m3_value(c)), c >= 128) << c;
    EXPECT_EQ(e4m3_nearest(e4m3_value(c)), c);
  }
}

TEST(E4m3, nearest_equals_the_definition_for_every_bf16_and_midpoint) {
  for (float y : inputs(e4m3_by_definition, 127)) {
    ASSERT_EQ(e4m3_nearest(y), e4m3_reference(y)) << y << " " << std::hex << bits_of(y);
  }
  for (float y : {448.0f, 449.0f, 464.0f, 1e30f, kInf}) EXPECT_EQ(e4m3_nearest(y), 0x7Eu) << y;
  EXPECT_EQ(e4m3_nearest(-kInf), 0xFEu);
  EXPECT_EQ(e4m3_nearest(-kNan), 0x7Fu);
}

TEST(E8m0, all_bytes_have_their_values_and_round_up_to_themselves) {
  for (uint32_t b = 0; b < 255; ++b) {
    const double value = std::ldexp(1.0, static_cast<int>(b) - 127);
    EXPECT_EQ(static_cast<double>(e8m0_value(b)), value) << b;
    EXPECT_EQ(e8m0_round_up(e8m0_value(b)), b);
    EXPECT_EQ(static_cast<double>(e8m0_reciprocal(b)) * value, 1.0) << b;
  }
  EXPECT_TRUE(std::isnan(e8m0_value(255)));
}

TEST(E8m0, round_up_takes_the_smallest_power_that_is_not_below) {
  std::vector<float> values = {1e-45f,    0x1p-127f, std::nextafter(0x1p-127f, 1.0f),
                               0x1p-126f, kInf,      std::numeric_limits<float>::max()};
  for (uint32_t b = 0; b <= 0x7F80; ++b) {
    const float t = bf16_to_f32({static_cast<uint16_t>(b)});
    values.push_back(t);
    if (t > 0 && t < kInf) values.push_back(std::nextafter(t, kInf));
  }
  for (float t : values) {
    uint32_t expected = 0;
    while (expected < 254 && std::ldexp(1.0, static_cast<int>(expected) - 127) < double{t}) ++expected;
    ASSERT_EQ(e8m0_round_up(t), expected) << t;
  }
}

TEST(Bf16Codec, rounds_to_nearest_even_at_every_midpoint_and_keeps_every_value) {
  for (uint32_t b = 0; b < 65536; ++b) {
    const Bf16 x{static_cast<uint16_t>(b)};
    const float f = bf16_to_f32(x);
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(f)))) << b;
      continue;
    }
    ASSERT_EQ(f32_to_bf16(f).bits, b);
    if (std::isinf(f)) continue;
    // FP32 bits order magnitudes, so the neighbour above in magnitude is b + 1 and the midpoint 0x8000.
    const uint32_t up = b + 1, even = b % 2 == 0 ? b : up;
    ASSERT_EQ(f32_to_bf16(float_of(b << 16 | 0x7FFF)).bits, b);
    ASSERT_EQ(f32_to_bf16(float_of(b << 16 | 0x8000)).bits, even);
    ASSERT_EQ(f32_to_bf16(float_of(b << 16 | 0x8001)).bits, up);
  }
  EXPECT_EQ(f32_to_bf16(float_of(0x7F800001u)).bits & 0x7FFF, 0x7FC0) << "a NaN whose low bits alone say so";
}

}  // namespace
}  // namespace fp4t
