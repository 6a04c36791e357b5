// The optimizer's ops on the GPU against the CPU: bit for bit, stochastic stores included.
#include "kernels/ops/optimizer.h"

#include <cmath>
#include <limits>

#include "kernels/formats/bf16.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr PhiloxKey kKey = {0x12345678u, 0x9ABCDEF0u};
constexpr int64_t kFirst = (int64_t{1} << 32) - 100;  // draws cross into the counter's second word
constexpr int64_t kSizes[] = {0, 1, 3, 4, 31, 257, 70001, 300000};

// Small, and positive where the second moment asks for it.
TensorView magnitudes(Mirror& m, DType type, int64_t n) {
  const TensorView v = m.normal(type, {n}, 0.01f);
  for (int64_t i = 0; i < n; ++i) {
    if (type == DType::kF32) {
      v.as<float>()[i] = std::fabs(v.as<float>()[i]);
    } else {
      v.as<Bf16>()[i].bits &= 0x7FFF;
    }
  }
  return v;
}

AdamWStep adamw(Mirror& m, int64_t n, int mix, const TensorView& apply = {}) {
  const auto type = [&](int bit) { return mix >> bit & 1 ? DType::kBf16 : DType::kF32; };
  return {.grad = m.normal(type(0), {n}),
          .grad_scale = m.f32({0.37f}),
          .master = m.normal(type(1), {n}),
          .m = m.normal(type(2), {n}, 0.1f),
          .v = magnitudes(m, type(3), n),
          .copy = mix & 16 ? TensorView{} : m.fresh(DType::kBf16, {n}),
          .lr = 3e-3f,
          .beta1 = 0.9f,
          .beta2 = 0.95f,
          .eps = 1e-8f,
          .weight_decay = 0.1f,
          .bias1 = 1.7f,
          .bias2 = 2.9f,
          .store_key = kKey,
          .first_element = kFirst,
          .apply = apply};
}

TEST(GpuAdamWStep, equals_the_cpu_for_every_mix_of_types) {
  for (int64_t n : kSizes) {
    for (int mix = 0; mix < 32; ++mix) {
      SCOPED_TRACE("n " + std::to_string(n) + " mix " + std::to_string(mix));
      Mirror m;
      m.check(adamw(m, n, mix));
    }
  }
}

TEST(GpuAdamWStep, follows_the_cpu_through_several_steps_from_zero_moments) {
  Mirror m;
  AdamWStep op = adamw(m, 10007, 2);
  for (const TensorView* v : {&op.m, &op.v}) std::memset(v->data, 0, static_cast<size_t>(v->bytes()));
  for (int64_t i = 0; i < 5000; ++i) op.grad.as<float>()[i] = 0.0f;  // an expert without tokens
  for (int step = 0; step < 5; ++step) m.check(op);
}

// Denormal operands and results, squares and quotients that overflow, a second moment of zero without eps; no
// NaN, whose bits differ between the machines.
TEST(GpuAdamWStep, extreme_magnitudes_are_bitwise) {
  for (float eps : {1e-8f, 0.0f}) {
    Mirror m;
    AdamWStep op = adamw(m, 4096, 0);
    op.eps = eps;
    for (int i = 0; i < 4096; ++i) {
      op.grad.as<float>()[i] = std::ldexp(1.0f + static_cast<float>(i) * 1e-4f, i % 251 - 125);
      op.m.as<float>()[i] = std::ldexp(1.3f, i * 7 % 241 - 140);
      op.v.as<float>()[i] = i % 11 == 0 ? 0.0f : std::ldexp(1.7f, i * 5 % 270 - 145);
      if (i % 3 == 0) op.grad.as<float>()[i] = std::ldexp(1.1f, i * 3 % 149 - 149);
    }
    m.check(op);
  }
}

TEST(GpuAdamWStep, unaligned_shards_equal_the_whole) {
  for (int64_t begin : {1, 2, 6, 8}) {
    Mirror m;
    AdamWStep op = adamw(m, 3001, 15);
    for (TensorView* v : {&op.grad, &op.master, &op.m, &op.v, &op.copy}) *v = v->rows(begin, 2900);
    op.first_element += begin;
    m.check(op);
  }
}

