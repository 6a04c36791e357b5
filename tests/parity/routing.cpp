// What routing promises: who is chosen, where rows go, what is counted.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/formats/math.h"
#include "tests/support/compare.h"
#include "tests/support/routing.h"

namespace fp4t::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<RoutingSetup> setups(int64_t tokens) {
  std::vector<RoutingSetup> all;
  for (const auto kind : {RouterKind::kSoftmax, RouterKind::kSigmoid}) {
    for (const bool normalise : {true, false}) {
      for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {8, 2}, {7, 3}, {64, 6}, {5, 5}}) {
        all.push_back({tokens, n, k, kind, normalise, 2.5f});
      }
    }
  }
  return all;
}

std::string text(const RoutingSetup& s) {
  return detail::concat("T=", s.tokens, " E=", s.num_experts, " k=", s.top_k,
                        " kind=", static_cast<int>(s.kind), " normalise=", s.normalise);
}

// The permutation is the stable sort of (token, choice) by expert.
void expect_sorted_permutation(Routing& r) {
  const int64_t k = r.setup.top_k, pairs = r.setup.tokens * k;
  std::vector<int64_t> order(static_cast<size_t>(pairs));
  std::iota(order.begin(), order.end(), 0);
  const int32_t* experts = r.experts.as<int32_t>();
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return experts[a] < experts[b]; });
  std::vector<int64_t> counts(static_cast<size_t>(r.setup.num_experts), 0);
  for (int64_t row = 0; row < pairs; ++row) {
    const int64_t i = order[static_cast<size_t>(row)];
    ASSERT_EQ(r.row_of.as<int32_t>()[i], row);
    ASSERT_EQ(r.token_of.as<int32_t>()[row], i / k);
    ++counts[static_cast<size_t>(experts[i])];
  }
  EXPECT_EQ(r.offsets.as<int32_t>()[0], 0);
  for (int64_t e = 0; e < r.setup.num_experts; ++e) ASSERT_EQ(r.count(e), counts[static_cast<size_t>(e)]);
}

TEST(Routing, chooses_the_largest_of_score_plus_bias) {
  Queue queue = Queue::cpu(1);
  for (const RoutingSetup& s : setups(40)) {
    SCOPED_TRACE(text(s));
    Routing r(s);
    fill_normal(r.logits, 1, 2.0f);
    fill_normal(r.bias, 2, 0.2f);
    r.route(queue);
    for (int64_t t = 0; t < s.tokens; ++t) {
      const float* scores = r.scores.as<float>() + t * s.num_experts;
      std::vector<int32_t> order(static_cast<size_t>(s.num_experts));
      std::iota(order.begin(), order.end(), 0);
      const float* bias = r.bias.as<float>();
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return scores[a] + bias[a] > scores[b] + bias[b]; });
      float sum = 0.0f;
      for (int64_t j = 0; j < s.top_k; ++j) sum += scores[order[static_cast<size_t>(j)]];
      for (int64_t j = 0; j < s.top_k; ++j) {
        const int32_t e = order[static_cast<size_t>(j)];
        ASSERT_EQ(r.experts.as<int32_t>()[t * s.top_k + j], e);
        ASSERT_EQ(r.gates.as<float>()[t * s.top_k + j], (s.normalise ? scores[e] / sum : scores[e]) * 2.5f);
      }
    }
    expect_sorted_permutation(r);
  }
}

TEST(Routing, scores_are_softmax_or_sigmoid) {
  Queue queue = Queue::cpu(1);
  for (const RoutingSetup& s : setups(40)) {
    SCOPED_TRACE(text(s));
    Routing r(s);
    fill_normal(r.logits, 3, 4.0f);
    r.route(queue);
    for (int64_t t = 0; t < s.tokens; ++t) {
      const float* x = r.logits.as<float>() + t * s.num_experts;
      const double largest = double{*std::max_element(x, x + s.num_experts)};
      double sum = 0;
      for (int64_t e = 0; e < s.num_experts; ++e) sum += std::exp(double{x[e]});
      for (int64_t e = 0; e < s.num_experts; ++e) {
        const double power = std::exp(double{x[e]});
        const double want = s.kind == RouterKind::kSoftmax ? power / sum : power / (1 + power);
        // One rounding of logit - max, one of each addition to the sum, a few of the functions.
        const double roundings = largest - double{x[e]} + static_cast<double>(s.num_experts) + 4;
        ASSERT_NEAR(r.scores.as<float>()[t * s.num_experts + e], want, 0x1p-24 * roundings * want);
      }
    }
  }
}

