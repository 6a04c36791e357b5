#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "engine/rl/policy.h"
#include "engine/rl/routing.h"
#include "engine/stage/rl_metrics.h"
#include "kernels/base/check.h"

namespace fp4t {
namespace {

ObjectiveSpec plain() {
  ObjectiveSpec o;
  o.clip_low = 0.2;
  o.clip_high = 0.3;
  return o;
}

// As one of the group-relative kinds computes it.
TokenObjective grpo_token(float now, float old, float reference, float advantage, const ObjectiveSpec& spec) {
  const double ratio = static_cast<double>(now) - static_cast<double>(old);
  return policy_token({now, reference, advantage, ratio, 1, 0}, policy_terms(spec));
}

TEST(Advantages, are_deviations_from_the_group_mean) {
  const auto a = group_advantages({1, 0, 0, 0, 1, 1, 1, 1}, 4, false);
  EXPECT_EQ(a, (std::vector<float>{0.75f, -0.25f, -0.25f, -0.25f, 0, 0, 0, 0}));
}

TEST(Advantages, divide_by_the_standard_deviation_when_asked) {
  const auto a = group_advantages({1, 0}, 2, true);
  const double sd = std::sqrt(0.5);
  EXPECT_FLOAT_EQ(a[0], static_cast<float>(0.5 / (sd + 1e-6)));
  EXPECT_FLOAT_EQ(a[1], -a[0]);
}

TEST(Advantages, of_equal_rewards_are_exactly_zero) {
  for (float x : group_advantages({0.1f, 0.1f, 0.1f}, 3, true)) EXPECT_EQ(x, 0.0f);
  EXPECT_EQ(group_advantages({0.7f}, 1, true)[0], 0.0f);
  EXPECT_THROW(group_advantages({1, 2, 3}, 2, false), InternalError);
}

TEST(Grpo, by_hand) {
  // Ratio 1: gradient -A, loss -A.
  TokenObjective o = grpo_token(-1, -1, 0, 2, plain());
  EXPECT_FLOAT_EQ(o.loss, -2);
  EXPECT_FLOAT_EQ(o.d_log_prob, -2);
  EXPECT_EQ(o.clipped, kNotClipped);
  // Ratio 1.5 with A > 0: clipped at 1.3, no gradient.
  o = grpo_token(std::log(1.5f), 0, 0, 2, plain());
  EXPECT_FLOAT_EQ(o.loss, -2.6f);
  EXPECT_EQ(o.d_log_prob, 0);
  EXPECT_EQ(o.clipped, kClippedHigh);
  // Ratio 1.5 with A < 0: the unclipped branch is the smaller one.
  o = grpo_token(std::log(1.5f), 0, 0, -2, plain());
  EXPECT_FLOAT_EQ(o.loss, 3);
  EXPECT_FLOAT_EQ(o.d_log_prob, 3);
  // Ratio 0.5 with A < 0: clipped at 0.8.
  o = grpo_token(std::log(0.5f), 0, 0, -2, plain());
  EXPECT_FLOAT_EQ(o.loss, 1.6f);
  EXPECT_EQ(o.clipped, kClippedLow);
}

TEST(Grpo, gradient_is_the_derivative_of_the_loss) {
  ObjectiveSpec spec = plain();
  spec.kl = 0.5;
  for (float now : {-3.0f, -1.1f, -0.9f, -0.4f}) {
    for (float advantage : {-1.5f, 0.0f, 0.7f}) {
      auto loss = [&](double x) {
        const double r = std::exp(x + 1.0), d = -1.3 - x;
        return -std::min(r * double(advantage), std::clamp(r, 0.8, 1.3) * double(advantage)) +
               0.5 * (std::exp(d) - d - 1);
      };
      const double h = 1e-6;
      const TokenObjective o = grpo_token(now, -1.0f, -1.3f, advantage, spec);
      EXPECT_NEAR(double(o.loss), loss(double(now)), 1e-5);
      EXPECT_NEAR(double(o.d_log_prob), (loss(double(now) + h) - loss(double(now) - h)) / (2 * h), 1e-4);
    }
  }
}

TEST(Grpo, survives_extreme_log_ratios) {
  ObjectiveSpec spec = plain();
  spec.kl = 1;
  for (float d : {-100.0f, 100.0f}) {
    const TokenObjective o = grpo_token(-120.0f + d, -120.0f, -120.0f - d, 1, spec);
    EXPECT_TRUE(std::isfinite(o.loss));
    EXPECT_TRUE(std::isfinite(o.d_log_prob));
  }
}

Rollout rollout_of(const std::vector<float>& rewards, int64_t samples) {
  Rollout r;
  r.samples_per_prompt = samples;
  for (size_t i = 0; i < rewards.size(); ++i) {
    r.completions.push_back({1, 2});
    r.log_probs.push_back({-1, -2});
    r.finished.push_back(1);
    r.verdicts.push_back(rewards[i] > 0 ? 0 : 1);
  }
  for (size_t p = 0; p < rewards.size() / static_cast<size_t>(samples); ++p) {
    r.problems.push_back({"1+1=", "2"});
    r.prompts.push_back({49});
  }
  r.old_log_probs = r.log_probs;
  r.rewards = rewards;
  r.advantages = group_advantages(rewards, samples, false);
  return r;
}

TEST(MiniBatches, hold_each_completion_with_an_advantage_once_an_epoch) {
  ObjectiveSpec spec;
  spec.epochs = 2;
  spec.mini_batches = 3;
  const Rollout r = rollout_of({1, 0, 1, 1, 0, 1, 0, 0}, 2);  // the group {1, 1} and {0, 0} have none
  const auto lists = mini_batches(r, spec, 1, 5);
  ASSERT_EQ(lists.size(), 6u);
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::multiset<int64_t> seen;
    for (int b = 0; b < 3; ++b)
      seen.insert(lists[static_cast<size_t>(epoch * 3 + b)].begin(),
                  lists[static_cast<size_t>(epoch * 3 + b)].end());
    EXPECT_EQ(seen, (std::multiset<int64_t>{0, 1, 4, 5}));
  }
  EXPECT_EQ(lists, mini_batches(r, spec, 1, 5));
  EXPECT_NE(lists, mini_batches(r, spec, 1, 6));
}

TEST(MiniBatches, are_empty_when_nothing_has_an_advantage) {
  ObjectiveSpec spec;
  spec.mini_batches = 2;
  for (const auto& list : mini_batches(rollout_of({1, 1}, 2), spec, 1, 0)) EXPECT_TRUE(list.empty());
  spec.drop_zero_advantage = false;
  EXPECT_EQ(mini_batches(rollout_of({1, 1}, 2), spec, 1, 0)[0].size(), 1u);
}

TEST(RolloutMetrics, lengths_are_by_status_and_equality_is_by_bits) {
  Rollout r = rollout_of({1, 0, 0}, 3);
  r.completions = {std::vector<int32_t>(5, 1), std::vector<int32_t>(9, 1), std::vector<int32_t>(16, 1)};
  r.finished = {1, 1, 0};
  r.log_probs = {std::vector<float>(5, -1), std::vector<float>(9, -1), std::vector<float>(16, -1)};
  r.old_log_probs = r.log_probs;
  r.old_log_probs[2][3] = std::nextafter(-1.0f, 0.0f);
  const MetricsRecord m = rollout_metrics(r, {});
  EXPECT_EQ(figure(m, "length_finished_min"), 5);
  EXPECT_EQ(figure(m, "length_finished_mean"), 7);
  EXPECT_EQ(figure(m, "length_finished_max"), 9);
  EXPECT_EQ(figure(m, "length_truncated_mean"), 16);
  EXPECT_NEAR(figure(m, "truncated"), 1.0 / 3, 1e-12);
  EXPECT_NEAR(figure(m, "logprob_equal_fraction"), 29.0 / 30, 1e-12);
  EXPECT_GT(figure(m, "logprob_difference_max"), 0);
  EXPECT_THROW(figure(m, "nothing"), InternalError);
}

// By hand: two layers, three rows, two experts of four. The order within a row does not matter.
TEST(Routing, rows_differ_where_their_sets_do) {
  const RoutingShape shape = {.layers = 2, .top_k = 2, .experts = 4};
  const std::vector<int32_t> a = {0, 1, 2, 3, 0, 2, /* layer 1 */ 0, 1, 0, 1, 0, 1};
  const std::vector<int32_t> b = {1, 0, 2, 1, 0, 3, /* layer 1 */ 0, 1, 1, 0, 2, 3};
  EXPECT_EQ(rows_that_differ(shape, a, b, 3), (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(rows_that_differ(shape, a, a, 3), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(rows_that_differ(shape, {}, {}, 0), (std::vector<int64_t>{0, 0}));
  EXPECT_THROW(rows_that_differ(shape, a, b, 2), InternalError);
}

}  // namespace
}  // namespace fp4t
