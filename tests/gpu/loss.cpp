// Token log-probabilities and their gradients on the GPU against the CPU.
#include "kernels/ops/loss.h"

#include <cmath>
#include <limits>

#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Tokens drawn evenly, every seventh ignored.
std::vector<int32_t> some_targets(int64_t rows, int64_t vocab) {
  std::vector<int32_t> targets;
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t token = (t * 7919 + 13) % vocab;
    targets.push_back(t % 7 == 3 ? -1 : static_cast<int32_t>(token));
  }
  return targets;
}

struct LossMirror {
  LossMirror(int64_t rows, int64_t vocab, float temperature_in, float top_p_in, float scale = 2.0f)
      : temperature(temperature_in),
        top_p(top_p_in),
        logits(m.normal(DType::kF32, {rows, vocab}, scale)),
        targets(m.i32(some_targets(rows, vocab))),
        log_prob(m.fresh(DType::kF32, {rows})),
        lse(m.fresh(DType::kF32, {rows})),
        entropy(m.fresh(DType::kF32, {rows})),
        d_log_prob(m.normal(DType::kF32, {rows})),
        d_lse(m.normal(DType::kF32, {rows})),
        d_entropy(m.normal(DType::kF32, {rows})) {
    for (int64_t t = 5; t < rows; t += 9) {
      for (const TensorView& d : {d_log_prob, d_lse, d_entropy}) d.as<float>()[t] = 0.0f;
    }
  }

  void forward(bool with_entropy) {
    m.check(LogProbForward{.logits = logits,
                           .targets = targets,
                           .temperature = temperature,
                           .top_p = top_p,
                           .log_prob = log_prob,
                           .lse = lse,
                           .entropy = with_entropy ? entropy : TensorView{}});
  }
  void backward(const TensorView& dlogits, bool all_weights) {
    m.check(LogProbBackward{.logits = logits,
                            .targets = targets,
                            .temperature = temperature,
                            .top_p = top_p,
                            .lse = lse,
                            .entropy = entropy,
                            .d_log_prob = d_log_prob,
                            .d_lse = all_weights ? d_lse : TensorView{},
                            .d_entropy = all_weights ? d_entropy : TensorView{},
                            .dlogits = dlogits});
  }

  float temperature, top_p;
  Mirror m;
  TensorView logits, targets, log_prob, lse, entropy, d_log_prob, d_lse, d_entropy;
};

struct Size {
  int64_t rows, vocab;
};
constexpr Size kSizes[] = {{0, 8},    {3, 1},     {37, 61},    {64, 257},   {19, 512},  {21, 4095},
                           {9, 4096}, {11, 8193}, {17, 50257}, {33, 50304}, {5, 151936}};

TEST(GpuLoss, forward_follows_the_cpu) {
  for (const Size& s : kSizes) {
    for (float temperature : {1.0f, 0.7f}) {
      for (float top_p : {1.0f, 0.9f, 0.3f}) {
        SCOPED_TRACE(detail::concat(s.rows, " x ", s.vocab, " at ", temperature, ", top_p ", top_p));
        LossMirror c(s.rows, s.vocab, temperature, top_p);
        c.forward(true);
        c.forward(false);
      }
    }
  }
}

TEST(GpuLoss, backward_follows_the_cpu) {
  for (const Size& s : kSizes) {
    for (float top_p : {1.0f, 0.8f}) {
      for (DType type : {DType::kBf16, DType::kF32}) {
        SCOPED_TRACE(detail::concat(s.rows, " x ", s.vocab, " top_p ", top_p, " ", dtype_name(type)));
        LossMirror c(s.rows, s.vocab, top_p < 1.0f ? 0.7f : 1.0f, top_p);
        c.forward(true);
        c.backward(c.m.fresh(type, {s.rows, s.vocab}), false);
        c.backward(c.m.fresh(type, {s.rows, s.vocab}), true);
      }
    }
  }
}

TEST(GpuLoss, the_gradient_may_take_the_place_of_the_logits) {
  for (const Size& s : {Size{64, 257}, Size{33, 50304}}) {
    for (float top_p : {1.0f, 0.8f}) {
      LossMirror c(s.rows, s.vocab, 0.9f, top_p);
      c.forward(true);
      c.backward(c.logits, true);
    }
  }
}

