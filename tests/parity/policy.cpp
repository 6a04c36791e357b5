// The policy objective of rows against its formula; what a row of weight 0 holds does not matter.
#include "kernels/ops/policy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "kernels/ops/run.h"
#include "tests/support/tensors.h"

namespace fp4t::test {
namespace {

TEST(PolicyObjective, rows_follow_the_formula_and_unscored_ones_are_zero) {
  constexpr int64_t kRows = 5003;
  HostTensor now(DType::kF32, {kRows}), old(DType::kF32, {kRows}), reference(DType::kF32, {kRows}),
      advantage(DType::kF32, {kRows}), weight(DType::kF64, {kRows}), loss(DType::kF32, {kRows}),
      clipped(DType::kI32, {kRows}), slope(DType::kF32, {kRows});
  std::mt19937 engine(5);
  std::normal_distribution<float> normal;
  for (int64_t t = 0; t < kRows; ++t) {
    now.as<float>()[t] = -2 + 0.3f * normal(engine);
    old.as<float>()[t] = -2 + 0.3f * normal(engine);
    reference.as<float>()[t] = -2 + 0.3f * normal(engine);
    advantage.as<float>()[t] = normal(engine);
    weight.as<double>()[t] = t % 3 == 0 ? 0.0 : 1.0 / 700;
    if (t % 3 == 0) now.as<float>()[t] = std::numeric_limits<float>::quiet_NaN();
  }
  Queue queue = Queue::cpu(3);
  for (const double kl : {0.0, 0.1}) {
    run(queue, PolicyObjective{.log_prob = now.view(),
                               .old_log_prob = old.view(),
                               .reference = kl > 0 ? reference.view() : TensorView{},
                               .advantage = advantage.view(),
                               .weight = weight.view(),
                               .clip = {.low = 0.2, .high = 0.3, .kl = kl},
                               .loss = loss.view(),
                               .clipped = clipped.view(),
                               .d_log_prob = slope.view()});
    int64_t clips = 0;
    for (int64_t t = 0; t < kRows; ++t) {
      if (t % 3 == 0) {
        EXPECT_EQ(loss.as<float>()[t], 0);
        EXPECT_EQ(slope.as<float>()[t], 0);
        EXPECT_EQ(clipped.as<int32_t>()[t], 0);
        continue;
      }
      const double x = static_cast<double>(now.as<float>()[t]), o = static_cast<double>(old.as<float>()[t]);
      const double a = static_cast<double>(advantage.as<float>()[t]);
      const double r = std::exp(x - o), d = static_cast<double>(reference.as<float>()[t]) - x;
      const bool outside = a > 0 ? r > 1.3 : r < 0.8;
      const double held = a > 0 ? 1.3 : 0.8;
      const double want = -(outside ? held : r) * a + kl * (std::exp(d) - d - 1);
      const double want_slope = ((outside ? 0.0 : -r * a) + kl * (1 - std::exp(d))) / 700;
      EXPECT_NEAR(static_cast<double>(loss.as<float>()[t]), want, 1e-6 * (1 + std::abs(want))) << t;
      EXPECT_NEAR(static_cast<double>(slope.as<float>()[t]), want_slope, 1e-8) << t;
      EXPECT_EQ(clipped.as<int32_t>()[t], outside ? 1 : 0) << t;
      clips += outside;
    }
    EXPECT_GT(clips, kRows / 10);
    EXPECT_LT(clips, kRows / 2);
  }
}

}  // namespace
}  // namespace fp4t::test
