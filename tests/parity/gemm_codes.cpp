// Products of codes: block scales inside, tensor scales in alpha, padding where both sides have it.
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/check.h"
#include "kernels/ops/run.h"
#include "tests/support/coded_operand.h"
#include "tests/support/compare.h"
#include "tests/support/gemm_reference.h"

namespace fp4t::test {
namespace {

QuantSpec nvfp4(BlockShape block = BlockShape::k1x16, int32_t hadamard = 0) {
  QuantSpec s;
  s.format = Format::kNvfp4;
  s.block = block;
  s.hadamard = hadamard;
  return s;
}

QuantSpec mxfp8() {
  QuantSpec s;
  s.format = Format::kMxfp8;
  return s;
}

QuantSpec row_scaled() {
  QuantSpec s = nvfp4();
  s.scale_scope = ScaleScope::kRow;
  return s;
}

// Codes times codes over the padded depth.
void expect_coded(const QuantSpec& a_spec, const QuantSpec& b_spec, int64_t m, int64_t n, int64_t k,
                  DType out) {
  SCOPED_TRACE(detail::concat(describe(a_spec), " x ", describe(b_spec), ", M ", m, ", N ", n, ", K ", k));
  Queue queue = Queue::cpu(2);
  CodedOperand a(a_spec, GroupAxis::kRows, 1, m, k, 21), b(b_spec, GroupAxis::kRows, 1, n, k, 22);
  HostTensor got(out, {m, n}), expected(out, {m, n});
  run(queue, Gemm{a.operand(), b.operand(), got.view(), false});
  const int64_t depth = a.view().padded_cols;
  const Dense db = b.rows(0, n, depth);
  for (int64_t r = 0; r < m; ++r) {
    const float sa = a.scale(a_spec.scale_scope == ScaleScope::kRow ? r : 0);
    expect_product(a.rows(r, 1, depth), db, sa, b.scale(0), false, expected.view(), r * n);
  }
  EXPECT_TRUE(matches(expected.view(), got.view(), Bitwise()));
}

TEST(GemmCodes, products_of_codes_equal_one_fma_chain_bit_for_bit) {
  for (const DType out : {DType::kF32, DType::kBf16}) {
    for (const int64_t m : {1, 33, 130}) {
      for (const int64_t k : {1, 16, 90, 544}) {
        expect_coded(nvfp4(), nvfp4(), m, 47, k, out);
        expect_coded(nvfp4(), nvfp4(BlockShape::k16x16), m, 47, k, out);
        expect_coded(nvfp4(BlockShape::k16x16), nvfp4(BlockShape::k16x16), m, 16, k, out);
        expect_coded(mxfp8(), mxfp8(), m, 47, k, out);
        expect_coded(row_scaled(), nvfp4(), m, 47, k, out);
      }
    }
  }
}

TEST(GemmCodes, rotated_codes_multiply_their_padding_too) {
  expect_coded(nvfp4(BlockShape::k1x16, 128), nvfp4(BlockShape::k1x16, 128), 5, 17, 130, DType::kF32);
}

TEST(GemmCodes, codes_with_bf16_run_over_the_logical_depth) {
  Queue queue = Queue::cpu(2);
  for (const QuantSpec& spec : {nvfp4(), nvfp4(BlockShape::k16x16), mxfp8()}) {
    for (const bool transposed : {false, true}) {
      SCOPED_TRACE(detail::concat(describe(spec), ", transposed ", transposed));
      const int64_t m = 35, n = 18, k = 77;
      CodedOperand coded(spec, GroupAxis::kRows, 1, m, k, 31);
      PlainOperand plain(DType::kBf16, transposed, n, k, 32, transposed ? 2.5f : kNoScale);
      HostTensor got(DType::kF32, {m, n}), expected(DType::kF32, {m, n});
      run(queue, Gemm{coded.operand(), plain.operand(), got.view(), false});
      expect_product(coded.rows(0, m, k), plain.dense(), coded.scale(0), plain.scale, false, expected.view());
      EXPECT_TRUE(matches(expected.view(), got.view(), Bitwise()));
      HostTensor got_b(DType::kF32, {n, m}), expected_b(DType::kF32, {n, m});
      run(queue, Gemm{plain.operand(), coded.operand(), got_b.view(), false});
      expect_product(plain.dense(), coded.rows(0, m, k), plain.scale, coded.scale(0), false,
                     expected_b.view());
      EXPECT_TRUE(matches(expected_b.view(), got_b.view(), Bitwise()));
    }
  }
}

TEST(GemmCodes, row_scales_that_vanish_in_the_product_are_applied_one_by_one) {
  Queue queue = Queue::cpu(1);
  const int64_t m = 8, n = 20, k = 64;
  CodedOperand a(row_scaled(), GroupAxis::kRows, 1, m, k, 41), b(nvfp4(), GroupAxis::kRows, 1, n, k, 42);
  b.tensor_scales()[0] = 0x1p-80f;
  a.tensor_scales()[3] = 0x1p-60f;  // product subnormal
  a.tensor_scales()[5] = 0x1p-75f;  // product 0
  HostTensor got(DType::kF32, {m, n}), expected(DType::kF32, {m, n});
  run(queue, Gemm{a.operand(), b.operand(), got.view(), false});
  for (int64_t r = 0; r < m; ++r) {
    expect_product(a.rows(r, 1, k), b.rows(0, n, k), a.scale(r), b.scale(0), false, expected.view(), r * n);
  }
  EXPECT_TRUE(matches(expected.view(), got.view(), Bitwise()));
}

TEST(GemmCodes, grouped_rows_find_their_padded_storage) {
  Queue queue = Queue::cpu(2);
  const std::vector<int32_t> offsets = {0, 0, 1, 32, 65};  // 0, 1, 31 and 33 rows
  const int64_t groups = 4, t = 70, n = 23, k = 50;
  for (const QuantSpec& a_spec : {nvfp4(), nvfp4(BlockShape::k16x16), row_scaled(), mxfp8()}) {
    const QuantSpec b_spec = a_spec.format == Format::kMxfp8 ? mxfp8() : nvfp4(BlockShape::k16x16);
    SCOPED_TRACE(detail::concat(describe(a_spec), " x ", describe(b_spec)));
    CodedOperand a(a_spec, GroupAxis::kRows, groups, t, k, 51);
    // Every expert's rows are padded by themselves, as equal groups.
    const int64_t b_outer = outer_padding(b_spec), b_rows = align_up(n, b_outer);
    CodedOperand b(b_spec, GroupAxis::kRows, groups, groups * n, k, 52);
    ASSERT_GE(b.view().padded_rows, groups * b_rows);
    HostTensor got(DType::kF32, {t, n}), expected(DType::kF32, {t, n});
    const TensorView bounds{const_cast<int32_t*>(offsets.data()), DType::kI32, {groups + 1}};
    run(queue, GroupedGemm{a.operand(), b.operand(), bounds, got.view()});
    const int64_t depth = a.view().padded_cols;
    int64_t stored = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = offsets[static_cast<size_t>(g)];
      const int64_t count = offsets[static_cast<size_t>(g + 1)] - begin;
      for (int64_t r = 0; r < count; ++r) {
        const float sa = a.scale(a_spec.scale_scope == ScaleScope::kRow ? begin + r : g);
        expect_product(a.rows(stored + r, 1, depth), b.rows(g * b_rows, n, depth), sa, b.scale(g), false,
                       expected.view(), (begin + r) * n);
      }
      stored += align_up(count, outer_padding(a_spec));
    }
    EXPECT_TRUE(matches(expected.view(), got.view(), Bitwise()));
  }
}

TEST(GemmCodes, grouped_tokens_find_their_padded_storage) {
  Queue queue = Queue::cpu(2);
  const std::vector<int32_t> offsets = {0, 0, 1, 32, 65, 365};
  const int64_t groups = 5, t = 370, m = 20, n = 23;
  for (const QuantSpec& spec : {nvfp4(), nvfp4(BlockShape::k16x16), nvfp4(BlockShape::k1x16, 64), mxfp8()}) {
    for (const bool mixed : {false, true}) {
      if (mixed && spec.hadamard != 0) continue;
      SCOPED_TRACE(detail::concat(describe(spec), mixed ? " x bf16" : ""));
      CodedOperand a(spec, GroupAxis::kCols, groups, m, t, 61), b(spec, GroupAxis::kCols, groups, n, t, 62);
      PlainOperand plain(DType::kBf16, true, n, t, 63);
      HostTensor got(DType::kF32, {groups, m, n});
      fill_normal(got, 64);
      HostTensor expected = got;
      const TensorView bounds{const_cast<int32_t*>(offsets.data()), DType::kI32, {groups + 1}};
      run(queue, GroupedGemmK{a.operand(), mixed ? plain.operand() : b.operand(), bounds, got.view(), true});
      int64_t stored = 0;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = offsets[static_cast<size_t>(g)];
        const int64_t count = offsets[static_cast<size_t>(g + 1)] - begin;
        const int64_t width = align_up(count, contraction_padding(spec));
        if (count > 0) {
          const int64_t depth = mixed ? count : width;
          const Dense db = mixed ? depths_of(plain.dense(), begin, count) : b.group(stored, width, depth);
          expect_product(a.group(stored, width, depth), db, a.scale(g), mixed ? kNoScale : b.scale(g), true,
                         expected.view(), g * m * n);
        }
        stored += width;
      }
      EXPECT_TRUE(matches(expected.view(), got.view(), Bitwise()));
    }
  }
}

