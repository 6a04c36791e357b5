// The objectives: terms, ratios, weights and advantages against cases of an independent script
// (tests/reference/policy.py), and what each kind means.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "engine/rl/mismatch.h"
#include "engine/rl/policy.h"
#include "kernels/base/check.h"
#include "kernels/ops/run.h"
#include "tests/support/tensors.h"

namespace fp4t::test {
namespace {

using Json = nlohmann::json;

std::vector<Json> golden(const std::string& kind) {
  std::ifstream file(std::string(std::getenv("FP4T_TEST_SOURCE")) + "/tests/golden/policy.jsonl");
  std::vector<Json> cases;
  for (std::string line; std::getline(file, line);) {
    Json j = Json::parse(line);
    if (j.at("case") == kind) cases.push_back(std::move(j));
  }
  EXPECT_GT(cases.size(), 10u);
  return cases;
}

double close_to(double x) { return 2e-6 * (1 + std::abs(x)); }

PolicyTerms terms_of(const Json& j) {
  PolicyTerms terms;
  terms.form = j.at("form") == "ppo"     ? PolicyClipForm::kPpo
               : j.at("form") == "cispo" ? PolicyClipForm::kCispo
                                         : PolicyClipForm::kNone;
  terms.low = j.at("low");
  terms.high = j.at("high");
  terms.dual = j.at("dual");
  terms.kl = j.at("kl");
  terms.estimator = j.at("estimator") == "k1"   ? KlEstimator::kK1
                    : j.at("estimator") == "k2" ? KlEstimator::kK2
                                                : KlEstimator::kK3;
  terms.entropy = j.at("entropy");
  return terms;
}

TEST(PolicyToken, every_form_and_estimator_is_the_scripts) {
  for (const Json& j : golden("token")) {
    const float now = j.at("now"), old = j.at("old");
    const TokenObjective o =
        policy_token({now, j.at("reference"), j.at("advantage"),
                      static_cast<double>(now) - static_cast<double>(old), j.at("importance"), j.at("h")},
                     terms_of(j));
    const double loss = j.at("loss"), slope = j.at("slope");
    EXPECT_NEAR(static_cast<double>(o.loss), loss, close_to(loss)) << j;
    EXPECT_NEAR(static_cast<double>(o.d_log_prob), slope, close_to(slope)) << j;
    EXPECT_EQ(o.clipped, j.at("clipped").get<int32_t>()) << j;
  }
}

// The completion's term stands once: tokens weigh 1 / n.
TEST(PolicyObjective, a_completions_ratio_is_the_scripts_with_its_gradient) {
  Queue queue = Queue::cpu(1);
  for (const Json& j : golden("sequence")) {
    const auto now_list = j.at("now").get<std::vector<float>>(),
               old_list = j.at("old").get<std::vector<float>>();
    const auto n = static_cast<int64_t>(now_list.size());
    const int64_t rows = n + 2;  // one before, one after
    HostTensor now(DType::kF32, {rows}), old(DType::kF32, {rows}), advantage(DType::kF32, {rows}),
        importance(DType::kF32, {rows}), weight(DType::kF64, {rows}), mean(DType::kF64, {rows}),
        begin(DType::kI32, {rows}), end(DType::kI32, {rows}), loss(DType::kF32, {rows}),
        clipped(DType::kI32, {rows}), slope(DType::kF32, {rows});
    for (int64_t t = 0; t < rows; ++t) {
      const bool inside = t > 0 && t <= n;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      now.as<float>()[t] = inside ? now_list[static_cast<size_t>(t - 1)] : nan;
      old.as<float>()[t] = inside ? old_list[static_cast<size_t>(t - 1)] : nan;
      advantage.as<float>()[t] = j.at("advantage");
      importance.as<float>()[t] = 1;
      weight.as<double>()[t] = inside ? 1.0 / static_cast<double>(n) : 0;
      begin.as<int32_t>()[t] = inside ? 1 : 0;
      end.as<int32_t>()[t] = inside ? static_cast<int32_t>(n + 1) : 0;
    }
    run(queue, SequenceLogRatio{.log_prob = now.view(),
                                .old_log_prob = old.view(),
                                .begin = begin.view(),
                                .end = end.view(),
                                .mean = mean.view()});
    PolicyTerms terms;
    terms.low = j.at("low");
    terms.high = j.at("high");
    run(queue, PolicyObjective{.log_prob = now.view(),
                               .old_log_prob = old.view(),
                               .reference = {},
                               .advantage = advantage.view(),
                               .weight = weight.view(),
                               .importance = importance.view(),
                               .log_ratio = mean.view(),
                               .entropy = {},
                               .terms = terms,
                               .loss = loss.view(),
                               .clipped = clipped.view(),
                               .d_log_prob = slope.view(),
                               .d_entropy = {}});
    double sum = 0;
    for (int64_t t = 1; t <= n; ++t) {
      sum += static_cast<double>(loss.as<float>()[t]) * weight.as<double>()[t];
      const double want = j.at("slopes").at(static_cast<size_t>(t - 1));
      EXPECT_NEAR(static_cast<double>(slope.as<float>()[t]), want, close_to(want)) << j << " token " << t;
    }
    EXPECT_NEAR(sum, j.at("loss").get<double>(), close_to(sum)) << j;
    for (const int64_t t : {int64_t{0}, n + 1}) {
      EXPECT_EQ(slope.as<float>()[t], 0);
      EXPECT_EQ(mean.as<double>()[t], 0);
    }
  }
}

TEST(Mismatch, weights_and_masks_are_the_scripts) {
  for (const Json& j : golden("importance")) {
    MismatchSpec spec;
    spec.importance = j.at("importance");
    spec.cap = j.at("cap");
    spec.token_low = j.at("token_low");
    spec.token_high = j.at("token_high");
    spec.sequence_low = j.at("sequence_low");
    spec.sequence_high = j.at("sequence_high");
    spec.veto = j.at("veto");
    MismatchCounts counts;
    const auto f = importance_of(j.at("old").get<std::vector<float>>(), j.at("mu").get<std::vector<float>>(),
                                 spec, counts);
    ASSERT_EQ(f.size(), j.at("f").size());
    for (size_t t = 0; t < f.size(); ++t) {
      const double want = j.at("f").at(t);
      EXPECT_NEAR(static_cast<double>(f[t]), want, close_to(want)) << j << " token " << t;
    }
    EXPECT_EQ(counts.truncated, j.at("truncated").get<int64_t>()) << j;
    EXPECT_EQ(counts.masked, j.at("masked").get<int64_t>()) << j;
    EXPECT_EQ(counts.sequences_masked, j.at("sequences_masked").get<int64_t>()) << j;
    EXPECT_EQ(counts.vetoed, j.at("vetoed").get<int64_t>()) << j;
    EXPECT_EQ(counts.left_out, std::count(f.begin(), f.end(), 0.0f)) << j;
  }
}

TEST(Advantages, of_both_baselines_are_the_scripts) {
  for (const Json& j : golden("advantages")) {
    ObjectiveSpec spec;
    spec.baseline = j.at("baseline");
    spec.normalise_std = j.at("normalise");
    const auto a = advantages_of(j.at("rewards").get<std::vector<float>>(), j.at("samples"), spec);
    for (size_t i = 0; i < a.size(); ++i) {
      const double want = j.at("advantages").at(i);
      EXPECT_NEAR(static_cast<double>(a[i]), want, close_to(want)) << j << " at " << i;
    }
  }
  EXPECT_THROW(leave_one_out_advantages({1}, 1), InternalError);
  for (const float x : leave_one_out_advantages({0.1f, 0.1f, 0.1f}, 3)) EXPECT_EQ(x, 0.0f);
}

TEST(PolicyToken, a_sampler_with_the_same_bits_changes_nothing) {
  const MismatchSpec spec;  // truncated at 2
  MismatchCounts counts;
  EXPECT_EQ(importance_of({-1.25f, -0.1f}, {-1.25f, -0.1f}, spec, counts), (std::vector<float>{1, 1}));
  EXPECT_EQ(counts.truncated, 0);
}

// d = +-100: k3 grows as exp(d) on one side and as -d on the other; its slope pulls the policy the right way.
TEST(PolicyToken, estimators_are_finite_and_pull_far_from_the_reference) {
  for (const KlEstimator estimator : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}) {
    for (const float d : {-100.0f, -20.0f, 0.0f, 20.0f, 100.0f}) {
      PolicyTerms terms;
      terms.kl = 1;
      terms.estimator = estimator;
      const TokenObjective o = policy_token({-110, -110 + d, 0, 0, 1, 0}, terms);
      EXPECT_TRUE(std::isfinite(o.loss) && std::isfinite(o.d_log_prob)) << d;
      if (estimator == KlEstimator::kK1 || d == 0) continue;
      EXPECT_GT(o.loss, 0) << d;
      EXPECT_LT(o.d_log_prob * d, 0) << d;  // downhill is towards the reference
    }
  }
  PolicyTerms terms;
  terms.kl = 1;
  EXPECT_FLOAT_EQ(policy_token({-10, -110, 0, 0, 1, 0}, terms).loss, 99);       // exp(-100) + 100 - 1
  EXPECT_FLOAT_EQ(policy_token({-10, -110, 0, 0, 1, 0}, terms).d_log_prob, 1);  // 1 - exp(-100)
  // Log-ratios of new to old are held at 20.
  const TokenObjective far = policy_token({-1, 0, -1, 100, 1, 0}, {.form = PolicyClipForm::kNone});
  EXPECT_FLOAT_EQ(far.loss, static_cast<float>(std::exp(20.0)));
}

// max_tokens 16, the last 4 penalised: 12 -> 0, 13 -> -1/4, 14 -> -2/4, 16 -> -1; times the factor 2.
TEST(Rewards, overlong_completions_lose_on_a_straight_line) {
  ObjectiveSpec spec;
  spec.overlong_tokens = 4;
  spec.overlong_penalty = 2;
  EXPECT_EQ(overlong_reward(1, 16, spec), 0);
  EXPECT_EQ(overlong_reward(12, 16, spec), 0);
  EXPECT_EQ(overlong_reward(13, 16, spec), -0.5);
  EXPECT_EQ(overlong_reward(14, 16, spec), -1);
  EXPECT_EQ(overlong_reward(16, 16, spec), -2);
  spec.overlong_tokens = 0;
  EXPECT_EQ(overlong_reward(16, 16, spec), 0);
}

Rollout two_completions() {
  Rollout r;
  r.samples_per_prompt = 2;
  r.problems.resize(1);
  r.prompts = {{7, 8, 9}};
  r.completions = {{1, 2}, {3}};
  r.old_log_probs = {{-1, -2}, {-0.5f}};
  r.log_probs = r.old_log_probs;
  r.reference_log_probs = {{-1.5f, -1}, {-0.5f}};
  r.finished = {1, 0};
  r.rewards = {1, 0};
  r.advantages = {0.5f, -0.5f};
  return r;
}

// Completions of 2 and 1 tokens, the last 2 before the limit penalised by 1. A limit of 8: nothing; the
// problem's own of 2, or 4 positions, 3 of them the prompt's: the limit is reached, and half of the way.
TEST(Rewards, overlong_is_what_comes_near_the_limit_that_cuts) {
  ObjectiveSpec spec;
  spec.overlong_tokens = 2;
  spec.overlong_penalty = 1;
  Rollout r = two_completions();
  EXPECT_EQ(shaped_rewards(r, 8, 64, spec), (std::vector<float>{1, 0}));
  EXPECT_EQ(shaped_rewards(r, 8, 4, spec), (std::vector<float>{0, -0.5f}));
  r.problems[0].max_tokens = 2;
  EXPECT_EQ(shaped_rewards(r, 8, 64, spec), (std::vector<float>{0, -0.5f}));
}

// d = -0.5 and 1. k1 sums to 0.5 - 1 = -0.5, k2 to 0.125 + 0.5 = 0.625; k3 to (exp(-0.5) - 0.5) + (e - 2).
TEST(Rewards, kl_in_the_reward_is_summed_over_a_completion) {
  ObjectiveSpec spec;
  spec.kl = 0.1;
  spec.kl_in = "reward";
  const Rollout r = two_completions();
  const double k3 = std::exp(-0.5) - 0.5 + std::exp(1.0) - 2;
  for (const auto& [name, sum] : {std::pair{"k1", -0.5}, std::pair{"k2", 0.625}, std::pair{"k3", k3}}) {
    spec.kl_estimator = name;
    const auto rewards = shaped_rewards(r, 8, 64, spec);
    EXPECT_FLOAT_EQ(rewards[0], static_cast<float>(1 - 0.1 * sum)) << name;
    EXPECT_FLOAT_EQ(rewards[1], 0) << name;
  }
  EXPECT_EQ(policy_terms(spec).kl, 0);  // and not in the loss as well
  spec.kl_in = "loss";
  EXPECT_EQ(shaped_rewards(r, 8, 64, spec), r.rewards);
  EXPECT_EQ(policy_terms(spec).kl, 0.1);
}

// Two completions of 2 and 1 tokens: 1/3; 1/(2*2), 1/2; and by a constant of 10 for the 2 of the step.
TEST(Divisor, is_tokens_sequences_or_a_constant) {
  const Rollout r = two_completions();
  ObjectiveSpec spec;
  spec.average = "token";
  const Divisor d = divisor_of(r, {0, 1}, spec);
  EXPECT_DOUBLE_EQ(d.weight(spec, 2), 1.0 / 3);
  spec.average = "sequence";
  EXPECT_DOUBLE_EQ(d.weight(spec, 2), 1.0 / 4);
  EXPECT_DOUBLE_EQ(d.weight(spec, 1), 1.0 / 2);
  spec.average = "constant";
  spec.average_tokens = 10;
  EXPECT_DOUBLE_EQ(d.weight(spec, 2), 1.0 / 20);
  // What is left out does not change the constant.
  EXPECT_DOUBLE_EQ(divisor_of(r, {0}, spec).weight(spec, 2), 1.0 / 20);
}

TEST(MiniBatches, leave_cut_completions_out_when_asked) {
  ObjectiveSpec spec;
  spec.mask_truncated = true;
  Rollout r = two_completions();
  EXPECT_EQ(mini_batches(r, spec, 1, 0)[0], (std::vector<int64_t>{0}));
  r.finished = {0, 0};
  EXPECT_TRUE(mini_batches(r, spec, 1, 0)[0].empty());
}

TEST(Rewards, groups_of_equal_rewards_are_found) {
  EXPECT_EQ(equal_groups({1, 1, 0, 1, 0, 0}, 2), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(equal_groups({}, 2), std::vector<int64_t>{});
}

// rho = 2 and 1/2: mean 1.25, mean square 2.125; the tokens are worth 2.5^2 / (2 * 4.25) = 0.735294 of
// themselves. KL(mu | p): mean of (2 - log 2 - 1) and (0.5 + log 2 - 1) = 0.25. KL(p | mu): mean of (2 log 2
// - 1) and
// (-0.5 log 2 + 0.5) = 0.75 log 2 - 0.25. exp|d| - 1 = 1 in both. JS: half the mean of rho log(rho / m) - log
// m with m = (1 + rho) / 2.
TEST(Mismatch, sums_by_hand) {
  MismatchSums s;
  const float ln2 = std::log(2.0f);
  s.add({0, -ln2}, {-ln2, 0});
  EXPECT_NEAR(s.mean(s.rho), 1.25, 1e-6);
  EXPECT_NEAR(s.chi_square(), 1.125, 1e-6);
  EXPECT_NEAR(s.effective_share(), 6.25 / 8.5, 1e-6);
  EXPECT_NEAR(s.mean(s.generation_kl), 0.25, 1e-6);
  EXPECT_NEAR(s.mean(s.policy_kl), 0.75 * std::log(2.0) - 0.25, 1e-6);
  EXPECT_NEAR(s.mean(s.error), 1, 1e-6);
  const auto js = [](double rho) {
    const double m = (1 + rho) / 2;
    return 0.5 * (rho * std::log(rho / m) - std::log(m));
  };
  EXPECT_NEAR(s.mean(s.js), (js(2) + js(0.5)) / 2, 1e-6);
  EXPECT_EQ(s.equal, 0);
  const MismatchSums none;
  EXPECT_EQ(none.effective_share(), 1);
  EXPECT_EQ(none.mean(none.rho), 0);
  EXPECT_EQ(none.chi_square(), 0);
}

}  // namespace
}  // namespace fp4t::test
