// Sampling: frequencies, the set, bits shared with the trainer's log-probabilities.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "kernels/ops/run.h"
#include "tests/support/distribution.h"
#include "tests/support/ops.h"

namespace fp4t::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr PhiloxKey kKey{0x1234567u, 0x89ABCDEu};

struct Draws {
  Draws(int64_t rows, int64_t vocab, float temperature_in, float top_p_in)
      : temperature(temperature_in),
        top_p(top_p_in),
        logits(DType::kF32, {rows, vocab}),
        sample_ids(DType::kI64, {rows}),
        positions(DType::kI32, {rows}),
        tokens(DType::kI32, {rows}),
        log_prob(DType::kF32, {rows}) {
    for (int64_t b = 0; b < rows; ++b) {
      sample_ids.as<int64_t>()[b] = b / 16;
      positions.as<int32_t>()[b] = static_cast<int32_t>(b % 16);
    }
  }
  void repeat(const std::vector<float>& row) {
    for (int64_t i = 0; i < logits.elements(); ++i)
      logits.as<float>()[i] = row[static_cast<size_t>(i) % row.size()];
  }
  void sample(Queue& queue) {
    run(queue, SampleTokens{logits.view(), temperature, top_p, kKey, sample_ids.view(), positions.view(),
                            tokens.view(), log_prob.view()});
  }
  int64_t rows() { return tokens.elements(); }
  int32_t token(int64_t b) { return tokens.as<int32_t>()[b]; }

  float temperature, top_p;
  HostTensor logits, sample_ids, positions, tokens, log_prob;
};

std::vector<float> normal_row(int64_t vocab, uint64_t seed, float scale) {
  HostTensor t = normal_tensor(DType::kF32, {vocab}, seed, scale);
  return {t.as<float>(), t.as<float>() + vocab};
}

TEST(SampleTokens, frequencies_follow_the_distribution) {
  Queue queue = Queue::cpu(2);
  for (const int64_t vocab : {20, 257}) {
    for (const float temperature : {1.0f, 0.6f}) {
      for (const float top_p : {1.0f, 0.8f}) {
        SCOPED_TRACE(detail::concat("V=", vocab, " temperature=", temperature, " top_p=", top_p));
        const std::vector<float> row = normal_row(vocab, 100, 1.0f);
        Draws d(100000, vocab, temperature, top_p);
        d.repeat(row);
        d.sample(queue);
        const auto z = tempered(row.data(), vocab, double{temperature});
        const Distribution want = distribution(z, top_p_set(z, double{top_p}, -1));
        std::vector<double> counts(static_cast<size_t>(vocab), 0.0);
        for (int64_t b = 0; b < d.rows(); ++b) ++counts[static_cast<size_t>(d.token(b))];
        double chi_square = 0, cells = 0;
        for (size_t i = 0; i < counts.size(); ++i) {
          if (!want.inside[i]) {
            EXPECT_EQ(counts[i], 0.0) << "token " << i << " is outside the set";
            continue;
          }
          const double expected = want.p[i] * static_cast<double>(d.rows());
          chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
          ++cells;
        }
        // Mean n - 1, variance 2 (n - 1): four standard deviations to either side.
        EXPECT_NEAR(chi_square, cells - 1, 4 * std::sqrt(2 * (cells - 1)));
      }
    }
  }
}

// The inverse of the cumulative distribution at u, computed in double; draws within 1e-6 of a border are
// left out, for they may fall on either side.
TEST(SampleTokens, inverts_the_cumulative_distribution_in_index_order) {
  Queue queue = Queue::cpu(1);
  for (const float top_p : {1.0f, 0.7f}) {
    Draws d(4000, 257, 0.9f, top_p);
    fill_normal(d.logits, 101, 2.0f);
    d.sample(queue);
    int64_t checked = 0;
    for (int64_t b = 0; b < d.rows(); ++b) {
      const auto z = tempered(d.logits.as<float>() + b * 257, 257, double{0.9f});
      const Distribution want = distribution(z, top_p_set(z, double{top_p}, -1));
      const uint64_t index = (static_cast<uint64_t>(b / 16) << 20) + static_cast<uint64_t>(b % 16);
      const double u = double{uniform24(site_draw(kKey, index).word[0])};
      double before = 0;
      int32_t token = 0;
      while (before + want.p[static_cast<size_t>(token)] <= u) before += want.p[static_cast<size_t>(token++)];
      if (u - before < 1e-6 || before + want.p[static_cast<size_t>(token)] - u < 1e-6) continue;
      ASSERT_EQ(d.token(b), token) << "row " << b << " u " << u;
      ++checked;
    }
    EXPECT_GT(checked, 3900);
  }
}