TEST(GemmCodes, check_refuses_illegal_pairs) {
  CodedOperand fp4(nvfp4(), GroupAxis::kRows, 1, 4, 32, 1), fp8(mxfp8(), GroupAxis::kRows, 1, 4, 32, 2);
  CodedOperand rotated(nvfp4(BlockShape::k1x16, 32), GroupAxis::kRows, 1, 4, 32, 3);
  CodedOperand rows(row_scaled(), GroupAxis::kRows, 1, 4, 32, 4);
  CodedOperand tokens(nvfp4(), GroupAxis::kCols, 1, 4, 32, 5);
  PlainOperand f32(DType::kF32, false, 4, 32, 6), bf16(DType::kBf16, false, 4, 32, 7);
  HostTensor out(DType::kF32, {4, 4});
  const auto check = [&](const Operand& a, const Operand& b) { Gemm{a, b, out.view(), false}.check(); };
  EXPECT_NO_THROW(check(fp4.operand(), fp4.operand()));
  EXPECT_NO_THROW(check(fp4.operand(), bf16.operand()));
  EXPECT_NO_THROW(check(rows.operand(), fp4.operand()));
  EXPECT_THROW(check(fp4.operand(), fp8.operand()), InternalError);
  EXPECT_THROW(check(fp4.operand(), f32.operand()), InternalError);
  EXPECT_THROW(check(fp4.operand(), rotated.operand()), InternalError);
  EXPECT_THROW(check(rotated.operand(), bf16.operand()), InternalError);
  EXPECT_THROW(check(fp4.operand(), rows.operand()), InternalError);
  EXPECT_THROW(check(tokens.operand(), fp4.operand()), InternalError);
}

}  // namespace
}  // namespace fp4t::test
