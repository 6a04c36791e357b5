#include "kernels/ops/quantize.h"

#include "kernels/base/numeric.h"
#include "kernels/formats/legal.h"
#include "kernels/ops/expect.h"

namespace fp4t {

namespace {

void check_view(const QuantView& v) {
  const std::string conflict = conflict_in(v.spec);
  FP4T_CHECK(v.spec.quantised() && conflict.empty(), describe(v.spec), ": ", conflict);
  FP4T_CHECK(v.groups >= 1, v.groups, " groups");
  const QuantView expected = quant_layout(v.spec, v.group_axis, v.groups, v.rows, v.cols);
  FP4T_CHECK_EQ(v.padded_rows, expected.padded_rows, describe(v.spec));
  FP4T_CHECK_EQ(v.padded_cols, expected.padded_cols, describe(v.spec));
  FP4T_CHECK_EQ(v.codes.shape, expected.codes.shape, describe(v.spec));
  FP4T_CHECK_EQ(v.block_scales.shape, expected.block_scales.shape, describe(v.spec));
  FP4T_CHECK(v.codes.dtype == DType::kU8 && v.block_scales.dtype == DType::kU8, "codes and scales are U8");
  FP4T_CHECK(
      v.order == CodeOrder::kNatural || (v.spec.format == Format::kNvfp4 && v.group_axis == GroupAxis::kRows),
      describe(v.spec), ": codes in the order of products of few rows");
  if (v.spec.format == Format::kNvfp4) {
    FP4T_CHECK_EQ(v.tensor_scale.shape, expected.tensor_scale.shape, describe(v.spec));
  } else if (!v.tensor_scale.empty()) {
    FP4T_CHECK_EQ(v.tensor_scale.shape, Shape({v.groups}), describe(v.spec));
  }
  FP4T_CHECK(v.tensor_scale.empty() || v.tensor_scale.dtype == DType::kF32, "tensor scales are F32");
}

void check_offsets(const TensorView& offsets, int64_t groups) {
  if (offsets.empty()) return;
  FP4T_CHECK(offsets.dtype == DType::kI32, "offsets are I32");
  FP4T_CHECK_EQ(offsets.shape, Shape({groups + 1}));
}

}  // namespace

void Quantize::check() const {
  check_view(out);
  check_offsets(offsets, out.groups);
  FP4T_CHECK(x.dtype == DType::kBf16 && x.shape.rank() == 2, "x is BF16 [R, C], got ", dtype_name(x.dtype),
             " ", x.shape);
  const int64_t rows = x.dim(0), cols = x.dim(1);
  if (orientation == Orientation::kRow) {
    FP4T_CHECK(out.group_axis == GroupAxis::kRows, "the row orientation cuts rows into groups");
    FP4T_CHECK_EQ(out.rows, rows);
    FP4T_CHECK_EQ(out.cols, cols);
  } else if (out.group_axis == GroupAxis::kCols) {
    FP4T_CHECK_EQ(out.rows, cols);
    FP4T_CHECK_EQ(out.cols, rows);
  } else {
    FP4T_CHECK(offsets.empty(), "groups of unequal length are stored with group axis kCols");
    FP4T_CHECK_EQ(out.rows, out.groups * cols);
    FP4T_CHECK_EQ(out.cols, div_exact(rows, out.groups));
  }
  FP4T_CHECK(orientation == Orientation::kRow || out.spec.scale_scope == ScaleScope::kTensor,
             "scale_scope row is for the row orientation");
  FP4T_CHECK(out.order == CodeOrder::kNatural || offsets.empty(),
             "codes of rows that may be fewer keep their order");
  FP4T_CHECK(first_expert >= -1, "first_expert ", first_expert);
  if (!input_scale.empty()) {
    FP4T_CHECK(input_scale.dtype == DType::kF32, "input_scale is F32");
    FP4T_CHECK_EQ(input_scale.shape, Shape({out.groups}));
    FP4T_CHECK(!out.tensor_scale.empty(), "input_scale needs a tensor_scale to go to");
  }
  if (!stats.empty()) {
    FP4T_CHECK(stats.dtype == DType::kF64, "stats are F64");
    FP4T_CHECK_EQ(stats.shape, Shape({kNumQuantStats}));
  }
}

void QuantizeBoth::check() const {
  row.check();
  column.check();
  FP4T_CHECK(row.orientation == Orientation::kRow && column.orientation == Orientation::kColumn,
             "the first is the row orientation");
  FP4T_CHECK(row.x.data == column.x.data && row.x.shape == column.x.shape, "two matrices");
  FP4T_CHECK(row.offsets.data == column.offsets.data && row.out.groups == column.out.groups, "other groups");
  FP4T_CHECK_EQ(row.first_expert, column.first_expert);
}

bool share_a_reading(const QuantSpec& row, const QuantSpec& column) {
  const auto simple = [](const QuantSpec& s) {
    return s.format == Format::kNvfp4 && s.scale_rule == ScaleRule::kAmax &&
           s.rounding != Rounding::kMsEden && s.scale_scope == ScaleScope::kTensor;
  };
  if (!simple(row) || !simple(column) || row.rounding != column.rounding || row.hadamard != 0) return false;
  // The codes of a 16x16 block and of its transpose are the same ones where nothing is drawn.
  if (row.block == BlockShape::k16x16) return row == column && row.rounding == Rounding::kNearest;
  return column.block == BlockShape::k1x16 && (column.hadamard == 0 || column.hadamard == 16);
}

void Dequantize::check() const {
  check_view(x);
  check_offsets(offsets, x.groups);
  FP4T_CHECK(out.dtype == DType::kBf16 || out.dtype == DType::kF32, "out is BF16 or F32, got ",
             dtype_name(out.dtype));
  FP4T_CHECK_EQ(out.shape, Shape({x.rows, x.cols}));
  FP4T_CHECK(scale != DecodeScale::kRow || x.spec.scale_scope == ScaleScope::kRow, "no row scales in ",
             describe(x.spec));
  if (!inexact.empty()) {
    FP4T_CHECK(inexact.dtype == DType::kF64, "inexact is F64");
    FP4T_CHECK_EQ(inexact.shape, Shape({1}));
  }
}

bool rounds_by_row(const QuantSpec& spec, int64_t cols) {
  return spec.format == Format::kNvfp4 && spec.scale_scope == ScaleScope::kRow &&
         spec.block == BlockShape::k1x16 && spec.rounding == Rounding::kNearest && spec.hadamard == 0 &&
         cols > 0 && cols % contraction_padding(spec) == 0;
}

void RoundedRows::check(const char* op, const TensorView& x) const {
  FP4T_CHECK(x.dtype == DType::kBf16 && rounds_by_row(spec, x.dim(1)), op, ": ", dtype_name(x.dtype), " ",
             x.shape, " rounded as ", describe(spec));
  expect_tensor(op, "rounded.values", values, DType::kBf16, x.shape);
  expect_tensor(op, "rounded.scale", scale, DType::kF32, {x.dim(0)});
  expect_disjoint(op, "rounded.values", values, "out", x);
}

}  // namespace fp4t
