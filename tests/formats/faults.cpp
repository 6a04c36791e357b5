// Mistakes that other quantisers shipped (FAULTS.md section 1), each with the case that shows it.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tests/formats/operand.h"

namespace fp4t::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

Matrix constant(int64_t rows, int64_t cols, float value) {
  return {rows, cols, std::vector<float>(static_cast<size_t>(rows * cols), bf16_to_f32(f32_to_bf16(value)))};
}

int64_t nan_scales(const Operand& q) {
  int64_t n = 0;
  for (size_t i = 0; i < q.block_scales.size() - Operand::kGuard; ++i)
    n += (q.block_scales[i] & 0x7F) == 0x7F;
  return n;
}

TEST(Faults, a_zero_block_beside_small_values_gets_no_nan_scale_and_decodes_to_zero) {
  Queue queue = Queue::cpu(1);
  Matrix m = constant(32, 64, 1e-3f);
  for (int64_t c = 0; c < 64; ++c) m.at(1, c) = 0;
  for (int64_t r = 16; r < 32; ++r) {
    for (int64_t c = 0; c < 64; ++c) m.at(r, c) = 0;
  }
  HostTensor x = bf16_tensor(m);
  for (const QuantSpec& spec : all_specs()) {
    if (spec.format != Format::kNvfp4) continue;
    Operand q(spec, GroupAxis::kRows, 1, 32, 64);
    run(queue, quantize_op(x, Orientation::kRow, q));
    EXPECT_EQ(nan_scales(q), 0) << describe(spec);
    const std::vector<float> y = decoded(queue, q);
    for (int64_t r = 16; r < 32; ++r) {
      for (int64_t c = 0; c < 64; ++c) ASSERT_EQ(y[static_cast<size_t>(r * 64 + c)], 0) << describe(spec);
    }
    if (spec.block == BlockShape::k1x16) {
      const uint8_t zero = spec.rounding == Rounding::kMsEden ? 0x38 : 0;
      EXPECT_EQ(q.block_scales[static_cast<size_t>(20 * (q.view.padded_cols / 16))], zero) << describe(spec);
      for (int64_t c = 0; c < 64; ++c) ASSERT_EQ(y[static_cast<size_t>(64 + c)], 0) << describe(spec);
    }
  }
}

TEST(Faults, ms_eden_stores_scale_one_for_an_all_zero_block) {
  Queue queue = Queue::cpu(1);
  Matrix m = constant(2, 32, 0);
  for (int64_t c = 0; c < 32; ++c) m.at(0, c) = static_cast<float>(c);
  HostTensor x = bf16_tensor(m);
  const QuantSpec spec{
      .format = Format::kNvfp4, .rounding = Rounding::kMsEden, .hadamard = 16, .signs = Signs::kFresh};
  Operand q(spec, GroupAxis::kRows, 1, 2, 32);
  run(queue, quantize_op(x, Orientation::kRow, q));
  EXPECT_EQ(q.block_scales[2], 0x38);
  EXPECT_EQ(q.block_scales[3], 0x38);
}

TEST(Faults, rows_of_zeros_stay_finite_in_every_format_alone_and_as_padding) {
  Queue queue = Queue::cpu(1);
  for (const QuantSpec& spec : all_specs()) {
    for (bool all : {true, false}) {
      Matrix m = constant(20, 40, 0);
      if (!all) m.at(3, 5) = 2.5f;
      HostTensor x = bf16_tensor(m);
      Operand q(spec, GroupAxis::kRows, 1, 20, 40);
      run(queue, quantize_op(x, Orientation::kRow, q));
      for (float s : q.tensor_scale) ASSERT_TRUE(std::isfinite(s) && s > 0) << describe(spec);
      const std::vector<float> y = decoded(queue, q);
      for (size_t i = 0; i < y.size(); ++i) {
        ASSERT_TRUE(std::isfinite(y[i])) << describe(spec);
        ASSERT_TRUE(i / 40 == 3 || y[i] == 0) << describe(spec);
      }
    }
  }
}