TEST(Routing, ties_go_to_the_lower_index) {
  Queue queue = Queue::cpu(1);
  Routing r({4, 8, 3});
  prefer(r, 0, {});
  prefer(r, 1, {5});
  prefer(r, 2, {7, 6});
  prefer(r, 3, {2, 0});
  r.logits.as<float>()[3 * 8 + 0] = 8.0f;  // equal to expert 2
  r.route(queue);
  const std::vector<int32_t> want = {0, 1, 2, 5, 0, 1, 7, 6, 0, 0, 2, 1};
  EXPECT_EQ(std::vector<int32_t>(r.experts.as<int32_t>(), r.experts.as<int32_t>() + 12), want);
}

TEST(Routing, experts_with_0_1_31_and_33_tokens) {
  Queue queue = Queue::cpu(2);
  Routing r({65, 4, 1});
  for (int64_t t = 0; t < 65; ++t) prefer(r, t, {t == 7 ? 1 : t % 2 == 0 ? 3 : 2});
  r.route(queue);
  EXPECT_EQ(r.count(0), 0);
  EXPECT_EQ(r.count(1), 1);
  EXPECT_EQ(r.count(2), 31);
  EXPECT_EQ(r.count(3), 33);
  expect_sorted_permutation(r);
}

TEST(Routing, all_tokens_to_any_two_of_eight_experts) {
  Queue queue = Queue::cpu(2);
  for (int64_t a = 0; a < 8; ++a) {
    const int64_t b = (a + 3) % 8;
    Routing r({130, 8, 2});
    for (int64_t t = 0; t < 130; ++t) prefer(r, t, {a, b});
    r.route(queue);
    for (int64_t e = 0; e < 8; ++e) EXPECT_EQ(r.count(e), e == a || e == b ? 130 : 0);
    expect_sorted_permutation(r);
  }
}

TEST(Routing, no_tokens_at_all) {
  Queue queue = Queue::cpu(1);
  Routing r({0, 8, 2});
  r.route(queue);
  for (int64_t e = 0; e <= 8; ++e) EXPECT_EQ(r.offsets.as<int32_t>()[e], 0);
  HostTensor sums(DType::kF64, {2}), load(DType::kI64, {8}), dgates(DType::kF32, {0, 2}),
      dlogits(DType::kF32, {0, 8});
  sums.zero();
  load.zero();
  r.add_stats(queue, sums, load);
  r.backward(queue, dgates, 1.0f, 1.0f, dlogits);
  EXPECT_EQ(sums.as<double>()[0], 0.0);
  EXPECT_EQ(sums.as<double>()[1], 0.0);
}

TEST(Routing, vanished_scores_give_zero_gates) {
  Queue queue = Queue::cpu(1);
  for (const auto kind : {RouterKind::kSoftmax, RouterKind::kSigmoid}) {
    Routing r({1, 4, 2, kind});
    const float logits[4] = {kind == RouterKind::kSoftmax ? 0.0f : -200.0f, -200.0f, -200.0f, -200.0f};
    const float bias[4] = {-5.0f, 0.0f, 0.0f, 0.0f};
    std::copy(logits, logits + 4, r.logits.as<float>());
    std::copy(bias, bias + 4, r.bias.as<float>());
    r.route(queue);
    EXPECT_EQ(r.gates.as<float>()[0], 0.0f);
    EXPECT_EQ(r.gates.as<float>()[1], 0.0f);
    HostTensor dgates(DType::kF32, {1, 2}), dlogits(DType::kF32, {1, 4});
    fill_normal(dgates, 4);
    r.backward(queue, dgates, 0.1f, 0.0f, dlogits);
    for (int e = 0; e < 4; ++e) EXPECT_TRUE(std::isfinite(dlogits.as<float>()[e]));
  }
}

