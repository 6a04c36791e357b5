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
      advantage(DType::kF32, {kRows}), importance(DType::kF32, {kRows}), weight(DType::kF64, {kRows}),
      loss(DType::kF32, {kRows}), clipped(DType::kI32, {kRows}), slope(DType::kF32, {kRows});
  std::mt19937 engine(5);
  std::normal_distribution<float> normal;
  for (int64_t t = 0; t < kRows; ++t) {
    now.as<float>()[t] = -2 + 0.3f * normal(engine);
    old.as<float>()[t] = -2 + 0.3f * normal(engine);
    reference.as<float>()[t] = -2 + 0.3f * normal(engine);
    advantage.as<float>()[t] = normal(engine);
    importance.as<float>()[t] = 1;
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
                               .importance = importance.view(),
                               .log_ratio = {},
                               .entropy = {},
                               .terms = {.low = 0.2, .high = 0.3, .kl = kl},
                               .loss = loss.view(),
                               .clipped = clipped.view(),
                               .d_log_prob = slope.view(),
                               .d_entropy = {}});
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
      EXPECT_EQ(clipped.as<int32_t>()[t], !outside ? kNotClipped : a > 0 ? kClippedHigh : kClippedLow) << t;
      clips += outside;
    }
    EXPECT_GT(clips, kRows / 10);
    EXPECT_LT(clips, kRows / 2);
  }
}

// Ranges of 1, 2, 4, ... rows with two rows of none between them; means against sums in long double, equal
// bits for any number of threads.
TEST(SequenceLogRatio, is_the_mean_over_each_range_for_any_number_of_threads) {
  constexpr int64_t kRows = 20000;
  HostTensor now(DType::kF32, {kRows}), old(DType::kF32, {kRows}), begin(DType::kI32, {kRows}),
      end(DType::kI32, {kRows}), mean(DType::kF64, {kRows}), again(DType::kF64, {kRows});
  fill_normal(now, 1, 1.0f);
  fill_normal(old, 2, 1.0f);
  begin.zero();
  end.zero();
  for (int64_t at = 1, n = 1; at + n <= kRows; at += n + 2, n *= 2) {
    for (int64_t t = at; t < at + n; ++t) {
      begin.as<int32_t>()[t] = static_cast<int32_t>(at);
      end.as<int32_t>()[t] = static_cast<int32_t>(at + n);
    }
  }
  const auto means = [&](int threads, HostTensor& out) {
    Queue queue = Queue::cpu(threads);
    run(queue, SequenceLogRatio{.log_prob = now.view(),
                                .old_log_prob = old.view(),
                                .begin = begin.view(),
                                .end = end.view(),
                                .mean = out.view()});
  };
  means(1, mean);
  means(3, again);
  for (int64_t t = 0; t < kRows; ++t) {
    ASSERT_EQ(mean.as<double>()[t], again.as<double>()[t]) << t;
    long double sum = 0;
    const int64_t first = begin.as<int32_t>()[t], last = end.as<int32_t>()[t];
    if (t > first && t % 997 != 0) continue;
    for (int64_t i = first; i < last; ++i) {
      sum += static_cast<long double>(now.as<float>()[i]) - static_cast<long double>(old.as<float>()[i]);
    }
    const long double want = last > first ? sum / static_cast<long double>(last - first) : 0;
    EXPECT_NEAR(mean.as<double>()[t], static_cast<double>(want), 1e-12) << t;
  }
  end.as<int32_t>()[0] = kRows + 1;
  EXPECT_THROW(means(1, mean), InternalError);
}

}  // namespace
}  // namespace fp4t::test