TEST(Faults, a_block_whose_scale_underflows_is_flushed_and_counted_and_never_divides) {
  Queue queue = Queue::cpu(1);
  Matrix m = constant(1, 64, 1e-4f);
  m.at(0, 0) = 1e4f;
  HostTensor x = bf16_tensor(m), stats(DType::kF64, {kNumQuantStats});
  Operand q(QuantSpec{.format = Format::kNvfp4}, GroupAxis::kRows, 1, 1, 64);
  stats.zero();
  Quantize op = quantize_op(x, Orientation::kRow, q);
  op.stats = stats.view();
  op.measure_error = true;
  run(queue, op);
  // 1e-4 / 1e4 = 2^-26.6, far below the 2^-18.8 that an E4M3 scale can follow.
  for (int b = 1; b < 4; ++b) {
    EXPECT_EQ(q.block_scales[static_cast<size_t>(b)], 0);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(q.codes[static_cast<size_t>(8 * b + i)], 0x77) << "x * FLT_MAX";
  }
  const std::vector<float> y = decoded(queue, q);
  for (size_t i = 1; i < 64; ++i) EXPECT_EQ(y[i], 0);
  EXPECT_NEAR(y[0], 1e4f, 1e4f / 16);
  EXPECT_EQ(stats.as<double>()[kStatFlushed], 63);
  const double error = stats.as<double>()[kStatErrorEnergy], signal = stats.as<double>()[kStatSignalEnergy];
  EXPECT_GE(error, 63 * 0.99e-8);
  EXPECT_LT(error / signal, 1e-3);
}

// A non-finite value at every place of a block, in both orientations.
void check_non_finite(const QuantSpec& spec, float bad, Orientation o) {
  Queue queue = Queue::cpu(1);
  const bool row = o == Orientation::kRow;
  for (int64_t place = 0; place < 32; ++place) {
    Matrix m = constant(row ? 3 : 32, row ? 32 : 3, 0.5f);
    (row ? m.at(1, place) : m.at(place, 1)) = bad;
    HostTensor x = bf16_tensor(m), stats(DType::kF64, {kNumQuantStats});
    stats.zero();
    Operand q(spec, row ? GroupAxis::kRows : GroupAxis::kCols, 1, 3, 32);
    Quantize op = quantize_op(x, o, q);
    op.stats = stats.view();
    run(queue, op);
    EXPECT_EQ(stats.as<double>()[kStatNonFinite], 1) << describe(spec) << " at " << place;
    const size_t element = static_cast<size_t>(32 + place);
    if (spec.format == Format::kMxfp8) {
      EXPECT_EQ(q.codes[element], std::isnan(bad) ? 0x7F : std::signbit(bad) ? 0xFE : 0x7E);
      EXPECT_EQ(q.block_scales[1], std::isnan(bad) ? q.block_scales[0] : 254);
    } else if (spec.hadamard == 0) {
      const uint32_t code = q.codes[element / 2] >> (element % 2 * 4) & 15;
      EXPECT_EQ(code, !std::isnan(bad) && std::signbit(bad) ? 15u : 7u);
    }
  }
}

TEST(Faults, a_nan_or_infinity_is_seen_at_every_place_of_a_block_in_both_orientations) {
  for (const QuantSpec& spec : all_specs()) {
    for (float bad : {std::nanf(""), -std::nanf(""), kInf, -kInf}) {
      check_non_finite(spec, bad, Orientation::kRow);
      if (spec.scale_scope == ScaleScope::kTensor) check_non_finite(spec, bad, Orientation::kColumn);
    }
  }
}

// Values of a coded row that BF16 cannot hold, counted from its codes.
int64_t inexact_in_row(const Operand& q, int64_t row) {
  const QuantSpec& spec = q.view.spec;
  const int64_t length = q.view.padded_cols, block = block_length(spec);
  int64_t count = 0;
  for (int64_t c = 0; c < length; ++c) {
    const auto i = static_cast<size_t>(row * length + c);
    const uint32_t s = q.block_scales[static_cast<size_t>(row * (length / block) + c / block)];
    double value = 0;
    if (spec.format == Format::kMxfp8) {
      value = std::ldexp(double{e4m3_value(q.codes[i])}, static_cast<int>(s) - 127);
    } else {
      const bool by_row = spec.scale_scope == ScaleScope::kRow;
      value = double{e2m1_value(q.codes[i / 2] >> (i % 2 * 4) & 15u)} * double{e4m3_value(s)} *
              double{q.tensor_scale[by_row ? static_cast<size_t>(row) : 0]};
    }
    const double held = double{from_bf16(to_bf16(static_cast<float>(value)))};
    count += held == value ? 0 : 1;
  }
  return count;
}