TEST(GpuSumSquaresChunks, sums_chunk_by_chunk_wherever_matrices_end) {
  constexpr int64_t kChunk = SumSquaresChunks::kChunk;
  for (const int64_t matrix : {int64_t{70}, kChunk, kChunk + 12, 2 * kChunk + 3}) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      SCOPED_TRACE(matrix);
      Mirror m;
      const TensorView x = m.normal(dtype, {3 * matrix});
      const SumSquaresChunks all = {x, 0, matrix, {}};
      SumSquaresChunks op = all;
      op.sums = m.fresh(DType::kF64, {all.chunks(), 2});
      m.check(op);
      SumSquaresChunks part = {x.rows(matrix, 2 * matrix), matrix, matrix, {}};
      part.sums = m.fresh(DType::kF64, {part.chunks(), 2});
      m.check(part);
    }
  }
}

TEST(GpuOptimizer, apply_decides_whether_anything_is_written) {
  for (int32_t go : {0, 1}) {
    Mirror m;
    const TensorView apply = m.i32({go});
    m.check(adamw(m, 1000, 15, apply));
    const TensorView update = m.normal(DType::kF32, {1000});
    const TensorView scale = m.f32({0.37f});
    m.check(MuonMomentum{.grad = m.normal(DType::kBf16, {1000}),
                         .grad_scale = scale,
                         .momentum = m.normal(DType::kBf16, {1000}),
                         .beta = 0.95f,
                         .update = update,
                         .store_key = kKey,
                         .apply = apply});
    m.check(ApplyUpdate{.update = update,
                        .master = m.normal(DType::kBf16, {1000}),
                        .copy = m.fresh(DType::kBf16, {1000}),
                        .lr = 2e-3f,
                        .scale = 0.7f,
                        .weight_decay = 0.1f,
                        .store_key = kKey,
                        .apply = apply});
  }
}

TEST(GpuSumSquares, adds_the_sum_and_counts_non_finite_elements) {
  for (int64_t n : {0, 1, 33, 65535, 65536, 65537, 200003, 3000001}) {
    for (DType type : {DType::kF32, DType::kBf16}) {
      for (int64_t begin : {0, 1}) {
        SCOPED_TRACE(std::to_string(n) + " " + dtype_name(type) + " from " + std::to_string(begin));
        Mirror m;
        const TensorView x = m.normal(type, {n + begin}, 1e-3f);
        for (int64_t i = 7; i < n; i += 9973) {
          const float bad = i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -INFINITY;
          if (type == DType::kF32) {
            x.as<float>()[i] = bad;
          } else {
            x.as<Bf16>()[i] = f32_to_bf16(bad);
          }
        }
        const TensorView sum = m.zeros(DType::kF64, {1}), nonfinite = m.zeros(DType::kF64, {1});
        sum.as<double>()[0] = 0.25;
        nonfinite.as<double>()[0] = 5;
        m.compare_by(nonfinite, Bitwise());
        m.check(SumSquares{.x = x.rows(begin, n), .sum = sum, .nonfinite = nonfinite});
      }
    }
  }
}

TEST(GpuSumSquares, squares_beyond_fp32_do_not_overflow) {
  Mirror m;
  const TensorView x = m.f32({-3e38f, -3e38f, 1e-40f}), sum = m.zeros(DType::kF64, {1});
  m.check(SumSquares{.x = x, .sum = sum, .nonfinite = m.zeros(DType::kF64, {1})});
}

TEST(GpuClipFactor, decides_as_the_cpu) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (double sum : {0.0, 0.3, 1.0, 4.0, 1e300, kInf, std::numeric_limits<double>::quiet_NaN()}) {
    for (double bad : {0.0, 2.0}) {
      for (double extra : {0.0, 1.0}) {
        for (double max_norm : {0.0, 1.0, 0.1}) {
          Mirror m;
          const TensorView s = m.zeros(DType::kF64, {1}), b = m.zeros(DType::kF64, {1});
          s.as<double>()[0] = sum;
          b.as<double>()[0] = bad;
          m.check(ClipFactor{.sum = s,
                             .nonfinite = b,
                             .extra_nonfinite = extra,
                             .max_norm = max_norm,
                             .factor = m.fresh(DType::kF32, {1}),
                             .apply = m.i32({7})});
        }
      }
    }
  }
}

