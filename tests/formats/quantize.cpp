// The op Quantize against the plain reference, bit for bit: every legal spec, both orientations, ragged and
// empty groups, threads.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/formats/groups.h"
#include "tests/formats/operand.h"

namespace fp4t::test {
namespace {

bool fewer_shapes(const QuantSpec& s) { return s.rounding == Rounding::kNearest && s.hadamard > 16; }

template <class T>
std::vector<T> slice(const std::vector<T>& v, int64_t begin, size_t count) {
  return {v.begin() + begin, v.begin() + begin + static_cast<int64_t>(count)};
}

TEST(Quantize, equals_the_reference_for_every_legal_spec_in_both_orientations) {
  Queue queue = Queue::cpu(2);
  const std::vector<QuantSpec> specs = all_specs();
  EXPECT_GT(specs.size(), 100u);
  for (const QuantSpec& spec : specs) {
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {7, 40}, {33, 300}, {50, 128}}) {
      if (fewer_shapes(spec) && rows == 7) continue;
      const Matrix m = rough_matrix(rows, cols, static_cast<uint64_t>(rows * 1000 + cols));
      HostTensor x = bf16_tensor(m);
      for (Orientation o : {Orientation::kRow, Orientation::kColumn}) {
        const bool row = o == Orientation::kRow;
        if (!row && spec.scale_scope == ScaleScope::kRow) continue;
        const ReferenceKeys keys{kDrawKey, kSignsKey, 0, !row};
        const ReferenceResult expected = reference_quantize(row ? m : transposed(m), spec, keys);
        Operand out(spec, row ? GroupAxis::kRows : GroupAxis::kCols, 1, row ? rows : cols, row ? cols : rows);
        HostTensor stats(DType::kF64, {kNumQuantStats});
        stats.zero();
        Quantize op = quantize_op(x, o, out);
        op.stats = stats.view();
        run(queue, op);
        const std::string what = describe(spec) + (row ? " row " : " column ") + x.view().shape.text();
        ASSERT_EQ(slice(out.codes, 0, expected.codes.size()), expected.codes) << what;
        ASSERT_EQ(slice(out.block_scales, 0, expected.block_scales.size()), expected.block_scales) << what;
        ASSERT_EQ(out.tensor_scale, expected.tensor_scale) << what;
        ASSERT_TRUE(out.guards_intact()) << what;
        const double* s = stats.as<double>();
        ASSERT_EQ(s[kStatFlushed], expected.flushed) << what;
        ASSERT_EQ(s[kStatClipped], expected.clipped) << what;
        ASSERT_EQ(s[kStatChoseFour], expected.chose_four) << what;
        ASSERT_EQ(s[kStatElements], static_cast<double>(rows * cols)) << what;
        ASSERT_EQ(s[kStatNonFinite], 0) << what;
      }
    }
  }
}

// Energies and bias are sums over what the codes decode to; nearest rounding of a value below half a code's
// step takes all of it away.
TEST(Quantize, energies_and_bias_are_those_of_the_decoded_values) {
  Queue queue = Queue::cpu(2);
  QuantSpec four_over_six{.format = Format::kNvfp4};
  four_over_six.scale_rule = ScaleRule::kFourOverSix;
  for (const QuantSpec& spec :
       {QuantSpec{.format = Format::kMxfp8}, QuantSpec{.format = Format::kNvfp4}, four_over_six}) {
    HostTensor x = bf16_tensor(rough_matrix(16, 64, 5)), stats(DType::kF64, {kNumQuantStats});
    Operand q(spec, GroupAxis::kRows, 1, 16, 64);
    stats.zero();
    Quantize op = quantize_op(x, Orientation::kRow, q);
    op.stats = stats.view();
    run(queue, op);
    for (const QuantStat s : {kStatErrorEnergy, kStatSignalEnergy, kStatErrorSignal}) {
      EXPECT_EQ(stats.as<double>()[s], 0) << "not asked for";
    }
    stats.zero();
    op.measure_error = true;
    run(queue, op);
    const std::vector<float> y = decoded(queue, q);
    double error = 0, signal = 0, bias = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      const double v = static_cast<double>(bf16_to_f32(x.as<Bf16>()[i])), d = static_cast<double>(y[i]) - v;
      error += d * d;
      signal += v * v;
      bias += d * v;
    }
    EXPECT_NEAR(stats.as<double>()[kStatErrorEnergy], error, 1e-9 * error) << describe(spec);
    EXPECT_NEAR(stats.as<double>()[kStatSignalEnergy], signal, 1e-9 * signal) << describe(spec);
    EXPECT_NEAR(stats.as<double>()[kStatErrorSignal], bias, 1e-9 * signal) << describe(spec);
    EXPECT_NE(bias, 0);
  }
}