// Columns of a wider matrix's memory: rows that begin at no vector.
TEST(GpuLoss, addresses_change_no_bits) {
  for (float top_p : {1.0f, 0.9f}) {
    Mirror m;
    const int64_t rows = 16, vocab = 8192;
    const TensorView room = m.normal(DType::kF32, {rows * vocab + 1});
    const TensorView targets = m.i32(some_targets(rows, vocab));
    std::vector<TensorView> results;
    for (int64_t shift : {0, 1}) {
      float* data = room.as<float>();
      if (shift == 1) std::memmove(data + 1, data, static_cast<size_t>(rows * vocab) * sizeof(float));
      for (int k = 0; k < 3; ++k) results.push_back(m.fresh(DType::kF32, {rows}));
      const TensorView* r = results.data() + 3 * shift;
      m.run_on_gpu(LogProbForward{.logits = {data + shift, DType::kF32, {rows, vocab}},
                                  .targets = targets,
                                  .temperature = 1.0f,
                                  .top_p = top_p,
                                  .log_prob = r[0],
                                  .lse = r[1],
                                  .entropy = r[2]});
    }
    for (size_t k = 0; k < 3; ++k) EXPECT_TRUE(matches_bitwise(results[k], results[k + 3]));
  }
}

TEST(GpuLoss, a_row_alone_gives_the_same_bits) {
  for (int64_t vocab : {257, 50304}) {
    for (float top_p : {1.0f, 0.9f}) {
      Mirror m;
      const int64_t rows = 29;
      const TensorView logits = m.normal(DType::kF32, {rows, vocab}, 3.0f);
      const TensorView targets = m.i32(some_targets(rows, vocab));
      const TensorView together = m.fresh(DType::kF32, {3, rows}), alone = m.fresh(DType::kF32, {3, rows});
      const auto score = [&](const TensorView& out, int64_t row, int64_t count) {
        const auto part = [&](int64_t k) { return out.rows(k, 1).reshape({rows}).rows(row, count); };
        m.run_on_gpu(LogProbForward{.logits = logits.rows(row, count),
                                    .targets = targets.rows(row, count),
                                    .temperature = 0.8f,
                                    .top_p = top_p,
                                    .log_prob = part(0),
                                    .lse = part(1),
                                    .entropy = part(2)});
      };
      score(together, 0, rows);
      for (int64_t t = 0; t < rows; ++t) score(alone, t, 1);
      EXPECT_TRUE(matches_bitwise(together, alone));
    }
  }
}

// Many equal logits at the border of the set, and a target outside of it.
TEST(GpuLoss, ties_at_the_border_go_to_the_lower_index) {
  for (int64_t vocab : {20, 257, 9000}) {
    for (float top_p : {0.05f, 0.5f, 0.93f}) {
      SCOPED_TRACE(detail::concat(vocab, " top_p ", top_p));
      LossMirror c(40, vocab, 1.0f, top_p);
      for (int64_t i = 0; i < 40 * vocab; ++i) {
        float& x = c.logits.as<float>()[i];
        x = std::round(x);
      }
      c.forward(true);
      c.backward(c.m.fresh(DType::kF32, {40, vocab}), true);
    }
  }
}

TEST(GpuLoss, huge_and_masked_logits_neither_overflow_nor_vanish) {
  for (float top_p : {1.0f, 0.9f}) {
    for (int64_t vocab : {257, 8192}) {
      LossMirror c(8, vocab, 1.0f, top_p, 3e4f);
      for (int64_t i = 0; i < 8 * vocab; i += 3) c.logits.as<float>()[i] = -kInf;
      for (int64_t t = 0; t < 8; ++t) {
        const int32_t target = c.targets.as<int32_t>()[t];
        if (target >= 0) c.logits.as<float>()[t * vocab + target] = 5.0f;
      }
      c.forward(true);
      c.backward(c.m.fresh(DType::kF32, {8, vocab}), false);
    }
  }
}