TEST(Routing, non_finite_logits_stay_visible_in_the_gates) {
  Queue queue = Queue::cpu(1);
  for (const RoutingSetup& s : setups(3)) {
    SCOPED_TRACE(text(s));
    Routing r(s);
    fill_normal(r.logits, 5);
    r.logits.as<float>()[s.num_experts + s.num_experts - 1] = kNan;
    r.route(queue);
    expect_sorted_permutation(r);
    bool seen = false;
    for (int64_t j = 0; j < s.top_k; ++j) seen |= std::isnan(r.gates.as<float>()[s.top_k + j]);
    EXPECT_TRUE(seen);
    for (int64_t j = 0; j < s.top_k; ++j) {
      EXPECT_TRUE(std::isfinite(r.gates.as<float>()[j]));
      EXPECT_TRUE(std::isfinite(r.gates.as<float>()[2 * s.top_k + j]));
    }
  }
}

TEST(Routing, the_same_bits_for_any_threads_and_neighbours) {
  Queue one = Queue::cpu(1), three = Queue::cpu(3);
  for (const RoutingSetup& s : setups(300)) {
    SCOPED_TRACE(text(s));
    Routing a(s), b(s);
    for (Routing* r : {&a, &b}) {
      fill_normal(r->logits, 6, 2.0f);
      fill_normal(r->bias, 7, 0.1f);
    }
    a.route(one);
    b.route(three);
    EXPECT_TRUE(a.scores.same_bytes(b.scores) && a.experts.same_bytes(b.experts) &&
                a.gates.same_bytes(b.gates));
    EXPECT_TRUE(a.row_of.same_bytes(b.row_of) && a.token_of.same_bytes(b.token_of));

    RoutingSetup alone = s;
    alone.tokens = 1;
    for (int64_t t = 0; t < s.tokens; t += 37) {
      Routing r(alone);
      std::copy_n(a.logits.as<float>() + t * s.num_experts, s.num_experts, r.logits.as<float>());
      std::copy_n(a.bias.as<float>(), s.num_experts, r.bias.as<float>());
      r.route(one);
      EXPECT_TRUE(matches_bitwise(r.gates.view(), a.gates.view().rows(t, 1)));
      EXPECT_TRUE(matches_bitwise(r.experts.view(), a.experts.view().rows(t, 1)));
      EXPECT_TRUE(matches_bitwise(r.scores.view(), a.scores.view().rows(t, 1)));
    }
  }
}

// Logits whose tokens take the experts in turn, with equal scores everywhere through the bias.
TEST(RouterStats, uniform_routing_gives_aux_of_exactly_one_a_token) {
  Queue queue = Queue::cpu(1);
  for (const auto kind : {RouterKind::kSoftmax, RouterKind::kSigmoid}) {
    for (const int64_t tokens : {int64_t{8}, int64_t{64}, int64_t{1024}}) {
      HostTensor sums(DType::kF64, {2}), load(DType::kI64, {8});
      sums.zero();
      load.zero();
      Routing r({tokens, 8, 2, kind});
      r.logits.zero();
      r.route(queue);
      int32_t* offsets = r.offsets.as<int32_t>();  // as if the choices were spread evenly
      for (int32_t e = 0; e <= 8; ++e) offsets[e] = static_cast<int32_t>(tokens) * 2 / 8 * e;
      r.add_stats(queue, sums, load);
      EXPECT_EQ(sums.as<double>()[1], static_cast<double>(tokens));
      EXPECT_EQ(load.as<int64_t>()[3], tokens / 4);
    }
  }
}

TEST(RouterStats, collapse_onto_one_expert_gives_aux_of_the_number_of_experts) {
  Queue queue = Queue::cpu(1);
  HostTensor sums(DType::kF64, {2}), load(DType::kI64, {8});
  sums.zero();
  load.zero();
  Routing r({100, 8, 1});
  r.logits.zero();
  for (int64_t t = 0; t < 100; ++t) r.logits.as<float>()[t * 8 + 5] = 200.0f;
  r.route(queue);
  r.add_stats(queue, sums, load);
  EXPECT_DOUBLE_EQ(sums.as<double>()[1], 800.0);
  EXPECT_EQ(load.as<int64_t>()[5], 100);
}

