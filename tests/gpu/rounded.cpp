// Ops that round their output for a product: the same bits as the op by itself, then Quantize and Dequantize
// on the CPU of what it wrote.
#include <limits>

#include "kernels/ops/norm.h"
#include "kernels/ops/quantize.h"
#include "tests/formats/operand.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr DType kBf16 = DType::kBf16, kF32 = DType::kF32;

std::vector<QuantSpec> row_specs() {
  std::vector<QuantSpec> specs;
  for (const QuantSpec& spec : all_specs()) {
    if (rounds_by_row(spec, 32)) specs.push_back(spec);
  }
  return specs;
}

RoundedRows rounded(Mirror& m, const QuantSpec& spec, int64_t rows, int64_t cols) {
  return {spec, m.fresh(kBf16, {rows, cols}), m.fresh(kF32, {rows})};
}

TensorView rough(Mirror& m, int64_t rows, int64_t cols, uint64_t seed) {
  const TensorView x = m.fresh(kBf16, {rows, cols});
  HostTensor values = bf16_tensor(rough_matrix(rows, cols, seed));
  std::memcpy(x.data, values.view().data, static_cast<size_t>(x.bytes()));
  return x;
}

// `out` as an op wrote it on the GPU, `r` what it rounded.
void expect_rounded(Mirror& m, const TensorView& out, const RoundedRows& r) {
  const int64_t rows = out.dim(0), cols = out.dim(1);
  Quantize quantize{};
  quantize.x = out;
  quantize.orientation = Orientation::kRow;
  quantize.out = m.quant(quant_layout(r.spec, GroupAxis::kRows, 1, rows, cols));
  run(m.cpu(), quantize);
  HostTensor values(kBf16, {rows, cols});
  run(m.cpu(), Dequantize{quantize.out, {}, DecodeScale::kBlock, values.view(), {}});
  EXPECT_TRUE(matches_bitwise(values.view(), r.values));
  EXPECT_TRUE(matches_bitwise(quantize.out.tensor_scale, r.scale));
}

struct Sizes {
  int64_t rows, cols;
};
// Rows that share a block, whole blocks, rows too wide for one warp's sum, and for one block of 16 a thread.
const std::vector<Sizes> kSizes = {{1, 32}, {7, 96}, {33, 512}, {64, 768}, {3, 1056}, {64, 2048}, {5, 4096}};

TEST(GpuRounded, norm_has_the_bits_of_the_ops_one_by_one) {
  uint64_t seed = 0;
  for (const QuantSpec& spec : row_specs()) {
    for (const Sizes& s : kSizes) {
      for (const bool residual : {false, true}) {
        SCOPED_TRACE(detail::concat(describe(spec), " ", s.rows, " x ", s.cols, " residual ", residual));
        Mirror m(++seed);
        NormForward op{};
        op.x = seed % 3 == 0 ? rough(m, s.rows, s.cols, seed) : m.normal(kBf16, {s.rows, s.cols});
        if (residual) op.residual = m.normal(kBf16, {s.rows, s.cols});
        op.weight = m.normal(kF32, {s.cols});
        op.eps = 1e-6f;
        NormForward plain = op;
        for (NormForward* o : {&op, &plain}) {
          if (residual) o->sum = m.fresh(kBf16, {s.rows, s.cols});
          o->out = m.fresh(kBf16, {s.rows, s.cols});
          o->rstd = m.fresh(kF32, {s.rows});
        }
        op.rounded = rounded(m, spec, s.rows, s.cols);
        m.run_on_gpu(op);
        m.run_on_gpu(plain);
        EXPECT_TRUE(matches_bitwise(plain.out, op.out));
        EXPECT_TRUE(matches_bitwise(plain.rstd, op.rstd));
        if (residual) {
          EXPECT_TRUE(matches_bitwise(plain.sum, op.sum));
        }
        expect_rounded(m, op.out, op.rounded);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(GpuRounded, swiglu_has_the_bits_of_the_ops_one_by_one) {
  uint64_t seed = 100;
  for (const QuantSpec& spec : row_specs()) {
    for (const Sizes& s : kSizes) {
      SCOPED_TRACE(detail::concat(describe(spec), " ", s.rows, " x ", s.cols));
      Mirror m(++seed);
      SwigluForward op{};
      op.gate_up = seed % 2 == 0 ? rough(m, s.rows, 2 * s.cols, seed) : m.normal(kBf16, {s.rows, 2 * s.cols});
      op.clamp = seed % 2 == 0 ? 0.0f : 1.5f;
      op.out = m.fresh(kBf16, {s.rows, s.cols});
      SwigluForward plain = op;
      plain.out = m.fresh(kBf16, {s.rows, s.cols});
      op.rounded = rounded(m, spec, s.rows, s.cols);
      m.run_on_gpu(op);
      m.run_on_gpu(plain);
      EXPECT_TRUE(matches_bitwise(plain.out, op.out));
      expect_rounded(m, op.out, op.rounded);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// What the kernels that round do not take: rows that begin anywhere.
TEST(GpuRounded, unaligned_rows_are_rounded_alike) {
  const QuantSpec spec = row_specs().front();
  Mirror m(7);
  const auto shifted = [&](const TensorView& v, const Shape& shape) {
    TensorView s = v;
    s.shape = shape;
    s.data = static_cast<char*>(v.data) + 2;
    return s;
  };
  const int64_t rows = 5, cols = 96;
  SwigluForward op{};
  op.gate_up = m.normal(kBf16, {rows, 2 * cols});
  op.out = shifted(m.fresh(kBf16, {rows * cols + 1}), {rows, cols});
  op.rounded = {spec, shifted(m.fresh(kBf16, {rows * cols + 1}), {rows, cols}), m.fresh(kF32, {rows})};
  m.run_on_gpu(op);
  expect_rounded(m, op.out, op.rounded);
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