TEST(GpuLoss, non_finite_logits_stay_visible) {
  for (float bad : {kNan, kInf}) {
    for (float top_p : {1.0f, 0.9f}) {
      for (int64_t vocab : {257, 8192}) {
        LossMirror c(6, vocab, 1.0f, top_p);
        c.logits.as<float>()[vocab + 100] = bad;
        for (int64_t i = 0; i < vocab; ++i) c.logits.as<float>()[2 * vocab + i] = -kInf;
        c.forward(true);
        EXPECT_TRUE(std::isnan(c.log_prob.as<float>()[1]));
        EXPECT_TRUE(std::isnan(c.lse.as<float>()[2]));
        c.backward(c.m.fresh(DType::kF32, {6, vocab}), false);
      }
    }
  }
}

TEST(GpuLoss, targets_outside_the_vocabulary_are_reported) {
  for (int32_t bad : {-2, 257}) {
    LossMirror c(5, 257, 1.0f, 1.0f);
    c.targets.as<int32_t>()[2] = bad;
    const LogProbForward op{.logits = c.logits,
                            .targets = c.targets,
                            .temperature = 1.0f,
                            .top_p = 1.0f,
                            .log_prob = c.log_prob,
                            .lse = c.lse,
                            .entropy = {}};
    EXPECT_THROW(c.m.run_on_gpu(op), InternalError);
  }
}

TEST(GpuLoss, rows_beyond_two_to_the_31_elements_are_right) {
  const int64_t vocab = 131072, rows = 16385;
  Mirror m;
  const TensorView row = m.normal(DType::kF32, {1, vocab}, 2.0f), target = m.i32({77777});
  const TensorView log_prob = m.fresh(DType::kF32, {1}), lse = m.fresh(DType::kF32, {1});
  const TensorView weight = m.f32({1.0f}), dlogits = m.fresh(DType::kF32, {1, vocab});
  m.check(LogProbForward{row, target, 1.0f, 1.0f, log_prob, lse, {}});
  m.check(LogProbBackward{row, target, 1.0f, 1.0f, lse, {}, weight, {}, {}, dlogits});

  Queue& gpu = m.gpu();
  std::vector<void*> blocks;
  const auto take = [&](DType dtype, const Shape& shape, int fill) {
    const TensorView v{nullptr, dtype, shape};
    blocks.push_back(gpu.allocate(v.bytes()));
    gpu.fill_bytes(blocks.back(), fill, v.bytes());
    return TensorView{blocks.back(), dtype, shape};
  };
  const TensorView logits = take(DType::kF32, {rows, vocab}, 0), targets = take(DType::kI32, {rows}, 0xFF);
  const TensorView p = take(DType::kF32, {rows}, 0), all_lse = take(DType::kF32, {rows}, 0);
  const TensorView weights = take(DType::kF32, {rows}, 0);
  const auto last = [&](const TensorView& v) { return v.rows(rows - 1, 1); };
  gpu.copy_from_host(last(logits).data, row.data, row.bytes());
  gpu.copy_from_host(last(targets).data, target.data, 4);
  gpu.copy_from_host(last(weights).data, weight.data, 4);
  run(gpu, LogProbForward{logits, targets, 1.0f, 1.0f, p, all_lse, {}});
  run(gpu, LogProbBackward{logits, targets, 1.0f, 1.0f, all_lse, {}, weights, {}, {}, logits});
  HostTensor got(DType::kF32, {1, vocab}), got_p(DType::kF32, {1}), first(DType::kF32, {1});
  gpu.copy_to_host(got.view().data, last(logits).data, row.bytes());
  gpu.copy_to_host(got_p.view().data, last(p).data, 4);
  gpu.copy_to_host(first.view().data, all_lse.data, 4);
  EXPECT_TRUE(matches(log_prob, got_p.view(), Nmse(1e-10)));
  EXPECT_TRUE(matches(dlogits, got.view(), Nmse(1e-5)));
  EXPECT_NEAR(first.as<float>()[0], std::log(static_cast<float>(vocab)), 1e-5f);
  for (void* block : blocks) gpu.release(block);
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
