// Log-probabilities on the CPU against double, and what they promise.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/ops/run.h"
#include "tests/support/distribution.h"
#include "tests/support/ops.h"

namespace fp4t::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct LogProbCase {
  LogProbCase(int64_t tokens, int64_t vocab, float temperature_in, float top_p_in, uint64_t seed, float scale)
      : temperature(temperature_in),
        top_p(top_p_in),
        logits(normal_tensor(DType::kF32, {tokens, vocab}, seed, scale)),
        targets(DType::kI32, {tokens}),
        log_prob(DType::kF32, {tokens}),
        lse(DType::kF32, {tokens}),
        entropy(DType::kF32, {tokens}) {
    for (int64_t t = 0; t < tokens; ++t) targets.as<int32_t>()[t] = static_cast<int32_t>((t * 7 + 3) % vocab);
  }
  void forward(Queue& queue) {
    run(queue, LogProbForward{logits.view(), targets.view(), temperature, top_p, log_prob.view(), lse.view(),
                              entropy.view()});
  }
  // Gradient for weights of ones on log_prob.
  HostTensor backward(Queue& queue, DType dtype) {
    HostTensor ones(DType::kF32, {logits.view().dim(0)}), dlogits(dtype, logits.view().shape);
    std::fill_n(ones.as<float>(), ones.elements(), 1.0f);
    run(queue, LogProbBackward{logits.view(),
                               targets.view(),
                               temperature,
                               top_p,
                               lse.view(),
                               {},
                               ones.view(),
                               {},
                               {},
                               dlogits.view()});
    return dlogits;
  }
  float temperature, top_p;
  HostTensor logits, targets, log_prob, lse, entropy;
};

TEST(LogProbForward, matches_double) {
  Queue queue = Queue::cpu(2);
  for (const int64_t vocab : {1, 2, 15, 16, 17, 257, 1000}) {
    for (const float temperature : {1.0f, 0.7f, 2.0f}) {
      for (const float top_p : {1.0f, 0.9f, 0.3f}) {
        SCOPED_TRACE(detail::concat("V=", vocab, " temperature=", temperature, " top_p=", top_p));
        LogProbCase c(50, vocab, temperature, top_p, 80, 3.0f);
        c.forward(queue);
        for (int64_t t = 0; t < 50; ++t) {
          const auto z = tempered(c.logits.as<float>() + t * vocab, vocab, double{temperature});
          const int32_t target = c.targets.as<int32_t>()[t];
          const Distribution d = distribution(z, top_p_set(z, double{top_p}, target));
          const double scale = std::max(1.0, std::fabs(d.lse));
          ASSERT_NEAR(c.lse.as<float>()[t], d.lse, 1e-6 * scale);
          ASSERT_NEAR(c.log_prob.as<float>()[t], d.log_prob(z, target), 2e-6 * scale);
          ASSERT_NEAR(c.entropy.as<float>()[t], d.entropy, 2e-6 * scale);
          ASSERT_LE(c.log_prob.as<float>()[t], 0.0f);
        }
      }
    }
  }
}

TEST(LogProbForward, entropy_is_optional_and_changes_nothing_else) {
  Queue queue = Queue::cpu(1);
  LogProbCase c(20, 257, 0.7f, 0.9f, 81, 2.0f);
  c.forward(queue);
  HostTensor log_prob(DType::kF32, {20}), lse(DType::kF32, {20});
  run(queue, LogProbForward{c.logits.view(), c.targets.view(), 0.7f, 0.9f, log_prob.view(), lse.view(), {}});
  EXPECT_TRUE(log_prob.same_bytes(c.log_prob) && lse.same_bytes(c.lse));
}

TEST(LogProbForward, huge_logits_neither_overflow_nor_vanish) {
  Queue queue = Queue::cpu(1);
  LogProbCase c(2, 4, 1.0f, 1.0f, 82, 1.0f);
  const float logits[8] = {3e4f, 3e4f, -3e4f, 0.0f, -3e4f, -3e4f, -3e4f, -3e4f};
  std::copy(logits, logits + 8, c.logits.as<float>());
  const int32_t targets[2] = {2, 1};
  std::copy(targets, targets + 2, c.targets.as<int32_t>());
  c.forward(queue);
  EXPECT_FLOAT_EQ(c.log_prob.as<float>()[0], -6e4f - std::log(2.0f));
  EXPECT_FLOAT_EQ(c.log_prob.as<float>()[1], -std::log(4.0f));
  EXPECT_FLOAT_EQ(c.entropy.as<float>()[0], std::log(2.0f));
}

