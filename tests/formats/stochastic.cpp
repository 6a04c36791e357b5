// Stochastic rounding to E2M1 with given bits: the rule, its expectation, and what that means for bias.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/base/philox.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/e2m1.h"

namespace fp4t {
namespace {

struct Cell {
  uint32_t low_code;  // code below |y|
  double step, fraction;
};

// NUMERICS.md section 0.0 in double precision.
Cell cell_of(float y) {
  const double a = std::min(std::fabs(double{y}), 6.0);
  const double step = a < 2 ? 0.5 : a < 4 ? 1.0 : 2.0;
  const double n = std::floor(a / step);
  const uint32_t first = a < 2 ? 0 : a < 4 ? 2 : 4;  // code = first + n within the binade
  return {first + static_cast<uint32_t>(n), step, a / step - n};
}

std::vector<float> finite_bf16() {
  std::vector<float> out;
  for (uint32_t b = 0; b < 65536; ++b) {
    const float y = bf16_to_f32({static_cast<uint16_t>(b)});
    if (std::isfinite(y)) out.push_back(y);
  }
  return out;
}

TEST(Stochastic, equals_the_rule_for_every_bf16_and_every_draw) {
  for (float y : finite_bf16()) {
    const Cell c = cell_of(y);
    const uint32_t sign = std::signbit(y) ? 8 : 0;
    for (uint32_t r = 0; r < 256; ++r) {
      const bool up = std::floor(256 * c.fraction) + r >= 256;
      ASSERT_EQ(e2m1_stochastic(y, r), (c.low_code + (up ? 1 : 0)) | sign) << y << " r " << r;
    }
  }
}

TEST(Stochastic, expectation_over_the_draws_is_floor_of_256_f) {
  for (float y : finite_bf16()) {
    if (std::fabs(y) > 6) continue;
    const Cell c = cell_of(y);
    double sum = 0;
    for (uint32_t r = 0; r < 256; ++r) sum += double{e2m1_value(e2m1_stochastic(y, r))};
    const double low = double{std::fabs(e2m1_value(c.low_code))};
    const double expected = low + c.step * std::floor(256 * c.fraction) / 256;
    ASSERT_EQ(std::fabs(sum / 256), expected) << y;
  }
}

TEST(Stochastic, mean_over_4096_philox_draws_is_within_the_noise_of_the_input) {
  const PhiloxKey key{11, 12};
  uint64_t index = 0;
  for (float y : {0.1f, 0.3f, -0.74f, 1.1f, 1.9f, -2.6f, 3.3f, 4.5f, 5.9f, -5.0f}) {
    double sum = 0;
    for (int i = 0; i < 1024; ++i) {
      const PhiloxBits b = site_draw(key, index++);
      for (int w = 0; w < 4; ++w) sum += double{e2m1_value(e2m1_stochastic(y, b.word[w] & 255))};
    }
    const Cell c = cell_of(y);
    const double sigma = c.step * std::sqrt(c.fraction * (1 - c.fraction) / 4096);
    // Eight bits truncate f by at most 1/256 of a step towards zero.
    EXPECT_NEAR(sum / 4096, double{y}, 4 * sigma + c.step / 256) << y;
    EXPECT_NE(sum, 0) << "never zeros";
  }
}

}  // namespace
}  // namespace fp4t
