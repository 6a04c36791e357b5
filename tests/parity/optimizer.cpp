// AdamWStep, SumSquares, SumSquaresChunks, ClipFactor, MuonMomentum, ApplyUpdate: bit for bit against scalar
// FP32, written as the header states it.
#include "kernels/ops/optimizer.h"

#include <limits>

#include "kernels/ops/run.h"
#include "tests/support/ops.h"

namespace fp4t::test {
namespace {

constexpr PhiloxKey kKey = {0x12345678u, 0x9ABCDEF0u};
constexpr int64_t kFirst = (int64_t{1} << 32) - 100;  // draws cross into the counter's second word

// What storing x in this dtype leaves; `word` of draw `index` rounds BF16.
float stored(float x, DType dtype, int64_t index, int word) {
  if (dtype == DType::kF32) return x;
  const uint32_t r = site_draw(kKey, static_cast<uint64_t>(index)).word[word] >> 16;
  const uint32_t u = bits_of(x), low = u & 0xFFFFu;
  return float_of((u & 0xFFFF0000u) + (low + r >= 65536u ? 0x10000u : 0u));
}

void fill_uniform(HostTensor& t, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::uniform_real_distribution<float> uniform(0.0f, 0.01f);
  for (int64_t i = 0; i < t.elements(); ++i) {
    if (t.view().dtype == DType::kF32) {
      t.as<float>()[i] = uniform(engine);
    } else {
      t.as<Bf16>()[i] = f32_to_bf16(uniform(engine));
    }
  }
}

HostTensor scalar(float x) {
  HostTensor t(DType::kF32, {1});
  t.as<float>()[0] = x;
  return t;
}

float at(HostTensor& t, int64_t i) { return static_cast<float>(element(t.view(), i)); }

const int64_t kSizes[] = {0, 1, 31, 256, 257, 70001};

struct AdamCase {
  AdamCase(int64_t n, DType grad_type, DType master_type, DType m_type, DType v_type)
      : grad(normal_tensor(grad_type, {n}, 101)),
        grad_scale(scalar(0.37f)),
        master(normal_tensor(master_type, {n}, 102)),
        m(normal_tensor(m_type, {n}, 103, 0.1f)),
        v(v_type, {n}),
        copy(DType::kBf16, {n}) {
    fill_uniform(v, 104);
  }
  AdamWStep op() {
    return {.grad = grad.view(),
            .grad_scale = grad_scale.view(),
            .master = master.view(),
            .m = m.view(),
            .v = v.view(),
            .copy = copy.view(),
            .lr = 3e-3f,
            .beta1 = 0.9f,
            .beta2 = 0.95f,
            .eps = 1e-8f,
            .weight_decay = 0.1f,
            .bias1 = 1.7f,
            .bias2 = 2.9f,
            .store_key = kKey,
            .first_element = kFirst};
  }
  HostTensor grad, grad_scale, master, m, v, copy;
};

void expect_adamw_step(AdamCase c) {
  AdamCase before = c;
  Queue queue = Queue::cpu(2);
  const AdamWStep op = c.op();
  run(queue, op);
  for (int64_t i = 0; i < op.master.elements(); ++i) {
    const float g = at(before.grad, i) * 0.37f;
    const float m = op.beta1 * at(before.m, i) + (1.0f - op.beta1) * g;
    const float v = op.beta2 * at(before.v, i) + (1.0f - op.beta2) * (g * g);
    const float w = at(before.master, i);
    const float moved = w - op.lr * (m * op.bias1 / (std::sqrt(v * op.bias2) + op.eps) + op.weight_decay * w);
    const float master = stored(moved, op.master.dtype, kFirst + i, 0);
    ASSERT_EQ(master, at(c.master, i)) << i;
    ASSERT_EQ(stored(m, op.m.dtype, kFirst + i, 1), at(c.m, i)) << i;
    ASSERT_EQ(stored(v, op.v.dtype, kFirst + i, 2), at(c.v, i)) << i;
    ASSERT_EQ(f32_to_bf16(master).bits, c.copy.as<Bf16>()[i].bits) << i;
  }
}

TEST(AdamWStep, follows_the_header_operation_by_operation) {
  for (int64_t n : kSizes) {
    for (int mix = 0; mix < 16; ++mix) {
      SCOPED_TRACE("n " + std::to_string(n) + " mix " + std::to_string(mix));
      const auto type = [&](int bit) { return mix >> bit & 1 ? DType::kBf16 : DType::kF32; };
      if (n > 1000 && mix % 5 != 0) continue;
      expect_adamw_step(AdamCase(n, type(0), type(1), type(2), type(3)));
    }
  }
}

TEST(AdamWStep, a_shard_draws_what_the_whole_tensor_draws) {
  Queue queue = Queue::cpu(2);
  AdamCase whole(1000, DType::kBf16, DType::kBf16, DType::kBf16, DType::kBf16), parts = whole;
  run(queue, whole.op());
  for (int64_t begin : {0, 300}) {
    const int64_t count = begin ? 700 : 300;
    AdamWStep op = parts.op();
    for (TensorView* view : {&op.grad, &op.master, &op.m, &op.v, &op.copy}) *view = view->rows(begin, count);
    op.first_element += begin;
    run(queue, op);
  }
  EXPECT_TRUE(whole.master.same_bytes(parts.master));
  EXPECT_TRUE(whole.m.same_bytes(parts.m));
  EXPECT_TRUE(whole.v.same_bytes(parts.v));
  EXPECT_TRUE(whole.copy.same_bytes(parts.copy));
}

// With zero gradients m decays by 0.9: a mean over many elements must decay as FP32 would, which
// rounding to nearest does not give.
TEST(AdamWStep, stochastic_stores_are_unbiased) {
  Queue queue = Queue::cpu(2);
  constexpr int64_t kCount = 40000;
  AdamCase c(kCount, DType::kF32, DType::kF32, DType::kBf16, DType::kF32);
  c.grad.zero();
  for (int64_t i = 0; i < kCount; ++i) c.m.as<Bf16>()[i] = f32_to_bf16(1.0f);
  double mean = 0;
  run(queue, c.op());
  for (int64_t i = 0; i < kCount; ++i) mean += at(c.m, i) / static_cast<double>(kCount);
  // Neighbours of 0.9 in BF16 are 2^-8 apart: the deviation of the mean is at most 2^-9 / 200.
  EXPECT_NEAR(mean, 0.9, 4 * 0x1p-9 / 200);
}

TEST(AdamWStep, non_finite_values_are_kept_by_bf16_stores) {
  Queue queue = Queue::cpu(1);
  AdamCase c(3, DType::kF32, DType::kBf16, DType::kBf16, DType::kBf16);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (int i = 0; i < 3; ++i) c.grad.as<float>()[i] = i == 0 ? NAN : i == 1 ? kInf : -kInf;
  run(queue, c.op());
  EXPECT_TRUE(std::isnan(at(c.m, 0)) && std::isnan(at(c.v, 0)) && std::isnan(at(c.master, 0)));
  EXPECT_EQ(at(c.m, 1), kInf);
  EXPECT_EQ(at(c.m, 2), -kInf);
  EXPECT_EQ(at(c.v, 2), kInf);
}

TEST(SumSquares, adds_the_sum_and_counts_non_finite_elements) {
  for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{33}, int64_t{65536}, int64_t{200003}}) {
    for (DType dtype : {DType::kF32, DType::kBf16}) {
      SCOPED_TRACE(n);
      Queue queue = Queue::cpu(2);
      HostTensor x = normal_tensor(dtype, {n}, 105, 1e-3f), sum(DType::kF64, {1}), bad(DType::kF64, {1});
      HostTensor clean = x;
      if (n > 1000) {
        for (int64_t i : {int64_t{7}, n / 2, n - 1}) {
          if (dtype == DType::kF32) {
            x.as<float>()[i] = i == 7 ? NAN : i == n - 1 ? INFINITY : -INFINITY;
          } else {
            x.as<Bf16>()[i] = f32_to_bf16(i == 7 ? NAN : i == n - 1 ? INFINITY : -INFINITY);
          }
        }
      }
      long double expected = 0;
      for (int64_t i = 0; i < n; ++i) {
        const double value = element(x.view(), i);
        if (std::isfinite(value)) expected += static_cast<long double>(value) * value;
      }
      sum.as<double>()[0] = 0.25;
      bad.as<double>()[0] = 5;
      run(queue, SumSquares{.x = x.view(), .sum = sum.view(), .nonfinite = bad.view()});
      // The op's class, Nmse(1e-24).
      const auto exact = static_cast<double>(0.25L + expected);
      EXPECT_NEAR(sum.as<double>()[0], exact, 1e-12 * exact);
      EXPECT_EQ(bad.as<double>()[0], n > 1000 ? 8 : 5);
    }
  }
}