// Columns that pad the vocabulary hold -inf: they get no probability and no gradient.
TEST(LogProb, columns_of_minus_infinity_count_as_absent) {
  Queue queue = Queue::cpu(1);
  for (const float top_p : {1.0f, 0.8f}) {
    LogProbCase padded(30, 272, 0.9f, top_p, 83, 2.0f), plain(30, 257, 0.9f, top_p, 83, 2.0f);
    for (int64_t t = 0; t < 30; ++t) {
      float* row = padded.logits.as<float>() + t * 272;
      std::copy_n(plain.logits.as<float>() + t * 257, 257, row);
      std::fill(row + 257, row + 272, -kInf);
      padded.targets.as<int32_t>()[t] = plain.targets.as<int32_t>()[t];
    }
    padded.forward(queue);
    plain.forward(queue);
    EXPECT_TRUE(padded.log_prob.same_bytes(plain.log_prob) && padded.entropy.same_bytes(plain.entropy));
    HostTensor a = padded.backward(queue, DType::kF32), b = plain.backward(queue, DType::kF32);
    for (int64_t t = 0; t < 30; ++t) {
      for (int64_t i = 0; i < 272; ++i) {
        ASSERT_EQ(a.as<float>()[t * 272 + i], i < 257 ? b.as<float>()[t * 257 + i] : 0.0f);
      }
    }
  }
}

TEST(LogProb, ignored_rows_give_zeros_even_all_of_them) {
  Queue queue = Queue::cpu(2);
  for (const bool all : {false, true}) {
    LogProbCase c(20, 257, 1.0f, 1.0f, 84, 2.0f);
    for (int64_t t = 0; t < 20; ++t) {
      if (all || t % 3 == 0) c.targets.as<int32_t>()[t] = -1;
    }
    c.forward(queue);
    HostTensor dlogits = c.backward(queue, DType::kBf16);
    for (int64_t t = 0; t < 20; ++t) {
      const bool ignored = c.targets.as<int32_t>()[t] == -1;
      EXPECT_EQ(c.log_prob.as<float>()[t] == 0.0f, ignored);
      EXPECT_EQ(c.entropy.as<float>()[t] == 0.0f, ignored);
      EXPECT_TRUE(std::isfinite(c.lse.as<float>()[t]));
      bool zero = true;
      for (int64_t i = 0; i < 257; ++i) zero &= element(dlogits.view(), t * 257 + i) == 0.0;
      EXPECT_EQ(zero, ignored);
    }
  }
}

TEST(LogProb, the_top_p_set_at_its_edges) {
  Queue queue = Queue::cpu(1);
  // Four equal tokens, then one far behind: mass 1/4 each. Which tokens may be scored without changing
  // the sum shows the set.
  const float logits[5] = {1.0f, 1.0f, 1.0f, 1.0f, -200.0f};
  struct Edge {
    float top_p;
    int32_t target;
    int expected;  // tokens in the set, the target included
  };
  for (const Edge& edge : {Edge{1e-6f, 0, 1}, Edge{0.25f, 0, 1}, Edge{0.26f, 0, 2}, Edge{0.5f, 1, 2},
                           Edge{0.5f, 2, 3}, Edge{0.25f, 3, 2}, Edge{0.75f, 0, 3}, Edge{0.9999f, 0, 4}}) {
    SCOPED_TRACE(detail::concat("top_p=", edge.top_p, " target=", edge.target));
    LogProbCase c(1, 5, 1.0f, edge.top_p, 85, 1.0f);
    std::copy(logits, logits + 5, c.logits.as<float>());
    c.targets.as<int32_t>()[0] = edge.target;
    c.forward(queue);
    EXPECT_FLOAT_EQ(c.log_prob.as<float>()[0], -std::log(static_cast<float>(edge.expected)));
    EXPECT_FLOAT_EQ(c.entropy.as<float>()[0], std::log(static_cast<float>(edge.expected)));
    // No gradient outside the set.
    HostTensor dlogits = c.backward(queue, DType::kF32);
    EXPECT_EQ(dlogits.as<float>()[4], 0.0f);
    int touched = 0;
    for (int i = 0; i < 4; ++i) touched += dlogits.as<float>()[i] != 0.0f;
    EXPECT_EQ(touched, edge.expected == 1 ? 0 : edge.expected);
  }
}