TEST(RouterStats, matches_double_and_adds_to_what_is_there) {
  Queue one = Queue::cpu(1), three = Queue::cpu(3);
  for (const RoutingSetup& s : setups(301)) {
    SCOPED_TRACE(text(s));
    Routing r(s);
    fill_normal(r.logits, 8, 2.0f);
    r.route(one);
    HostTensor sums(DType::kF64, {2}), again(DType::kF64, {2}), load(DType::kI64, {s.num_experts});
    for (HostTensor* h : {&sums, &again, &load}) h->zero();
    r.add_stats(one, sums, load);
    r.add_stats(three, again, load);
    EXPECT_TRUE(sums.same_bytes(again));

    double z = 0, aux = 0;
    std::vector<double> mean(static_cast<size_t>(s.num_experts), 0.0);
    for (int64_t t = 0; t < s.tokens; ++t) {
      const float *x = r.logits.as<float>() + t * s.num_experts,
                  *p = r.scores.as<float>() + t * s.num_experts;
      double power = 0, total = 0;
      for (int64_t e = 0; e < s.num_experts; ++e) power += std::exp(double{x[e]}), total += double{p[e]};
      z += std::log(power) * std::log(power);
      for (int64_t e = 0; e < s.num_experts; ++e) {
        mean[static_cast<size_t>(e)] += double{p[e]} / total / static_cast<double>(s.tokens);
      }
    }
    for (int64_t e = 0; e < s.num_experts; ++e) {
      const double f = static_cast<double>(r.count(e)) / static_cast<double>(s.tokens * s.top_k);
      aux += static_cast<double>(s.num_experts * s.tokens) * f * mean[static_cast<size_t>(e)];
      EXPECT_EQ(load.as<int64_t>()[e], 2 * r.count(e));
    }
    EXPECT_NEAR(sums.as<double>()[0], z, 1e-6 * z + 1e-9);
    EXPECT_NEAR(sums.as<double>()[1], aux, 1e-6 * aux);
    EXPECT_EQ(std::accumulate(load.as<int64_t>(), load.as<int64_t>() + s.num_experts, int64_t{0}),
              2 * s.tokens * s.top_k);
  }
}

TEST(UpdateExpertBias, moves_towards_the_mean_load) {
  Queue queue = Queue::cpu(1);
  HostTensor load(DType::kI64, {4}), bias(DType::kF32, {4});
  const int64_t counts[4] = {10, 3, 5, 2};  // mean 5
  const float before[4] = {0.5f, 0.25f, -1.0f, 0.0f};
  std::copy(counts, counts + 4, load.as<int64_t>());
  std::copy(before, before + 4, bias.as<float>());
  run(queue, UpdateExpertBias{load.view(), 0.125f, bias.view()});
  EXPECT_EQ(bias.as<float>()[0], 0.375f);
  EXPECT_EQ(bias.as<float>()[1], 0.375f);
  EXPECT_EQ(bias.as<float>()[2], -1.0f);
  EXPECT_EQ(bias.as<float>()[3], 0.125f);
}

// A mean of 10/3: nobody sits on it.
TEST(UpdateExpertBias, compares_with_a_fractional_mean) {
  Queue queue = Queue::cpu(1);
  HostTensor load(DType::kI64, {3}), bias(DType::kF32, {3});
  const int64_t counts[3] = {3, 4, 3};
  std::copy(counts, counts + 3, load.as<int64_t>());
  bias.zero();
  run(queue, UpdateExpertBias{load.view(), 1.0f, bias.view()});
  EXPECT_EQ(bias.as<float>()[0], 1.0f);
  EXPECT_EQ(bias.as<float>()[1], -1.0f);
  EXPECT_EQ(bias.as<float>()[2], 1.0f);
}