// Every group must equal the same rows quantised alone, with its own draws.
void check_groups(Queue& queue, const QuantSpec& spec, Orientation o, const std::vector<int32_t>& offsets,
                  int64_t capacity, int64_t cols, int64_t first_expert) {
  const int64_t groups = static_cast<int64_t>(offsets.size()) - 1;
  const bool row = o == Orientation::kRow;
  const Matrix m = rough_matrix(capacity, cols, 99);
  HostTensor x = bf16_tensor(m), bounds = i32_tensor(offsets);
  Operand out(spec, row ? GroupAxis::kRows : GroupAxis::kCols, groups, row ? capacity : cols,
              row ? cols : capacity);
  Quantize op = quantize_op(x, o, out);
  op.offsets = bounds.view();
  op.first_expert = first_expert;
  run(queue, op);
  ASSERT_TRUE(out.guards_intact());
  const int64_t outer = outer_padding(spec), per_byte = spec.format == Format::kNvfp4 ? 2 : 1;
  const auto spans = group_spans(capacity, groups, offsets.data(), row ? outer : contraction_padding(spec));
  for (int64_t g = 0; g < groups; ++g) {
    const GroupSpan& s = spans[static_cast<size_t>(g)];
    Matrix part{s.count, cols, slice(m.v, s.begin * cols, static_cast<size_t>(s.count * cols))};
    const ReferenceKeys keys{kDrawKey, kSignsKey, static_cast<uint64_t>(first_expert + g + 1) << 40, !row};
    const ReferenceResult expected = reference_quantize(row ? part : transposed(part), spec, keys);
    const int64_t before =
        s.stored_begin * (row ? align_up(cols, contraction_padding(spec)) : align_up(cols, outer));
    const std::string what = describe(spec) + (row ? " row" : " column") + " group " + std::to_string(g);
    ASSERT_EQ(slice(out.codes, before / per_byte, expected.codes.size()), expected.codes) << what;
    ASSERT_EQ(slice(out.block_scales, before / (block_length(spec) * outer), expected.block_scales.size()),
              expected.block_scales)
        << what;
    if (spec.format != Format::kNvfp4) continue;
    const int64_t first = spec.scale_scope == ScaleScope::kRow ? s.begin : g;
    ASSERT_EQ(slice(out.tensor_scale, first, expected.tensor_scale.size()), expected.tensor_scale) << what;
  }
}

TEST(Quantize, ragged_and_empty_groups_equal_each_group_quantised_alone) {
  Queue queue = Queue::cpu(2);
  const std::vector<int32_t> offsets = {0, 0, 1, 32, 64, 97, 141, 141};  // 0 1 31 32 33 44 0 rows
  for (const QuantSpec& spec : all_specs()) {
    if (fewer_shapes(spec) && spec.hadamard_out == HadamardOut::kBf16) continue;
    for (int64_t capacity : {141, 160}) {
      check_groups(queue, spec, Orientation::kRow, offsets, capacity, 40, 0);
      if (spec.scale_scope == ScaleScope::kRow) continue;
      check_groups(queue, spec, Orientation::kColumn, offsets, capacity, 40, 5);
    }
  }
}

TEST(Quantize, transposed_experts_are_the_same_bytes_with_either_group_axis) {
  Queue queue = Queue::cpu(1);
  for (const QuantSpec& spec : all_specs()) {
    if (spec.scale_scope == ScaleScope::kRow || fewer_shapes(spec)) continue;
    const Matrix m = rough_matrix(3 * 40, 24, 5);
    HostTensor x = bf16_tensor(m);
    Operand cols(spec, GroupAxis::kCols, 3, 24, 120), rows(spec, GroupAxis::kRows, 3, 72, 40);
    run(queue, quantize_op(x, Orientation::kColumn, cols));
    run(queue, quantize_op(x, Orientation::kColumn, rows));
    const int64_t elements = 3 * align_up(24, outer_padding(spec)) * align_up(40, contraction_padding(spec));
    const size_t bytes = static_cast<size_t>(elements / (spec.format == Format::kNvfp4 ? 2 : 1));
    EXPECT_EQ(slice(cols.codes, 0, bytes), slice(rows.codes, 0, bytes)) << describe(spec);
    EXPECT_EQ(cols.tensor_scale, rows.tensor_scale);
  }
}

