// Normal numbers: their moments, their keys, their place in the draws.
#include "kernels/ops/random.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/formats/bf16.h"
#include "kernels/formats/normal.h"
#include "kernels/ops/run.h"
#include "tests/support/tensors.h"

namespace fp4t::test {
namespace {

constexpr PhiloxKey kKey{0x1234567u, 0x89ABCDEu};

HostTensor filled(DType dtype, int64_t n, float scale, PhiloxKey key = kKey, int64_t first = 0) {
  HostTensor t(dtype, {n});
  Queue queue = Queue::cpu(3);
  run(queue, FillNormal{.key = key, .scale = scale, .out = t.view(), .first_element = first});
  return t;
}

TEST(FillNormal, has_the_moments_of_a_normal_distribution) {
  constexpr int64_t kCount = 1 << 20;
  HostTensor t = filled(DType::kF32, kCount, 0.5f);
  double sum = 0, square = 0, fourth = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const double x = static_cast<double>(t.as<float>()[i]) / 0.5;
    sum += x, square += x * x, fourth += x * x * x * x;
  }
  // Five standard errors: 1, sqrt(2) and sqrt(96) over the root of the count.
  const double root = std::sqrt(static_cast<double>(kCount));
  EXPECT_NEAR(sum / kCount, 0, 5 / root);
  EXPECT_NEAR(square / kCount, 1, 5 * std::sqrt(2) / root);
  EXPECT_NEAR(fourth / kCount, 3, 5 * std::sqrt(96) / root);
}

TEST(FillNormal, element_i_is_of_draw_i_over_4_whatever_the_length) {
  HostTensor whole = filled(DType::kF32, 4099, 1.0f);
  for (const int64_t n : {0, 1, 2, 3, 5, 4098}) {
    HostTensor part = filled(DType::kF32, n, 1.0f);
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(part.as<float>()[i], whole.as<float>()[i]) << i << " of " << n;
  }
  for (const int64_t i : {0, 1, 2, 3, 4094, 4095}) {
    const PhiloxBits bits = site_draw(kKey, static_cast<uint64_t>(i / 4));
    const NormalPair pair = normal_pair(bits.word[i / 2 % 2 * 2], bits.word[i / 2 % 2 * 2 + 1]);
    EXPECT_EQ(whole.as<float>()[i], i % 2 == 0 ? pair.even : pair.odd) << i;
  }
  EXPECT_NE(filled(DType::kF32, 1, 1.0f, {1, 2}).as<float>()[0], whole.as<float>()[0]);
}

TEST(FillNormal, a_part_holds_the_elements_of_the_whole) {
  HostTensor whole = filled(DType::kF32, 4099, 1.0f);
  for (const int64_t first : {1, 2, 3, 4, 7, 4001}) {
    for (const int64_t n : {0, 1, 2, 5, 98}) {
      HostTensor part = filled(DType::kF32, n, 1.0f, kKey, first);
      for (int64_t i = 0; i < n; ++i) {
        EXPECT_EQ(part.as<float>()[i], whole.as<float>()[first + i]) << i << " of " << n << " from " << first;
      }
    }
  }
}

TEST(FillNormal, bf16_is_the_rounded_number) {
  HostTensor wide = filled(DType::kF32, 1001, 0.02f), narrow = filled(DType::kBf16, 1001, 0.02f);
  for (int64_t i = 0; i < 1001; ++i) {
    EXPECT_EQ(narrow.as<Bf16>()[i].bits, f32_to_bf16(wide.as<float>()[i]).bits) << i;
  }
}

TEST(FillNormal, the_rarest_words_give_finite_numbers) {
  for (const uint32_t radius : {0u, 0xFFFFFFFFu}) {
    for (const uint32_t angle : {0u, 0x40000000u, 0xFFFFFFFFu}) {
      const NormalPair pair = normal_pair(radius, angle);
      EXPECT_TRUE(std::isfinite(pair.even) && std::isfinite(pair.odd)) << radius << " " << angle;
    }
  }
}

}  // namespace
}  // namespace fp4t::test