TEST(SampleTokens, log_prob_is_the_trainers_bit_for_bit) {
  Queue queue = Queue::cpu(3);
  for (const int64_t vocab : {2, 257, 1000}) {
    for (const float temperature : {0.0f, 0.3f, 0.7f, 1.0f, 1.5f}) {
      for (const float top_p : {1.0f, 0.95f, 0.9f, 0.2f}) {
        SCOPED_TRACE(detail::concat("V=", vocab, " temperature=", temperature, " top_p=", top_p));
        Draws d(500, vocab, temperature, top_p);
        fill_normal(d.logits, 102, 3.0f);
        d.sample(queue);
        HostTensor log_prob(DType::kF32, {500}), lse(DType::kF32, {500});
        run(queue, LogProbForward{d.logits.view(),
                                  d.tokens.view(),
                                  temperature == 0.0f ? 1.0f : temperature,
                                  top_p,
                                  log_prob.view(),
                                  lse.view(),
                                  {}});
        EXPECT_TRUE(matches_bitwise(log_prob.view(), d.log_prob.view()));
      }
    }
  }
}

TEST(SampleTokens, greedy_takes_the_largest_and_the_lower_of_equals) {
  Queue queue = Queue::cpu(1);
  Draws d(3, 5, 0.0f, 1.0f);
  const float logits[15] = {0, 2, 1, 2, -1, /**/ -3, -3, -3, -3, -3, /**/ -kInf, -5, -kInf, -5, -4};
  std::copy(logits, logits + 15, d.logits.as<float>());
  d.sample(queue);
  EXPECT_EQ(d.token(0), 1);
  EXPECT_EQ(d.token(1), 0);
  EXPECT_EQ(d.token(2), 4);
}

TEST(SampleTokens, absent_tokens_are_never_drawn) {
  Queue queue = Queue::cpu(2);
  std::vector<float> row = normal_row(64, 103, 1.0f);
  for (size_t i = 0; i < row.size(); i += 2) row[i] = i % 4 == 0 ? -kInf : -150.0f;  // e^-150 is 0 in FP32
  row.back() = -kInf;
  Draws d(50000, 64, 1.0f, 1.0f);
  d.repeat(row);
  d.sample(queue);
  for (int64_t b = 0; b < d.rows(); ++b) ASSERT_TRUE(d.token(b) % 2 == 1 && d.token(b) != 63) << d.token(b);
}

TEST(SampleTokens, a_tiny_top_p_is_greedy) {
  Queue queue = Queue::cpu(1);
  Draws d(300, 257, 1.0f, 1e-6f), greedy(300, 257, 0.0f, 1.0f);
  fill_normal(d.logits, 104);
  fill_normal(greedy.logits, 104);
  d.sample(queue);
  greedy.sample(queue);
  EXPECT_TRUE(d.tokens.same_bytes(greedy.tokens));
  for (int64_t b = 0; b < 300; ++b) EXPECT_EQ(d.log_prob.as<float>()[b], 0.0f);
}

TEST(SampleTokens, one_token_is_always_drawn) {
  Queue queue = Queue::cpu(1);
  Draws d(100, 1, 1.0f, 1.0f);
  fill_normal(d.logits, 105);
  d.sample(queue);
  for (int64_t b = 0; b < 100; ++b) {
    EXPECT_EQ(d.token(b), 0);
    EXPECT_EQ(d.log_prob.as<float>()[b], 0.0f);
  }
}

