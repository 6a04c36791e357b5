// Products of plain operands against one fma chain an output, bit for bit, and against FP64.
#include "kernels/ops/gemm.h"

#include <cfloat>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/check.h"
#include "kernels/ops/run.h"
#include "tests/support/compare.h"
#include "tests/support/gemm_reference.h"

namespace fp4t::test {
namespace {

const std::vector<int64_t> kSizes = {0, 1, 2, 5, 15, 16, 17, 31, 33, 64, 90, 257};

struct GemmCase {
  DType in, out;
  bool a_transposed, b_transposed, accumulate;
  int64_t m, n, k;
  float sa, sb;
  uint64_t seed;
};

std::string text(const GemmCase& c) {
  return detail::concat("seed ", c.seed, ", M ", c.m, ", N ", c.n, ", K ", c.k, ", in ", dtype_name(c.in),
                        ", out ", dtype_name(c.out), ", transposed ", c.a_transposed, c.b_transposed,
                        ", accumulate ", c.accumulate, ", scales ", c.sa, " ", c.sb);
}

void expect_bits(Queue& queue, const GemmCase& c) {
  SCOPED_TRACE(text(c));
  PlainOperand a(c.in, c.a_transposed, c.m, c.k, c.seed, c.sa);
  PlainOperand b(c.in, c.b_transposed, c.n, c.k, c.seed + 1, c.sb);
  HostTensor got(c.out, {c.m, c.n});
  if (c.accumulate) fill_normal(got, c.seed + 2);
  HostTensor expected = got;
  run(queue, Gemm{a.operand(), b.operand(), got.view(), c.accumulate});
  expect_product(a.dense(), b.dense(), c.sa, c.sb, c.accumulate, expected.view());
  EXPECT_TRUE(matches(expected.view(), got.view(), Bitwise()));
}

TEST(Gemm, equals_one_fma_chain_an_output_bit_for_bit) {
  Queue queue = Queue::cpu(2);
  Draw draw(20240901);
  for (uint64_t i = 0; i < 150; ++i) {
    GemmCase c{};
    c.seed = 1000 + 10 * i;
    c.in = draw.coin() ? DType::kF32 : DType::kBf16;
    c.out = draw.coin() ? DType::kF32 : DType::kBf16;
    c.accumulate = c.out == DType::kF32 && draw.coin();
    c.a_transposed = draw.coin();
    c.b_transposed = draw.coin();
    c.m = draw.one_of(kSizes);
    c.n = draw.one_of(kSizes);
    c.k = draw.one_of(kSizes);
    c.sa = draw.coin() ? kNoScale : 0.37f;
    c.sb = draw.coin() ? kNoScale : 11.3f;
    expect_bits(queue, c);
  }
}

TEST(Gemm, blocks_over_every_dimension_equal_one_chain) {
  Queue queue = Queue::cpu(2);
  const DType f = DType::kF32, b = DType::kBf16;
  expect_bits(queue, {f, f, false, false, false, 5, 1100, 600, kNoScale, kNoScale, 1});
  expect_bits(queue, {b, f, true, true, true, 200, 1030, 33, kNoScale, 0.5f, 2});
  expect_bits(queue, {b, b, false, false, false, 193, 130, 1025, 3.0f, kNoScale, 3});
  expect_bits(queue, {f, f, true, false, false, 97, 47, 513, kNoScale, kNoScale, 4});
}

TEST(Gemm, is_accurate_against_fp64) {
  Queue queue = Queue::cpu(2);
  for (const int64_t k : {64, 2048}) {
    PlainOperand a(DType::kF32, false, 33, k, 5), b(DType::kF32, false, 90, k, 6);
    HostTensor got(DType::kF32, {33, 90}), expected(DType::kF32, {33, 90});
    run(queue, Gemm{a.operand(), b.operand(), got.view(), false});
    expect_product_fp64(a.dense(), b.dense(), expected.view());
    EXPECT_TRUE(matches(expected.view(), got.view(), Nmse(1e-10))) << "K " << k;
  }
}

TEST(Gemm, threads_change_no_bit) {
  PlainOperand a(DType::kBf16, false, 500, 300, 7), b(DType::kBf16, false, 257, 300, 8);
  HostTensor one(DType::kF32, {500, 257});
  Queue single = Queue::cpu(1);
  run(single, Gemm{a.operand(), b.operand(), one.view(), false});
  for (const int threads : {2, 3, 5}) {
    Queue queue = Queue::cpu(threads);
    HostTensor many(DType::kF32, {500, 257});
    run(queue, Gemm{a.operand(), b.operand(), many.view(), false});
    EXPECT_TRUE(matches(one.view(), many.view(), Bitwise())) << threads << " threads";
  }
}

TEST(Gemm, a_row_alone_equals_the_row_in_a_batch) {
  Queue queue = Queue::cpu(2);
  const int64_t rows = 203, cols = 90, depth = 300;
  PlainOperand a(DType::kBf16, false, rows, depth, 9, 0.7f), b(DType::kBf16, false, cols, depth, 10);
  HostTensor batch(DType::kBf16, {rows, cols});
  run(queue, Gemm{a.operand(), b.operand(), batch.view(), false});
  for (const int64_t count : {1, 2, 7, 100}) {
    for (const int64_t row : {int64_t{0}, int64_t{5}, int64_t{96}, rows - count}) {
      Operand part = a.operand();
      part.values = part.values.rows(row, count);
      HostTensor alone(DType::kBf16, {count, cols});
      run(queue, Gemm{part, b.operand(), alone.view(), false});
      EXPECT_TRUE(matches(batch.view().rows(row, count), alone.view(), Bitwise()))
          << count << " rows from " << row;
    }
  }
}

TEST(Gemm, a_product_of_scales_beyond_fp32_is_applied_one_by_one) {
  Queue queue = Queue::cpu(1);
  const std::vector<std::pair<float, float>> pairs = {
      {1e-30f, 1e-30f},       // product 0
      {1e-20f, 3e-20f},       // product subnormal
      {1e30f, 1e30f},         // product infinite, and so is the result
      {FLT_MIN, 1.0f},        // smallest normal product
      {FLT_MIN, 0.5f},        // largest of the subnormal kind here
      {0x1p-100f, 0x1p-49f},  // the smallest subnormal
  };
  for (const auto& [sa, sb] : pairs) {
    expect_bits(queue, {DType::kF32, DType::kF32, false, false, false, 7, 33, 20, sa, sb, 11});
    expect_bits(queue, {DType::kF32, DType::kF32, false, false, false, 7, 33, 20, sb, sa, 11});
  }
  // What that buys: 2^60 * (2^-80 * 2^-80) is 0 by the product, 2^-100 one by one.
  HostTensor x(DType::kF32, {1, 1}), s(DType::kF32, {1}), out(DType::kF32, {1, 1});
  x.as<float>()[0] = 0x1p30f;
  s.as<float>()[0] = 0x1p-80f;
  const Operand o{x.view(), false, {}, s.view()};
  run(queue, Gemm{o, o, out.view(), false});
  EXPECT_EQ(out.as<float>()[0], 0x1p-100f);
}

TEST(Gemm, depth_zero_writes_exact_zeros_or_leaves_the_sum_alone) {
  Queue queue = Queue::cpu(1);
  PlainOperand a(DType::kF32, false, 3, 0, 1, INFINITY), b(DType::kF32, false, 4, 0, 2);
  HostTensor out(DType::kF32, {3, 4}), zero(DType::kF32, {3, 4});
  zero.zero();
  run(queue, Gemm{a.operand(), b.operand(), out.view(), false});
  EXPECT_TRUE(matches(zero.view(), out.view(), Bitwise()));
  out.as<float>()[5] = -0.0f;
  HostTensor before = out;
  run(queue, Gemm{a.operand(), b.operand(), out.view(), true});
  EXPECT_TRUE(matches(before.view(), out.view(), Bitwise()));
}

TEST(Gemm, non_finite_inputs_reach_their_own_outputs_only) {
  Queue queue = Queue::cpu(1);
  PlainOperand a(DType::kF32, false, 13, 40, 3), b(DType::kF32, false, 35, 40, 4);
  HostTensor clean(DType::kF32, {13, 35}), out(DType::kF32, {13, 35});
  run(queue, Gemm{a.operand(), b.operand(), clean.view(), false});
  a.tensor.as<float>()[4 * 40 + 7] = NAN;
  b.tensor.as<float>()[34 * 40 + 7] = INFINITY;
  run(queue, Gemm{a.operand(), b.operand(), out.view(), false});
  for (int64_t m = 0; m < 13; ++m) {
    for (int64_t n = 0; n < 35; ++n) {
      const float x = out.as<float>()[m * 35 + n];
      if (m == 4 || n == 34) {
        EXPECT_FALSE(std::isfinite(x)) << m << " " << n;
      } else {
        EXPECT_EQ(x, clean.as<float>()[m * 35 + n]) << m << " " << n;
      }
    }
  }
}

TEST(Gemm, check_refuses_what_is_no_product) {
  PlainOperand f(DType::kF32, false, 4, 6, 1), g(DType::kBf16, false, 5, 6, 2),
      h(DType::kF32, false, 5, 7, 3);
  PlainOperand ok(DType::kF32, false, 5, 6, 4);
  HostTensor out(DType::kF32, {4, 5}), bf16(DType::kBf16, {4, 5}), wrong(DType::kF32, {5, 4});
  EXPECT_NO_THROW((Gemm{f.operand(), ok.operand(), out.view(), true}.check()));
  EXPECT_THROW((Gemm{f.operand(), g.operand(), out.view(), false}.check()), InternalError);
  EXPECT_THROW((Gemm{f.operand(), h.operand(), out.view(), false}.check()), InternalError);
  EXPECT_THROW((Gemm{f.operand(), ok.operand(), wrong.view(), false}.check()), InternalError);
  EXPECT_THROW((Gemm{f.operand(), ok.operand(), bf16.view(), true}.check()), InternalError);
  EXPECT_THROW((Gemm{f.operand(), Operand{}, out.view(), false}.check()), InternalError);
}

}  // namespace
}  // namespace fp4t::test