TEST(Quantize, a_16x16_weight_and_its_transpose_hold_the_same_values) {
  Queue queue = Queue::cpu(1);
  for (ScaleRule rule : {ScaleRule::kAmax, ScaleRule::kFourOverSix}) {
    const QuantSpec spec{.format = Format::kNvfp4, .block = BlockShape::k16x16, .scale_rule = rule};
    const Matrix m = rough_matrix(70, 150, 8);
    HostTensor x = bf16_tensor(m);
    Operand row(spec, GroupAxis::kRows, 1, 70, 150), column(spec, GroupAxis::kCols, 1, 150, 70);
    HostTensor a(DType::kF32, {70, 150}), b(DType::kF32, {150, 70});
    run(queue, quantize_op(x, Orientation::kRow, row));
    run(queue, quantize_op(x, Orientation::kColumn, column));
    run(queue, Dequantize{row.view, {}, DecodeScale::kFull, a.view(), {}});
    run(queue, Dequantize{column.view, {}, DecodeScale::kFull, b.view(), {}});
    for (int64_t r = 0; r < 70; ++r) {
      for (int64_t c = 0; c < 150; ++c) {
        ASSERT_EQ(bits_of(a.as<float>()[r * 150 + c]), bits_of(b.as<float>()[c * 70 + r])) << r << " " << c;
      }
    }
  }
}

TEST(Quantize, the_number_of_threads_changes_no_byte_and_no_count) {
  const Matrix m = rough_matrix(300, 700, 3);
  HostTensor x = bf16_tensor(m);
  Queue one = Queue::cpu(1), five = Queue::cpu(5);
  for (const QuantSpec& spec : all_specs()) {
    if (fewer_shapes(spec)) continue;
    for (Orientation o : {Orientation::kRow, Orientation::kColumn}) {
      const bool row = o == Orientation::kRow;
      if (!row && spec.scale_scope == ScaleScope::kRow) continue;
      const GroupAxis axis = row ? GroupAxis::kRows : GroupAxis::kCols;
      Operand a(spec, axis, 1, row ? 300 : 700, row ? 700 : 300);
      Operand b(spec, axis, 1, row ? 300 : 700, row ? 700 : 300);
      HostTensor stats_a(DType::kF64, {kNumQuantStats}), stats_b(DType::kF64, {kNumQuantStats});
      stats_a.zero();
      stats_b.zero();
      Quantize op = quantize_op(x, o, a);
      op.measure_error = true;
      op.stats = stats_a.view();
      run(one, op);
      op.out = b.view;
      op.stats = stats_b.view();
      run(five, op);
      ASSERT_EQ(a.codes, b.codes) << describe(spec);
      ASSERT_EQ(a.block_scales, b.block_scales) << describe(spec);
      ASSERT_TRUE(stats_a.same_bytes(stats_b)) << describe(spec);
    }
  }
}

TEST(Quantize, both_orientations_together_are_the_two_by_themselves) {
  Queue queue = Queue::cpu(2);
  const QuantSpec stochastic{.format = Format::kNvfp4, .rounding = Rounding::kStochastic};
  QuantSpec rotated = stochastic;
  rotated.hadamard = 16;
  HostTensor x = bf16_tensor(rough_matrix(70, 40, 6)), offsets = i32_tensor({0, 33, 70});
  Operand row(stochastic, GroupAxis::kRows, 2, 70, 40), column(rotated, GroupAxis::kCols, 2, 40, 70);
  Operand row_alone(stochastic, GroupAxis::kRows, 2, 70, 40),
      column_alone(rotated, GroupAxis::kCols, 2, 40, 70);
  QuantizeBoth both{quantize_op(x, Orientation::kRow, row), quantize_op(x, Orientation::kColumn, column)};
  QuantizeBoth alone{quantize_op(x, Orientation::kRow, row_alone),
                     quantize_op(x, Orientation::kColumn, column_alone)};
  for (Quantize* q : {&both.row, &both.column, &alone.row, &alone.column}) q->offsets = offsets.view();
  run(queue, both);
  run(queue, alone.row);
  run(queue, alone.column);
  EXPECT_EQ(row.codes, row_alone.codes);
  EXPECT_EQ(column.codes, column_alone.codes);
  EXPECT_EQ(row.block_scales, row_alone.block_scales);
  EXPECT_EQ(column.tensor_scale, column_alone.tensor_scale);
  std::swap(both.row, both.column);
  EXPECT_THROW(run(queue, both), InternalError);
}