TEST(SumSquares, squares_beyond_fp32_do_not_overflow) {
  Queue queue = Queue::cpu(1);
  HostTensor x(DType::kF32, {2}), sum = zeros(DType::kF64, {1}), bad = zeros(DType::kF64, {1});
  x.as<float>()[0] = x.as<float>()[1] = -3e38f;
  run(queue, SumSquares{.x = x.view(), .sum = sum.view(), .nonfinite = bad.view()});
  EXPECT_DOUBLE_EQ(sum.as<double>()[0], 2.0 * std::pow(static_cast<double>(-3e38f), 2));
  EXPECT_EQ(bad.as<double>()[0], 0);
}

// Ranks add up the chunks of one another, so a chunk's bits may not depend on where a piece begins.
TEST(SumSquaresChunks, are_the_sums_of_each_chunk_of_the_logical_tensor) {
  constexpr int64_t kChunk = SumSquaresChunks::kChunk;
  const int64_t matrix = 2 * kChunk + 130, n = 3 * matrix;
  for (DType dtype : {DType::kF32, DType::kBf16}) {
    Queue queue = Queue::cpu(2);
    HostTensor x = normal_tensor(dtype, {n}, 105, 1e-3f);
    if (dtype == DType::kF32) x.as<float>()[matrix + 3] = NAN;
    HostTensor whole(DType::kF64, {9, 2});
    run(queue, SumSquaresChunks{.x = x.view(), .first = 0, .matrix = matrix, .sums = whole.view()});
    int64_t c = 0;
    for (int64_t begin = 0; begin < n; begin += matrix) {
      for (int64_t at = begin; at < begin + matrix; at += kChunk, ++c) {
        const int64_t count = std::min(kChunk, begin + matrix - at);
        HostTensor sum = zeros(DType::kF64, {1}), bad = zeros(DType::kF64, {1});
        run(queue, SumSquares{x.view().rows(at, count), sum.view(), bad.view()});
        EXPECT_EQ(whole.as<double>()[2 * c], sum.as<double>()[0]) << c;
        EXPECT_EQ(whole.as<double>()[2 * c + 1], bad.as<double>()[0]) << c;
      }
    }
    EXPECT_EQ(whole.as<double>()[7], dtype == DType::kF32 ? 1 : 0);
    // A piece that begins in the second matrix and ends in the third.
    const int64_t first = matrix + kChunk, count = matrix;
    HostTensor part(DType::kF64, {3, 2});
    run(queue, SumSquaresChunks{x.view().rows(first, count), first, matrix, part.view()});
    for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(part.as<double>()[i], whole.as<double>()[8 + i]) << i;
  }
}

