// Grouped products of plain operands: every group is the product of its own rows or tokens, bit for bit.
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/check.h"
#include "kernels/ops/run.h"
#include "tests/support/compare.h"
#include "tests/support/gemm_reference.h"

namespace fp4t::test {
namespace {

// Experts with 0, 1, 31 and 33 rows, one that needs several blocks, and an empty one at the end.
const std::vector<int32_t> kOffsets = {0, 0, 1, 32, 65, 270, 270};
constexpr int64_t kGroups = 6;
constexpr int64_t kCapacity = 280;

TensorView bounds(const std::vector<int32_t>& offsets) {
  return {const_cast<int32_t*>(offsets.data()), DType::kI32, {static_cast<int64_t>(offsets.size())}};
}

int64_t begin_of(int64_t g) { return kOffsets[static_cast<size_t>(g)]; }
int64_t count_of(int64_t g) { return kOffsets[static_cast<size_t>(g + 1)] - begin_of(g); }

// Group g of stacked values [G, N, K] or [G, K, N] as a matrix [N, K].
Dense stacked(const TensorView& v, int64_t g, bool transposed) {
  const TensorView one = v.rows(g, 1).reshape({v.dim(1), v.dim(2)});
  return dense_of(one, transposed);
}

void expect_grouped(DType in, DType out, bool transposed, bool scales, int threads) {
  SCOPED_TRACE(detail::concat(dtype_name(in), " to ", dtype_name(out), ", transposed ", transposed,
                              ", scales ", scales, ", threads ", threads));
  const int64_t n = 47, k = 90;
  Queue queue = Queue::cpu(threads);
  PlainOperand a(in, false, kCapacity, k, 71, scales ? 0.3f : kNoScale);
  for (int64_t i = begin_of(kGroups) * k; i < kCapacity * k; ++i) put(a.tensor.view(), i, NAN);
  HostTensor b(in, transposed ? Shape{kGroups, k, n} : Shape{kGroups, n, k}), b_scale(DType::kF32, {kGroups});
  fill_normal(b, 72);
  fill_normal(b_scale, 73);
  HostTensor got(out, {kCapacity, n}), expected(out, {kCapacity, n});
  const Operand ob{b.view(), transposed, {}, scales ? b_scale.view() : TensorView{}};
  run(queue, GroupedGemm{a.operand(), ob, bounds(kOffsets), got.view()});
  const Dense da = a.dense();
  for (int64_t g = 0; g < kGroups; ++g) {
    expect_product(rows_of(da, begin_of(g), count_of(g)), stacked(b.view(), g, transposed), a.scale,
                   scales ? b_scale.as<float>()[g] : kNoScale, false, expected.view(), begin_of(g) * n);
  }
  // Rows beyond the last group keep the NaN pattern that fresh tensors hold.
  EXPECT_TRUE(matches(expected.view(), got.view(), Bitwise()));
}

TEST(GroupedGemm, every_group_is_its_own_product_and_other_rows_are_left_alone) {
  expect_grouped(DType::kF32, DType::kF32, false, false, 1);
  for (const bool transposed : {false, true}) {
    for (const bool scales : {false, true}) {
      expect_grouped(DType::kBf16, DType::kBf16, transposed, scales, 2);
      expect_grouped(DType::kBf16, DType::kF32, transposed, scales, 3);
    }
  }
}

TEST(GroupedGemm, a_group_alone_equals_the_group_among_others) {
  const int64_t n = 33, k = 64;
  Queue queue = Queue::cpu(2);
  PlainOperand a(DType::kBf16, false, kCapacity, k, 74);
  HostTensor b(DType::kBf16, {kGroups, n, k}), all(DType::kBf16, {kCapacity, n});
  fill_normal(b, 75);
  run(queue, GroupedGemm{a.operand(), {b.view(), false, {}, {}}, bounds(kOffsets), all.view()});
  for (int64_t g = 0; g < kGroups; ++g) {
    Operand part = a.operand();
    part.values = part.values.rows(begin_of(g), count_of(g));
    const Operand weights{b.view().rows(g, 1).reshape({n, k}), false, {}, {}};
    HostTensor alone(DType::kBf16, {count_of(g), n});
    run(queue, Gemm{part, weights, alone.view(), false});
    EXPECT_TRUE(matches(all.view().rows(begin_of(g), count_of(g)), alone.view(), Bitwise())) << "group " << g;
  }
}

void expect_grouped_k(DType in, DType out, bool accumulate, bool scales, int threads) {
  SCOPED_TRACE(detail::concat(dtype_name(in), " to ", dtype_name(out), ", accumulate ", accumulate,
                              ", scales ", scales, ", threads ", threads));
  const int64_t m = 33, n = 47;
  Queue queue = Queue::cpu(threads);
  PlainOperand a(in, true, m, kCapacity, 81), b(in, true, n, kCapacity, 82, scales ? 0.3f : kNoScale);
  for (int64_t i = begin_of(kGroups) * m; i < kCapacity * m; ++i) put(a.tensor.view(), i, NAN);
  HostTensor a_scale(DType::kF32, {kGroups}), got(out, {kGroups, m, n});
  fill_normal(a_scale, 83);
  a_scale.as<float>()[0] = NAN;  // of an empty group: never used
  if (accumulate) {
    fill_normal(got, 84);
    put(got.view(), 3, -0.0f);
  }
  HostTensor expected = got;
  Operand oa = a.operand();
  if (scales) oa.scale = a_scale.view();
  run(queue, GroupedGemmK{oa, b.operand(), bounds(kOffsets), got.view(), accumulate});
  const Dense da = a.dense(), db = b.dense();
  for (int64_t g = 0; g < kGroups; ++g) {
    if (count_of(g) == 0) {
      for (int64_t i = 0; i < m * n && !accumulate; ++i) put(expected.view(), g * m * n + i, 0.0f);
      continue;
    }
    expect_product(depths_of(da, begin_of(g), count_of(g)), depths_of(db, begin_of(g), count_of(g)),
                   scales ? a_scale.as<float>()[g] : kNoScale, b.scale, accumulate, expected.view(),
                   g * m * n);
  }
  EXPECT_TRUE(matches(expected.view(), got.view(), Bitwise()));
}

TEST(GroupedGemmK, every_group_sums_its_own_tokens_and_empty_groups_give_zero) {
  for (const bool scales : {false, true}) {
    expect_grouped_k(DType::kF32, DType::kF32, false, scales, 1);
    expect_grouped_k(DType::kBf16, DType::kF32, true, scales, 2);
    expect_grouped_k(DType::kBf16, DType::kBf16, false, scales, 3);
  }
}

TEST(GroupedGemm, check_refuses_mismatched_groups_and_the_body_bad_offsets) {
  Queue queue = Queue::cpu(1);
  PlainOperand a(DType::kF32, false, 10, 6, 1), t(DType::kF32, true, 6, 10, 2);
  HostTensor b(DType::kF32, {2, 5, 6}), out(DType::kF32, {10, 5});
  fill_normal(b, 3);
  const Operand ob{b.view(), false, {}, {}};
  const std::vector<int32_t> good = {0, 3, 10}, three = {0, 1, 2, 3}, falling = {0, 5, 3},
                             beyond = {0, 5, 11};
  EXPECT_NO_THROW((GroupedGemm{a.operand(), ob, bounds(good), out.view()}.check()));
  EXPECT_THROW((GroupedGemm{a.operand(), ob, bounds(three), out.view()}.check()), InternalError);
  EXPECT_THROW((GroupedGemm{t.operand(), ob, bounds(good), out.view()}.check()), InternalError);
  EXPECT_THROW(run(queue, GroupedGemm{a.operand(), ob, bounds(falling), out.view()}), InternalError);
  EXPECT_THROW(run(queue, GroupedGemm{a.operand(), ob, bounds(beyond), out.view()}), InternalError);
  HostTensor wgrad(DType::kF32, {2, 6, 6});
  EXPECT_NO_THROW((GroupedGemmK{t.operand(), t.operand(), bounds(good), wgrad.view(), true}.check()));
  EXPECT_THROW((GroupedGemmK{a.operand(), t.operand(), bounds(good), wgrad.view(), true}.check()),
               InternalError);
}

}  // namespace
}  // namespace fp4t::test