TEST(GpuMuon, momentum_and_update_equal_the_cpu) {
  for (int64_t n : kSizes) {
    for (int mix = 0; mix < 4; ++mix) {
      SCOPED_TRACE("n " + std::to_string(n) + " mix " + std::to_string(mix));
      Mirror m;
      const auto type = [&](int bit) { return mix >> bit & 1 ? DType::kBf16 : DType::kF32; };
      const TensorView update = m.fresh(DType::kF32, {n});
      m.check(MuonMomentum{.grad = m.normal(type(0), {n}),
                           .grad_scale = m.f32({0.37f}),
                           .momentum = m.normal(type(1), {n}),
                           .beta = 0.95f,
                           .update = update,
                           .store_key = kKey,
                           .first_element = kFirst});
      m.check(ApplyUpdate{.update = update,
                          .master = m.normal(type(1), {n}),
                          .copy = type(0) == DType::kBf16 ? m.fresh(DType::kBf16, {n}) : TensorView{},
                          .lr = 2e-3f,
                          .scale = 0.7f,
                          .weight_decay = 0.1f,
                          .store_key = kKey,
                          .first_element = kFirst});
    }
  }
}

// More than 2^31 elements: the last ones, and their draws, are those of a shard at the end.
TEST(GpuAdamWStep, the_last_elements_of_a_huge_tensor_are_right) {
  constexpr int64_t kCount = (int64_t{1} << 31) + 77, kLast = 1001;
  Machine machine;
  cuda::describe_device(0, machine);
  if (machine.memory_bytes < int64_t{40} << 30) GTEST_SKIP() << "needs 40 GiB";
  Queue queue = Queue::cuda(0);
  Mirror m;
  AdamWStep expected = adamw(m, kLast, 15), op = expected;
  op.grad_scale.data = queue.allocate(4);
  queue.copy_from_host(op.grad_scale.data, expected.grad_scale.data, 4);
  const auto move = [&](TensorView& v) {
    const TensorView from = v;
    v = {nullptr, from.dtype, {kCount}};
    v.data = queue.allocate(v.bytes());
    queue.fill_bytes(v.data, 0x3C, v.bytes());
    queue.copy_from_host(v.rows(kCount - kLast, kLast).data, from.data, from.bytes());
  };
  for (TensorView* v : {&op.grad, &op.master, &op.m, &op.v, &op.copy}) move(*v);
  run(queue, op);
  expected.first_element += kCount - kLast;
  run(m.cpu(), expected);
  const TensorView AdamWStep::*const fields[] = {&AdamWStep::master, &AdamWStep::m, &AdamWStep::v,
                                                 &AdamWStep::copy};
  for (auto field : fields) {
    HostTensor got(DType::kBf16, {kLast});
    queue.copy_to_host(got.view().data, (op.*field).rows(kCount - kLast, kLast).data, got.view().bytes());
    EXPECT_TRUE(matches_bitwise(expected.*field, got.view()));
  }
  const TensorView sum = {queue.allocate(8), DType::kF64, {1}}, bad = {queue.allocate(8), DType::kF64, {1}};
  for (const TensorView& v : {sum, bad}) queue.fill_bytes(v.data, 0, 8);
  queue.fill_bytes(op.grad.data, 0x3F, op.grad.bytes());  // 0x3F3F
  run(queue, SumSquares{.x = op.grad, .sum = sum, .nonfinite = bad});
  double got = 0;
  queue.copy_to_host(&got, sum.data, sizeof(got));
  const double value = static_cast<double>(bf16_to_f32({0x3F3F}));
  EXPECT_NEAR(got, value * value * static_cast<double>(kCount), 1e-12 * got);
  for (const TensorView& v : {op.grad_scale, op.grad, op.master, op.m, op.v, op.copy, sum, bad}) {
    queue.release(v.data);
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