// The scales at which code x scale leaves BF16: each row at another power of two.
TEST(Faults, values_that_bf16_cannot_hold_are_counted) {
  Queue queue = Queue::cpu(2);
  QuantSpec tensor{.format = Format::kNvfp4, .scale_round = ScaleRound::kPow2}, row = tensor;
  row.scale_scope = ScaleScope::kRow;
  for (const QuantSpec& spec : {QuantSpec{.format = Format::kMxfp8}, tensor, row}) {
    int64_t outside = 0;
    for (int exponent = -133; exponent <= 128; ++exponent) {
      Matrix m = rough_matrix(5, 64, 31);
      for (float& v : m.v) {
        // The largest round up to 2^128 in MXFP8; small ones underflow in NVFP4.
        v = bf16_to_f32(f32_to_bf16(static_cast<float>(std::ldexp(0.99 * std::tanh(double{v}), exponent))));
      }
      HostTensor x = bf16_tensor(m), stats(DType::kF64, {kNumQuantStats});
      stats.zero();
      Operand q(spec, GroupAxis::kRows, 1, 5, 64);
      Quantize op = quantize_op(x, Orientation::kRow, q);
      op.stats = stats.view();
      run(queue, op);
      int64_t expected = 0;
      for (int64_t r = 0; r < 5; ++r) expected += inexact_in_row(q, r);
      ASSERT_EQ(stats.as<double>()[kStatInexact], static_cast<double>(expected))
          << describe(spec) << " at 2^" << exponent;
      const bool ordinary = exponent >= -100 && exponent <= 120;
      ASSERT_TRUE(expected == 0 || !ordinary) << describe(spec) << " at 2^" << exponent;
      outside += expected;
    }
    EXPECT_GT(outside, 0) << describe(spec);
  }
}

TEST(Faults, a_nan_does_not_hide_the_maximum_of_its_block_or_tensor) {
  Queue queue = Queue::cpu(1);
  const Matrix clean = rough_matrix(20, 64, 77);
  for (const QuantSpec& spec : {QuantSpec{.format = Format::kMxfp8}, QuantSpec{.format = Format::kNvfp4}}) {
    Matrix dirty = clean;
    // Not the largest of its block, so leaving it out changes no scale.
    int64_t at = 0;
    for (int64_t c = 0; c < 16; ++c) at = std::fabs(clean.at(2, c)) < std::fabs(clean.at(2, at)) ? c : at;
    dirty.at(2, at) = std::nanf("");
    HostTensor a = bf16_tensor(clean), b = bf16_tensor(dirty);
    Operand qa(spec, GroupAxis::kRows, 1, 20, 64), qb(spec, GroupAxis::kRows, 1, 20, 64);
    run(queue, quantize_op(a, Orientation::kRow, qa));
    run(queue, quantize_op(b, Orientation::kRow, qb));
    EXPECT_EQ(qa.block_scales, qb.block_scales) << describe(spec);
    EXPECT_EQ(qa.tensor_scale, qb.tensor_scale) << describe(spec);
  }
}

TEST(Faults, experts_with_any_number_of_tokens_keep_their_padding_out_of_the_products) {
  // dW = dY^T X with groups 0, 1, 31, 32, 33, 44: the padded columns must be exact zeros on both sides.
  Queue queue = Queue::cpu(1);
  HostTensor offsets = i32_tensor({0, 0, 1, 32, 64, 97, 141});
  for (const QuantSpec& spec :
       {QuantSpec{.format = Format::kMxfp8}, QuantSpec{.format = Format::kNvfp4},
        QuantSpec{
            .format = Format::kNvfp4, .rounding = Rounding::kStochastic, .headroom = Headroom::k17over16}}) {
    HostTensor x = bf16_tensor(rough_matrix(141, 18, 3));
    Operand q(spec, GroupAxis::kCols, 6, 18, 141);
    Quantize op = quantize_op(x, Orientation::kColumn, q);
    op.offsets = offsets.view();
    run(queue, op);
    int64_t begin = 0;
    for (int64_t n : {0, 1, 31, 32, 33, 44}) {
      const int64_t length = align_up(n, 32);
      for (int64_t r = 0; r < 18; ++r) {
        for (int64_t c = n; c < length; ++c) {
          const size_t element = static_cast<size_t>(18 * begin + r * length + c);
          const uint32_t code = spec.format == Format::kMxfp8
                                    ? q.codes[element]
                                    : q.codes[element / 2] >> (element % 2 * 4) & 15u;
          ASSERT_EQ(code, 0u) << describe(spec) << " group of " << n << " row " << r << " column " << c;
        }
      }
      begin += length;
    }
  }
}

}  // namespace
}  // namespace fp4t::test