TEST(ClipFactor, clips_at_the_norm_and_refuses_what_is_not_finite) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const struct {
    double sum, nonfinite, extra, max_norm;
    float factor;
    int32_t apply;
  } cases[] = {
      {4.0, 0, 0, 1.0, 0.5f, 1},    {4.0, 0, 0, 3.0, 1.0f, 1},  {9.0, 0, 0, 3.0, 1.0f, 1},
      {4.0, 0, 0, 0.0, 1.0f, 1},    {0.0, 0, 0, 1.0, 1.0f, 1},  {4.0, 1, 0, 1.0, 1.0f, 0},
      {4.0, 0, 2, 1.0, 1.0f, 0},    {kInf, 0, 0, 1.0, 1.0f, 0}, {std::nan(""), 0, 0, 1.0, 1.0f, 0},
      {1e18, 0, 0, 0.3, 3e-10f, 1},
  };
  Queue queue = Queue::cpu(1);
  for (const auto& c : cases) {
    SCOPED_TRACE(c.sum);
    HostTensor sum(DType::kF64, {1}), bad(DType::kF64, {1}), factor(DType::kF32, {1}),
        apply(DType::kI32, {1});
    sum.as<double>()[0] = c.sum;
    bad.as<double>()[0] = c.nonfinite;
    run(queue, ClipFactor{.sum = sum.view(),
                          .nonfinite = bad.view(),
                          .extra_nonfinite = c.extra,
                          .max_norm = c.max_norm,
                          .factor = factor.view(),
                          .apply = apply.view()});
    EXPECT_EQ(factor.as<float>()[0], c.factor);
    EXPECT_EQ(apply.as<int32_t>()[0], c.apply);
  }
}