TEST(UpdateExpertBias, balances_a_router_that_prefers_one_expert) {
  Queue queue = Queue::cpu(1);
  Routing r({512, 8, 2, RouterKind::kSigmoid});
  fill_normal(r.logits, 9);
  for (int64_t t = 0; t < 512; ++t) r.logits.as<float>()[t * 8] += 1.5f;
  r.route(queue);
  const int64_t before = r.count(0);
  for (int step = 0; step < 300; ++step) {
    HostTensor sums(DType::kF64, {2}), load(DType::kI64, {8});
    sums.zero();
    load.zero();
    r.route(queue);
    r.add_stats(queue, sums, load);
    run(queue, UpdateExpertBias{load.view(), 0.002f, r.bias.view()});
  }
  r.route(queue);
  EXPECT_GT(before, 250);
  for (int64_t e = 0; e < 8; ++e) EXPECT_NEAR(static_cast<double>(r.count(e)), 128.0, 16.0) << "expert " << e;
}

TEST(Routing, wrong_arguments_are_refused) {
  Queue queue = Queue::cpu(1);
  EXPECT_THROW(Routing({4, 8, 9}).route(queue), InternalError);
  EXPECT_THROW(Routing({4, 8, 0}).route(queue), InternalError);
  Routing r({4, 8, 2});
  r.logits.zero();
  r.offsets = HostTensor(DType::kI32, {8});
  EXPECT_THROW(r.route(queue), InternalError);
}

// Tokens 0 and 1 are given experts, the first the set of its own choice in another order; token 2 chooses.
TEST(Routing, given_experts_take_the_place_of_the_choice_with_the_tokens_own_scores) {
  Queue queue = Queue::cpu(1);
  for (const bool normalise : {true, false}) {
    Routing own({3, 6, 2, RouterKind::kSoftmax, normalise, 2.0f});
    for (int64_t t = 0; t < 3; ++t) prefer(own, t, {4, 1});
    own.route(queue);
    Routing r(own.setup);
    for (int64_t t = 0; t < 3; ++t) prefer(r, t, {4, 1});
    HostTensor replay(DType::kI32, {3, 2}), differs(DType::kI32, {3});
    const std::vector<int32_t> given = {1, 4, 5, 4, -1, -1};
    std::copy(given.begin(), given.end(), replay.as<int32_t>());
    run(queue, Route{r.logits.view(), r.bias.view(), r.setup.kind, 2, normalise, 2.0f, r.scores.view(),
                     r.experts.view(), r.gates.view(), r.offsets.view(), r.row_of.view(), r.token_of.view(),
                     replay.view(), differs.view()});
    expect_sorted_permutation(r);
    const int32_t* experts = r.experts.as<int32_t>();
    EXPECT_EQ(std::vector<int32_t>(experts, experts + 6), (std::vector<int32_t>{1, 4, 5, 4, 4, 1}));
    const int32_t* d = differs.as<int32_t>();
    EXPECT_EQ(std::vector<int32_t>(d, d + 3), (std::vector<int32_t>{0, 1, 0}));
    for (int64_t i = 0; i < 3 * 6; ++i) EXPECT_EQ(r.scores.as<float>()[i], own.scores.as<float>()[i]);
    for (int64_t t = 0; t < 3; ++t) {
      const float* scores = r.scores.as<float>() + t * 6;
      const float a = scores[experts[2 * t]], b = scores[experts[2 * t + 1]];
      EXPECT_EQ(r.gates.as<float>()[2 * t], (normalise ? a / (a + b) : a / 1.0f) * 2.0f);
      EXPECT_EQ(r.gates.as<float>()[2 * t + 1], (normalise ? b / (a + b) : b / 1.0f) * 2.0f);
    }
    for (const int32_t wrong : {6, 4}) {  // no such expert; one twice
      replay.as<int32_t>()[2] = wrong;
      EXPECT_THROW(run(queue, Route{r.logits.view(), r.bias.view(), r.setup.kind, 2, normalise, 2.0f,
                                    r.scores.view(), r.experts.view(), r.gates.view(), r.offsets.view(),
                                    r.row_of.view(), r.token_of.view(), replay.view(), differs.view()}),
                   InternalError);
    }
  }
}

}  // namespace
}  // namespace fp4t::test