TEST(Quantize, one_reading_serves_plain_blocks_alone) {
  const QuantSpec plain{.format = Format::kNvfp4, .rounding = Rounding::kStochastic};
  QuantSpec rotated = plain, four = plain, square = plain, row_scope = plain, long_rotation = plain;
  rotated.hadamard = 16;
  long_rotation.hadamard = 128;
  four.scale_rule = ScaleRule::kFourOverSix;
  square.block = BlockShape::k16x16;
  row_scope.scale_scope = ScaleScope::kRow;
  EXPECT_TRUE(share_a_reading(plain, plain));
  EXPECT_TRUE(share_a_reading(plain, rotated));
  EXPECT_FALSE(share_a_reading(square, square)) << "drawn";
  square.rounding = Rounding::kNearest;
  EXPECT_TRUE(share_a_reading(square, square));
  for (const QuantSpec& other : {four, square, QuantSpec{.format = Format::kMxfp8}, QuantSpec{}}) {
    EXPECT_FALSE(share_a_reading(other, plain)) << describe(other);
    EXPECT_FALSE(share_a_reading(plain, other)) << describe(other);
  }
  EXPECT_FALSE(share_a_reading(QuantSpec{.format = Format::kNvfp4}, plain));
  EXPECT_FALSE(share_a_reading(row_scope, plain));
  EXPECT_FALSE(share_a_reading(rotated, plain));
  EXPECT_FALSE(share_a_reading(plain, long_rotation));
}

TEST(Quantize, rows_without_any_element_are_fine) {
  Queue queue = Queue::cpu(2);
  for (const QuantSpec& spec : {QuantSpec{.format = Format::kMxfp8}, QuantSpec{.format = Format::kNvfp4}}) {
    HostTensor x(DType::kBf16, {0, 64}), offsets = i32_tensor({0, 0, 0});
    Operand row(spec, GroupAxis::kRows, 2, 0, 64), column(spec, GroupAxis::kCols, 2, 64, 0);
    Quantize op = quantize_op(x, Orientation::kRow, row);
    op.offsets = offsets.view();
    run(queue, op);
    op.orientation = Orientation::kColumn;
    op.out = column.view;
    run(queue, op);
    for (float s : row.tensor_scale) EXPECT_EQ(s, 1.0f);
  }
}

TEST(Quantize, refuses_what_it_cannot_mean) {
  Queue queue = Queue::cpu(1);
  HostTensor x(DType::kBf16, {32, 32}), f32(DType::kF32, {32, 32}), offsets = i32_tensor({0, 32, 40});
  x.zero();
  const QuantSpec nvfp4{.format = Format::kNvfp4};
  Operand out(nvfp4, GroupAxis::kRows, 1, 32, 32), wide(nvfp4, GroupAxis::kRows, 1, 32, 64);
  Operand two(nvfp4, GroupAxis::kRows, 2, 32, 32);
  Operand by_row({.format = Format::kNvfp4, .scale_scope = ScaleScope::kRow}, GroupAxis::kRows, 1, 32, 32);
  Quantize op = quantize_op(x, Orientation::kRow, wide);
  EXPECT_THROW(run(queue, op), InternalError);
  op = quantize_op(f32, Orientation::kRow, out);
  EXPECT_THROW(run(queue, op), InternalError);
  op = quantize_op(x, Orientation::kColumn, by_row);
  EXPECT_THROW(run(queue, op), InternalError);
  op = quantize_op(x, Orientation::kRow, two);
  op.offsets = offsets.view();
  EXPECT_THROW(run(queue, op), InternalError) << "offsets beyond the rows";
  op = quantize_op(x, Orientation::kRow, out);
  op.out.spec.rounding = Rounding::kMsEden;
  EXPECT_THROW(run(queue, op), InternalError) << "ms_eden without a rotation";
}

}  // namespace
}  // namespace fp4t::test
