// Products of plain operands on the GPU against the CPU.
#include <cmath>

#include "tests/gpu/gemm_operands.h"

namespace fp4t::test {
namespace {

constexpr DType kBf16 = DType::kBf16, kF32 = DType::kF32;

struct Size {
  int64_t m, n, k;
};
constexpr Size kSizes[] = {{1, 1, 1},      {5, 17, 130},   {33, 47, 90},    {65, 257, 17},   {129, 130, 257},
                           {128, 256, 64}, {3, 520, 1024}, {300, 520, 200}, {2047, 1160, 72}};
constexpr Size kEmpty[] = {{0, 5, 7}, {5, 0, 7}, {7, 5, 0}};

void check_dense(DType in, DType out, const Size& s, bool a_transposed, bool b_transposed, bool scales,
                 bool accumulate) {
  SCOPED_TRACE(detail::concat(dtype_name(in), " to ", dtype_name(out), " ", s.m, " x ", s.n, " x ", s.k,
                              ", transposed ", a_transposed, b_transposed, ", scales ", scales,
                              ", accumulate ", accumulate));
  Mirror m;
  const Operand a = plain(m, in, s.m, s.k, a_transposed, scales ? 1 : 0);
  const Operand b = plain(m, in, s.n, s.k, b_transposed, scales ? 1 : 0);
  const TensorView result = output(m, out, {s.m, s.n}, accumulate);
  if (in == kF32) m.compare_by(result, Bitwise());
  m.check(Gemm{a, b, result, accumulate});
}

TEST(GpuGemm, bf16_products_of_every_layout_and_size) {
  int i = 0;
  for (const Size& s : kSizes) {
    for (const bool a : {false, true}) {
      for (const bool b : {false, true}) {
        ++i;
        check_dense(kBf16, i % 2 == 0 ? kBf16 : kF32, s, a, b, i % 3 == 0, i % 2 == 1 && i % 5 == 0);
      }
    }
  }
}

TEST(GpuGemm, fp32_products_are_bitwise) {
  int i = 0;
  for (const Size& s : kSizes) {
    if (s.m > 1000) continue;
    for (const bool a : {false, true}) {
      for (const bool b : {false, true}) {
        ++i;
        check_dense(kF32, i % 4 == 0 ? kBf16 : kF32, s, a, b, i % 3 == 0, i % 4 == 1);
      }
    }
  }
}

TEST(GpuGemm, nothing_to_sum_gives_zeros_or_leaves_out_alone) {
  for (const DType in : {kBf16, kF32}) {
    for (const Size& s : kEmpty) {
      check_dense(in, kF32, s, false, false, true, false);
      check_dense(in, kBf16, s, false, true, false, false);
      check_dense(in, kF32, s, false, false, false, true);
    }
  }
  Mirror m;
  Operand a = plain(m, kBf16, 7, 0, false, 1), b = plain(m, kBf16, 5, 0, false);
  a.scale.as<float>()[0] = INFINITY;
  m.check(Gemm{a, b, output(m, kF32, {7, 5}), false});
}

TEST(GpuGemm, scales_whose_product_vanishes_or_overflows_are_applied_one_by_one) {
  for (const float second : {0x1p-80f, 0x1p+100f}) {
    Mirror m;
    Operand a = plain(m, kBf16, 40, 64, false, 1), b = plain(m, kBf16, 24, 64, false, 1);
    a.scale.as<float>()[0] = second < 1 ? 0x1p-60f : 0x1p+40f;
    b.scale.as<float>()[0] = second;
    m.check(Gemm{a, b, output(m, kF32, {40, 24}), false});
  }
}

// Experts with 0, 1, 31 and 33 rows, one that needs several tiles, and an empty one at the end.
const std::vector<int32_t> kOffsets = {0, 0, 1, 32, 65, 270, 270};
constexpr int64_t kGroups = 6, kCapacity = 280;

void check_grouped(DType in, DType out, int64_t n, int64_t k, bool transposed, int64_t scales) {
  SCOPED_TRACE(detail::concat(dtype_name(in), " to ", dtype_name(out), " n ", n, " k ", k, ", transposed ",
                              transposed, ", scales ", scales));
  Mirror m;
  const Operand a = plain(m, in, kCapacity, k, false, scales > 0 ? 1 : 0);
  for (int64_t i = kOffsets.back() * k; i < kCapacity * k; ++i) put(a.values, i, NAN);
  const Operand b = stacked(m, in, kGroups, n, k, transposed, scales);
  const TensorView result = output(m, out, {kCapacity, n});
  if (in == kF32) m.compare_by(result, Bitwise());
  m.check(GroupedGemm{a, b, m.i32(kOffsets), result});
}

TEST(GpuGroupedGemm, every_group_meets_its_own_matrix_and_other_rows_are_left_alone) {
  for (const bool transposed : {false, true}) {
    for (const int64_t scales : {int64_t{0}, int64_t{1}, kGroups}) {
      check_grouped(kBf16, kBf16, 47, 90, transposed, scales);
      check_grouped(kBf16, kF32, 264, 128, transposed, scales);
      check_grouped(kF32, kF32, 47, 90, transposed, scales);
    }
  }
  check_grouped(kBf16, kF32, 33, 0, false, kGroups);
}

TEST(GpuGroupedGemm, many_groups_and_few_rows) {
  for (const int64_t groups : {31, 32, 33, 200}) {
    Mirror m;
    std::vector<int32_t> offsets{0};
    for (int64_t g = 0; g < groups; ++g) offsets.push_back(offsets.back() + static_cast<int32_t>(g * 7 % 5));
    const int64_t rows = offsets.back() + 3;
    const Operand a = plain(m, kBf16, rows, 96, false), b = stacked(m, kBf16, groups, 40, 96, false);
    m.check(GroupedGemm{a, b, m.i32(offsets), output(m, kF32, {rows, 40})});
  }
}

void check_grouped_k(DType in, DType out, int64_t rows, int64_t n, bool accumulate, bool scales) {
  SCOPED_TRACE(detail::concat(dtype_name(in), " to ", dtype_name(out), " ", rows, " x ", n, ", accumulate ",
                              accumulate, ", scales ", scales));
  Mirror m;
  const Operand a = plain(m, in, rows, kCapacity, true, scales ? kGroups : 0);
  const Operand b = plain(m, in, n, kCapacity, true, scales ? 1 : 0);
  for (int64_t i = kOffsets.back() * rows; i < kCapacity * rows; ++i) put(a.values, i, NAN);
  for (int64_t i = kOffsets.back() * n; i < kCapacity * n; ++i) put(b.values, i, NAN);
  if (scales) a.scale.as<float>()[0] = NAN;  // of an empty group: never used
  const TensorView result = output(m, out, {kGroups, rows, n}, accumulate);
  if (in == kF32) m.compare_by(result, Bitwise());
  m.check(GroupedGemmK{a, b, m.i32(kOffsets), result, accumulate});
}

TEST(GpuGroupedGemmK, every_group_sums_its_own_tokens_and_empty_groups_give_zeros) {
  for (const bool scales : {false, true}) {
    for (const auto& [rows, n] : {std::pair<int64_t, int64_t>{33, 47}, {136, 264}}) {
      check_grouped_k(kBf16, kF32, rows, n, false, scales);
      check_grouped_k(kBf16, kF32, rows, n, true, scales);
      check_grouped_k(kBf16, kBf16, rows, n, false, scales);
      check_grouped_k(kF32, kF32, rows, n, scales, scales);
    }
  }
}

// Rows [begin, begin + count) of a as a product of their own; which core it takes is left to the sizes.
HostTensor rows_alone(Mirror& m, const TensorView& a, int64_t begin, int64_t count, const Operand& b,
                      int64_t n) {
  const TensorView out = m.fresh(kF32, {count, n});
  Operand part;
  part.values = a.rows(begin, count);
  m.run_on_gpu(Gemm{part, b, out, false});
  HostTensor copy(kF32, {count, n});
  std::memcpy(copy.view().data, out.data, static_cast<size_t>(out.bytes()));
  return copy;
}

TEST(GpuGemm, a_row_has_the_same_bits_whatever_rows_are_around_it) {
  for (const int64_t k : {int64_t{90}, int64_t{768}, int64_t{2048}}) {
    const int64_t rows = 1100, n = 384;
    Mirror m;
    const Operand a = plain(m, kBf16, rows, k, false), b = plain(m, kBf16, n, k, false);
    HostTensor all = rows_alone(m, a.values, 0, rows, b, n);
    for (const auto& [begin, count] :
         {std::pair<int64_t, int64_t>{0, 1}, {7, 5}, {1, 16}, {40, 64}, {513, 65}, {300, 300}, {1099, 1}}) {
      HostTensor alone = rows_alone(m, a.values, begin, count, b, n);
      EXPECT_TRUE(matches_bitwise(all.view().rows(begin, count), alone.view()))
          << count << " rows from " << begin << ", depth " << k;
    }
    // As an expert's rows.
    Operand b_stack = b;
    b_stack.values = b.values.reshape({1, n, k});
    const TensorView out = m.fresh(kF32, {rows, n});
    m.run_on_gpu(GroupedGemm{a, b_stack, m.i32({0, 37}), out});
    EXPECT_TRUE(matches_bitwise(all.view().rows(0, 37), out.rows(0, 37))) << "depth " << k;
  }
}

// Beside another queue blocks take their tiles in several shares.
TEST(GpuGemm, products_have_the_same_bits_beside_another_queue) {
  const int64_t rows = 9000, n = 8208, k = 72, groups = 5;
  const std::vector<int32_t> offsets = {0, 1700, 1700, 1703, 8000, 8990};
  std::vector<HostTensor> alone;
  for (const bool beside : {false, true}) {
    Mirror m(3);
    if (beside) m.share_device();
    const Operand a = plain(m, kBf16, rows, k, false), b = plain(m, kBf16, n, k, false);
    const TensorView dense = m.fresh(kBf16, {rows, n});
    m.run_on_gpu(Gemm{a, b, dense, false});
    Operand stack = plain(m, kBf16, groups * n, k, false);
    stack.values = stack.values.reshape({groups, n, k});
    const TensorView at = m.i32(offsets), grouped = m.zeros(kF32, {rows, n});
    m.run_on_gpu(GroupedGemm{a, stack, at, grouped});
    const Operand x = plain(m, kBf16, 2080, rows, true), y = plain(m, kBf16, n, rows, true);
    const TensorView gradients = m.fresh(kF32, {groups, 2080, n});
    m.run_on_gpu(GroupedGemmK{x, y, at, gradients, false});
    size_t i = 0;
    for (const TensorView& out : {dense, grouped, gradients}) {
      if (beside) {
        EXPECT_TRUE(matches_bitwise(alone[i++].view(), out));
        continue;
      }
      alone.emplace_back(out.dtype, out.shape);
      std::memcpy(alone.back().view().data, out.data, static_cast<size_t>(out.bytes()));
    }
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
