// Dequantize: what each DecodeScale contains, when BF16 holds it exactly, and where groups lie.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/formats/groups.h"
#include "tests/formats/operand.h"

namespace fp4t::test {
namespace {

struct Decoded {
  HostTensor out;
  double inexact;
};

Decoded decode(Queue& queue, const QuantView& v, DType dtype, DecodeScale scale, TensorView offsets = {}) {
  HostTensor out(dtype, {v.rows, v.cols}), inexact(DType::kF64, {1});
  inexact.zero();
  run(queue, Dequantize{v, offsets, scale, out.view(), inexact.view()});
  return {out, *inexact.as<double>()};
}

TEST(Dequantize, block_values_are_exact_in_bf16) {
  Queue queue = Queue::cpu(2);
  const Matrix m = rough_matrix(70, 130, 4);
  HostTensor x = bf16_tensor(m);
  for (const QuantSpec& spec : all_specs()) {
    Operand q(spec, GroupAxis::kRows, 1, 70, 130);
    run(queue, quantize_op(x, Orientation::kRow, q));
    const Decoded b16 = decode(queue, q.view, DType::kBf16, DecodeScale::kBlock);
    Decoded f32 = decode(queue, q.view, DType::kF32, DecodeScale::kBlock);
    EXPECT_EQ(b16.inexact, 0) << describe(spec);
    EXPECT_EQ(f32.inexact, 0);
    HostTensor narrow = b16.out;
    for (int64_t i = 0; i < 70 * 130; ++i) {
      ASSERT_EQ(bits_of(bf16_to_f32(narrow.as<Bf16>()[i])), bits_of(f32.out.as<float>()[i]))
          << describe(spec);
    }
  }
}

TEST(Dequantize, full_values_are_codes_times_block_scale_times_tensor_scale) {
  Queue queue = Queue::cpu(1);
  const Matrix m = rough_matrix(33, 70, 6);
  HostTensor x = bf16_tensor(m);
  for (ScaleScope scope : {ScaleScope::kTensor, ScaleScope::kRow}) {
    const QuantSpec spec{.format = Format::kNvfp4, .scale_scope = scope};
    Operand q(spec, GroupAxis::kRows, 1, 33, 70);
    run(queue, quantize_op(x, Orientation::kRow, q));
    Decoded full = decode(queue, q.view, DType::kF32, DecodeScale::kFull);
    for (int64_t r = 0; r < 33; ++r) {
      for (int64_t c = 0; c < 70; ++c) {
        const size_t element = static_cast<size_t>(r * q.view.padded_cols + c);
        const uint32_t code = q.codes[element / 2] >> (element % 2 * 4);
        const float s = e4m3_value(q.block_scales[element / 16]);
        const float tensor = q.tensor_scale[scope == ScaleScope::kRow ? static_cast<size_t>(r) : 0];
        ASSERT_EQ(full.out.as<float>()[r * 70 + c], e2m1_value(code) * s * tensor) << r << " " << c;
      }
    }
    const Decoded narrow = decode(queue, q.view, DType::kBf16, DecodeScale::kFull);
    EXPECT_GT(narrow.inexact, 1000) << "an arbitrary FP32 scale does not fit BF16, and that is counted";
  }
}

TEST(Dequantize, powers_of_two_keep_every_value_exact_in_bf16) {
  Queue queue = Queue::cpu(1);
  Matrix m = rough_matrix(40, 96, 7);
  HostTensor x = bf16_tensor(m);
  for (ScaleScope scope : {ScaleScope::kTensor, ScaleScope::kRow}) {
    const QuantSpec spec{.format = Format::kNvfp4, .scale_scope = scope, .scale_round = ScaleRound::kPow2};
    Operand q(spec, GroupAxis::kRows, 1, 40, 96);
    run(queue, quantize_op(x, Orientation::kRow, q));
    EXPECT_EQ(decode(queue, q.view, DType::kBf16, DecodeScale::kFull).inexact, 0);
    if (scope == ScaleScope::kRow) {
      EXPECT_EQ(decode(queue, q.view, DType::kBf16, DecodeScale::kRow).inexact, 0);
    }
    // At the floor of 2^-126 the values become subnormal and lose bits: those are counted.
    HostTensor tiny = bf16_tensor(m);
    for (int64_t i = 0; i < tiny.elements(); ++i) {
      tiny.as<Bf16>()[i] = f32_to_bf16(m.v[static_cast<size_t>(i)] * 0x1p-129f);
    }
    run(queue, quantize_op(tiny, Orientation::kRow, q));
    for (float s : q.tensor_scale) EXPECT_GE(s, 0x1p-126f);
    EXPECT_GT(decode(queue, q.view, DType::kBf16, DecodeScale::kFull).inexact, 0);
  }
  Operand tensor({.format = Format::kNvfp4}, GroupAxis::kRows, 1, 40, 96);
  HostTensor out(DType::kF32, {40, 96});
  EXPECT_THROW(run(queue, Dequantize{tensor.view, {}, DecodeScale::kRow, out.view(), {}}), InternalError);
}

TEST(Dequantize, groups_lie_at_their_offsets_on_both_axes_and_the_rest_is_left_alone) {
  Queue queue = Queue::cpu(2);
  HostTensor offsets = i32_tensor({0, 1, 1, 33, 90});
  const Matrix m = rough_matrix(100, 48, 12);
  HostTensor x = bf16_tensor(m);
  for (const QuantSpec& spec : {QuantSpec{.format = Format::kMxfp8}, QuantSpec{.format = Format::kNvfp4},
                                QuantSpec{.format = Format::kNvfp4, .block = BlockShape::k16x16}}) {
    Operand row(spec, GroupAxis::kRows, 4, 100, 48), column(spec, GroupAxis::kCols, 4, 48, 100);
    Quantize op = quantize_op(x, Orientation::kRow, row);
    op.offsets = offsets.view();
    run(queue, op);
    op.orientation = Orientation::kColumn;
    op.out = column.view;
    run(queue, op);
    Decoded a = decode(queue, row.view, DType::kF32, DecodeScale::kFull, offsets.view());
    Decoded b = decode(queue, column.view, DType::kF32, DecodeScale::kFull, offsets.view());
    for (int64_t r = 0; r < 100; ++r) {
      for (int64_t c = 0; c < 48; ++c) {
        const float got_a = a.out.as<float>()[r * 48 + c], got_b = b.out.as<float>()[c * 100 + r];
        if (r >= 90) {
          ASSERT_TRUE(std::isnan(got_a) && std::isnan(got_b)) << "rows beyond the last group were written";
          continue;
        }
        ASSERT_FALSE(std::isnan(got_a) || std::isnan(got_b));
      }
    }
    // Each group's rows equal the group dequantised alone.
    const int32_t* bound = offsets.as<int32_t>();
    for (int g = 0; g < 4; ++g) {
      const int64_t n = bound[g + 1] - bound[g];
      Matrix part{n, 48, {m.v.begin() + bound[g] * 48, m.v.begin() + bound[g + 1] * 48}};
      HostTensor px = bf16_tensor(part);
      Operand alone(spec, GroupAxis::kCols, 1, 48, n);
      run(queue, quantize_op(px, Orientation::kColumn, alone));
      Decoded d = decode(queue, alone.view, DType::kF32, DecodeScale::kFull);
      for (int64_t c = 0; c < 48; ++c) {
        for (int64_t r = 0; r < n; ++r) {
          ASSERT_EQ(b.out.as<float>()[c * 100 + bound[g] + r], d.out.as<float>()[c * n + r])
              << describe(spec);
        }
      }
    }
  }
}

TEST(Dequantize, requantising_the_forward_values_multiplies_the_old_scale_in) {
  Queue queue = Queue::cpu(1);
  const QuantSpec forward{.format = Format::kNvfp4, .scale_rule = ScaleRule::kFourOverSix};
  const Matrix m = rough_matrix(64, 96, 31);
  HostTensor x = bf16_tensor(m), middle(DType::kBf16, {64, 96});
  Operand q(forward, GroupAxis::kRows, 1, 64, 96);
  run(queue, quantize_op(x, Orientation::kRow, q));
  run(queue, Dequantize{q.view, {}, DecodeScale::kBlock, middle.view(), {}});
  const TensorView old_scale{q.tensor_scale.data(), DType::kF32, {1}};

  const QuantSpec eden{
      .format = Format::kNvfp4, .rounding = Rounding::kMsEden, .hadamard = 64, .signs = Signs::kFresh};
  Operand with(eden, GroupAxis::kCols, 1, 96, 64), without(eden, GroupAxis::kCols, 1, 96, 64);
  Quantize op = quantize_op(middle, Orientation::kColumn, without);
  run(queue, op);
  op.input_scale = old_scale;
  op.out = with.view;
  run(queue, op);
  EXPECT_EQ(with.codes, without.codes);
  EXPECT_EQ(with.tensor_scale[0], without.tensor_scale[0] * q.tensor_scale[0]);

  Operand mx(QuantSpec{.format = Format::kMxfp8}, GroupAxis::kCols, 1, 96, 64);
  op.out = mx.view;
  EXPECT_THROW(run(queue, op), InternalError) << "no place for the old scale";
  float carried = 0;
  op.out.tensor_scale = {&carried, DType::kF32, {1}};
  run(queue, op);
  EXPECT_EQ(carried, q.tensor_scale[0]);
}

}  // namespace
}  // namespace fp4t::test