TEST(SampleTokens, rows_do_not_depend_on_neighbours_batch_or_threads) {
  for (const float top_p : {1.0f, 0.9f}) {
    Draws d(400, 257, 0.8f, top_p);
    fill_normal(d.logits, 106, 2.0f);
    expect_same_with_any_threads([&](Queue& queue) {
      d.sample(queue);
      return std::vector<HostTensor>{d.tokens, d.log_prob};
    });
    Queue queue = Queue::cpu(1);
    for (int64_t b = 0; b < 400; b += 7) {
      Draws alone(1, 257, 0.8f, top_p);
      std::copy_n(d.logits.as<float>() + b * 257, 257, alone.logits.as<float>());
      alone.sample_ids.as<int64_t>()[0] = d.sample_ids.as<int64_t>()[b];
      alone.positions.as<int32_t>()[0] = d.positions.as<int32_t>()[b];
      alone.sample(queue);
      EXPECT_EQ(alone.token(0), d.token(b));
      EXPECT_EQ(alone.log_prob.as<float>()[0], d.log_prob.as<float>()[b]);
    }
  }
}

// The sample's id counts in full.
TEST(SampleTokens, samples_and_positions_draw_apart) {
  Queue queue = Queue::cpu(1);
  Draws d(4096, 257, 1.0f, 1.0f);
  d.logits.zero();
  for (int64_t b = 0; b < 4096; ++b) d.sample_ids.as<int64_t>()[b] = (int64_t{1} << 33) + b / 64;
  for (int64_t b = 0; b < 4096; ++b) d.positions.as<int32_t>()[b] = static_cast<int32_t>(b % 64);
  d.sample(queue);
  // Pairs of rows agree with probability 1 / 257: neighbours in position and in sample.
  int64_t same_position = 0, same_sample = 0;
  for (int64_t b = 0; b + 64 < 4096; ++b) {
    same_sample += d.token(b) == d.token(b + 1);
    same_position += d.token(b) == d.token(b + 64);
  }
  EXPECT_LT(same_sample, 40);
  EXPECT_LT(same_position, 40);
}

// The counter's first two words are the same there.
TEST(SampleTokens, long_samples_do_not_draw_as_the_next_one) {
  constexpr int32_t kStep = 1 << 20;
  const auto draw = [](int64_t sample, int32_t position) { return token_draw(kKey, sample, position); };
  EXPECT_EQ(draw(5, kStep - 1), site_draw(kKey, (5 << 20) + kStep - 1).word[0] >> 8);
  Queue queue = Queue::cpu(1);
  Draws d(4096, 257, 1.0f, 1.0f);
  d.logits.zero();
  for (int64_t b = 0; b < 4096; ++b) {
    d.sample_ids.as<int64_t>()[b] = 5 + b % 2;
    d.positions.as<int32_t>()[b] = static_cast<int32_t>(b / 2) + (b % 2 == 0 ? kStep : 0);
  }
  d.sample(queue);
  int64_t same = 0;
  for (int64_t b = 0; b < 4096; b += 2) same += d.token(b) == d.token(b + 1);
  EXPECT_LT(same, 40);  // of 2048, with probability 1 / 257
  std::set<uint32_t> words;
  for (const int32_t position : {0, kStep, 2 * kStep, 15 * kStep}) {
    for (int64_t sample = 0; sample < 20; ++sample) words.insert(draw(sample, position));
  }
  EXPECT_EQ(words.size(), 80u);
}

TEST(SampleTokens, rows_without_a_distribution_are_refused_by_name) {
  Queue queue = Queue::cpu(1);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInf}) {
    for (const float temperature : {0.0f, 1.0f}) {
      for (const float top_p : {1.0f, 0.5f}) {
        Draws d(40, 257, temperature, top_p);
        fill_normal(d.logits, 107);
        d.logits.as<float>()[37 * 257 + 256] = bad;
        try {
          d.sample(queue);
          ADD_FAILURE() << "not refused";
        } catch (const NonFiniteError& e) {
          EXPECT_NE(std::string(e.what()).find("row 37 (sample 2, position 5)"), std::string::npos)
              << e.what();
        }
      }
    }
  }
  Draws empty(1, 3, 1.0f, 1.0f);
  empty.repeat({-kInf, -kInf, -kInf});
  EXPECT_THROW(empty.sample(queue), NonFiniteError);
}

}  // namespace
}  // namespace fp4t::test