TEST(LogProb, non_finite_logits_stay_visible) {
  Queue queue = Queue::cpu(1);
  for (const float bad : {kInf, std::numeric_limits<float>::quiet_NaN()}) {
    for (const float top_p : {1.0f, 0.5f}) {
      LogProbCase c(3, 257, 1.0f, top_p, 86, 1.0f);
      c.logits.as<float>()[257 + 100] = bad;
      c.forward(queue);
      EXPECT_TRUE(std::isfinite(c.log_prob.as<float>()[0]) && std::isfinite(c.log_prob.as<float>()[2]));
      EXPECT_TRUE(std::isnan(c.log_prob.as<float>()[1]) && std::isnan(c.lse.as<float>()[1]));
      HostTensor dlogits = c.backward(queue, DType::kF32);
      EXPECT_TRUE(std::isnan(dlogits.as<float>()[257]));
    }
  }
}

TEST(LogProb, the_same_bits_for_any_threads_and_neighbours) {
  for (const float top_p : {1.0f, 0.9f}) {
    LogProbCase c(300, 257, 0.7f, top_p, 87, 3.0f);
    expect_same_with_any_threads([&](Queue& queue) {
      c.forward(queue);
      return std::vector<HostTensor>{c.log_prob, c.lse, c.entropy, c.backward(queue, DType::kBf16)};
    });
    Queue queue = Queue::cpu(1);
    HostTensor dlogits = c.backward(queue, DType::kF32);
    for (int64_t t = 0; t < 300; t += 41) {
      LogProbCase alone(1, 257, 0.7f, top_p, 88, 1.0f);
      std::copy_n(c.logits.as<float>() + t * 257, 257, alone.logits.as<float>());
      alone.targets.as<int32_t>()[0] = c.targets.as<int32_t>()[t];
      alone.forward(queue);
      EXPECT_TRUE(matches_bitwise(c.log_prob.view().rows(t, 1), alone.log_prob.view()));
      EXPECT_TRUE(matches_bitwise(c.entropy.view().rows(t, 1), alone.entropy.view()));
      HostTensor one = alone.backward(queue, DType::kF32);
      EXPECT_TRUE(matches_bitwise(dlogits.view().rows(t, 1), one.view()));
    }
  }
}

TEST(LogProb, the_gradient_may_take_the_place_of_the_logits) {
  Queue queue = Queue::cpu(2);
  for (const float top_p : {1.0f, 0.9f}) {
    LogProbCase c(100, 257, 0.7f, top_p, 89, 3.0f);
    c.forward(queue);
    HostTensor apart = c.backward(queue, DType::kF32), ones(DType::kF32, {100});
    std::fill_n(ones.as<float>(), 100, 1.0f);
    run(queue, LogProbBackward{c.logits.view(),
                               c.targets.view(),
                               0.7f,
                               top_p,
                               c.lse.view(),
                               {},
                               ones.view(),
                               {},
                               {},
                               c.logits.view()});
    EXPECT_TRUE(c.logits.same_bytes(apart));
  }
}

TEST(LogProb, wrong_arguments_are_refused) {
  Queue queue = Queue::cpu(1);
  for (const int32_t target : {-2, 257}) {
    LogProbCase c(3, 257, 1.0f, 1.0f, 90, 1.0f);
    c.targets.as<int32_t>()[1] = target;
    EXPECT_THROW(c.forward(queue), InternalError);
    EXPECT_THROW(c.backward(queue, DType::kF32), InternalError);
  }
  EXPECT_THROW(LogProbCase(3, 257, 0.0f, 1.0f, 90, 1.0f).forward(queue), InternalError);
  EXPECT_THROW(LogProbCase(3, 257, 1.0f, 0.0f, 90, 1.0f).forward(queue), InternalError);
  EXPECT_THROW(LogProbCase(3, 257, 1.0f, 1.01f, 90, 1.0f).forward(queue), InternalError);
}

}  // namespace
}  // namespace fp4t::test