TEST(Optimizer, nothing_is_written_where_apply_is_0) {
  Queue queue = Queue::cpu(2);
  AdamCase c(1000, DType::kBf16, DType::kBf16, DType::kBf16, DType::kF32), before = c, plain = c;
  HostTensor apply = i32_tensor({0}), update(DType::kF32, {1000}), no_update = update;
  const auto run_all = [&](AdamCase& on, const TensorView& flag) {
    AdamWStep step = on.op();
    step.apply = flag;
    run(queue, step);
    MuonMomentum momentum{.grad = on.grad.view(),
                          .grad_scale = on.grad_scale.view(),
                          .momentum = on.m.view(),
                          .beta = 0.95f,
                          .update = update.view(),
                          .store_key = kKey};
    momentum.apply = flag;
    run(queue, momentum);
    ApplyUpdate apply_update{.update = update.view(),
                             .master = on.master.view(),
                             .copy = on.copy.view(),
                             .lr = 2e-3f,
                             .scale = 0.7f,
                             .weight_decay = 0.1f,
                             .store_key = kKey};
    apply_update.apply = flag;
    run(queue, apply_update);
  };
  const auto expect_same = [](AdamCase& a, AdamCase& b) {
    EXPECT_TRUE(a.master.same_bytes(b.master) && a.m.same_bytes(b.m) && a.v.same_bytes(b.v) &&
                a.copy.same_bytes(b.copy));
  };
  run_all(c, apply.view());
  expect_same(before, c);
  EXPECT_TRUE(update.same_bytes(no_update));
  apply.as<int32_t>()[0] = 1;
  run_all(c, apply.view());
  run_all(plain, {});
  expect_same(plain, c);
  EXPECT_FALSE(c.master.same_bytes(before.master));
}

TEST(MuonMomentum, follows_the_header_operation_by_operation) {
  for (int64_t n : kSizes) {
    for (DType grad_type : {DType::kF32, DType::kBf16}) {
      for (DType dtype : {DType::kF32, DType::kBf16}) {
        Queue queue = Queue::cpu(2);
        HostTensor grad = normal_tensor(grad_type, {n}, 106), scale = scalar(0.37f);
        HostTensor momentum = normal_tensor(dtype, {n}, 107), before = momentum, update(DType::kF32, {n});
        run(queue, MuonMomentum{.grad = grad.view(),
                                .grad_scale = scale.view(),
                                .momentum = momentum.view(),
                                .beta = 0.95f,
                                .update = update.view(),
                                .store_key = kKey,
                                .first_element = kFirst});
        for (int64_t i = 0; i < n; ++i) {
          const float g = at(grad, i) * 0.37f, moved = 0.95f * at(before, i) + g;
          ASSERT_EQ(stored(moved, dtype, kFirst + i, 1), at(momentum, i)) << i;
          ASSERT_EQ(g + 0.95f * moved, update.as<float>()[i]) << i;
        }
      }
    }
  }
}

TEST(ApplyUpdate, follows_the_header_operation_by_operation) {
  for (int64_t n : kSizes) {
    for (DType dtype : {DType::kF32, DType::kBf16}) {
      for (bool with_copy : {false, true}) {
        Queue queue = Queue::cpu(2);
        HostTensor update = normal_tensor(DType::kF32, {n}, 108), copy(DType::kBf16, {n});
        HostTensor master = normal_tensor(dtype, {n}, 109), before = master;
        run(queue, ApplyUpdate{.update = update.view(),
                               .master = master.view(),
                               .copy = with_copy ? copy.view() : TensorView{},
                               .lr = 2e-3f,
                               .scale = 0.7f,
                               .weight_decay = 0.1f,
                               .store_key = kKey,
                               .first_element = kFirst});
        for (int64_t i = 0; i < n; ++i) {
          const float w = at(before, i);
          const float moved = w - 2e-3f * (0.7f * update.as<float>()[i] + 0.1f * w);
          const float expected = stored(moved, dtype, kFirst + i, 0);
          ASSERT_EQ(expected, at(master, i)) << i;
          if (with_copy) {
            ASSERT_EQ(f32_to_bf16(expected).bits, copy.as<Bf16>()[i].bits) << i;
          }
        }
      }
    }
  }
}

TEST(Optimizer, threads_change_no_bit) {
  expect_same_with_any_threads([](Queue& queue) {
    AdamCase c(70001, DType::kBf16, DType::kBf16, DType::kBf16, DType::kBf16);
    run(queue, c.op());
    HostTensor sum = zeros(DType::kF64, {1}), bad = zeros(DType::kF64, {1});
    run(queue, SumSquares{.x = c.grad.view(), .sum = sum.view(), .nonfinite = bad.view()});
    return std::vector<HostTensor>{c.master, c.m, c.v, c.copy, sum, bad};
  });
}

TEST(Optimizer, wrong_arguments_are_refused) {
  Queue queue = Queue::cpu(1);
  AdamCase c(8, DType::kF32, DType::kF32, DType::kF32, DType::kF32);
  AdamWStep op = c.op();
  op.v = op.m;
  EXPECT_THROW(run(queue, op), InternalError);
  op = c.op();
  op.grad = op.grad.rows(0, 7);
  EXPECT_THROW(run(queue, op), InternalError);
  op = c.op();
  op.beta2 = 1.0f;
  EXPECT_THROW(run(queue, op), InternalError);
}

}  // namespace
}  // namespace fp4t::test
