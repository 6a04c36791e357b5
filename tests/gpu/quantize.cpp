// Quantize and Dequantize on the GPU against the CPU, bit for bit: every legal spec, both orientations,
// ragged and empty groups, odd shapes, non-finite values, many draws.
#include "kernels/ops/quantize.h"

#include <random>

#include "tests/formats/operand.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

bool fits(const QuantSpec& spec, Orientation o) {
  return o == Orientation::kRow || spec.scale_scope == ScaleScope::kTensor;
}

constexpr Orientation kBoth[] = {Orientation::kRow, Orientation::kColumn};

// A matrix in the mirror, with what hurts.
TensorView rough(Mirror& m, int64_t rows, int64_t cols, uint64_t seed) {
  const TensorView x = m.fresh(DType::kBf16, {rows, cols});
  if (x.bytes() == 0) return x;
  HostTensor values = bf16_tensor(rough_matrix(rows, cols, seed));
  std::memcpy(x.data, values.view().data, static_cast<size_t>(x.bytes()));
  return x;
}

// Fills memory that an op leaves partly unwritten, so that both sides hold the same before and after.
Quantize quantize(Mirror& m, const TensorView& x, const QuantSpec& spec, Orientation o, int64_t groups,
                  GroupAxis axis) {
  const int64_t rows = x.dim(0), cols = x.dim(1);
  const bool row = o == Orientation::kRow, stacked = !row && axis == GroupAxis::kRows;
  Quantize op{};
  op.x = x;
  op.orientation = o;
  op.draw_key = kDrawKey;
  op.signs_key = kSignsKey;
  op.out = m.quant(quant_layout(spec, axis, groups, row ? rows : (stacked ? groups * cols : cols),
                                row ? cols : (stacked ? rows / groups : rows)));
  return op;
}

GroupAxis axis_of(Orientation o) { return o == Orientation::kRow ? GroupAxis::kRows : GroupAxis::kCols; }

// Once for the bits of codes, scales and counts, once for the energies, which are sums in another order.
void check_with_stats(Mirror& m, Quantize op) {
  op.stats = m.zeros(DType::kF64, {kNumQuantStats});
  m.check(op);
  op.measure_error = true;
  op.stats = m.zeros(DType::kF64, {kNumQuantStats});
  m.compare_by(op.stats, Nmse(1e-24));
  m.check(op);
}

std::string name(const QuantSpec& spec, Orientation o) {
  return describe(spec) + (o == Orientation::kRow ? " row" : " column");
}

TEST(GpuQuantize, every_legal_spec_in_both_orientations_is_bitwise) {
  uint64_t seed = 0;
  for (const QuantSpec& spec : all_specs()) {
    for (Orientation o : kBoth) {
      if (!fits(spec, o)) continue;
      for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {33, 90}, {150, 264}}) {
        SCOPED_TRACE(name(spec, o) + " " + std::to_string(rows) + " x " + std::to_string(cols));
        Mirror m;
        check_with_stats(m, quantize(m, rough(m, rows, cols, ++seed), spec, o, 1, axis_of(o)));
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(GpuQuantize, ragged_and_empty_groups_are_bitwise) {
  const std::vector<int32_t> offsets = {0, 0, 1, 32, 64, 97, 241, 241};  // 0 1 31 32 33 144 0 rows
  uint64_t seed = 100;
  for (const QuantSpec& spec : all_specs()) {
    for (Orientation o : kBoth) {
      if (!fits(spec, o)) continue;
      for (int64_t cols : {40, 90}) {
        SCOPED_TRACE(name(spec, o) + " cols " + std::to_string(cols));
        Mirror m;
        Quantize op = quantize(m, rough(m, cols == 40 ? 241 : 250, cols, ++seed), spec, o, 7, axis_of(o));
        op.offsets = m.i32(offsets);
        op.first_expert = cols == 40 ? 0 : 5;
        op.stats = m.zeros(DType::kF64, {kNumQuantStats});
        m.check(op);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(GpuQuantize, equal_groups_are_bitwise_with_either_group_axis) {
  uint64_t seed = 200;
  for (const QuantSpec& spec : all_specs()) {
    if (spec.hadamard > 16 && spec.hadamard < 128) continue;
    for (Orientation o : kBoth) {
      for (GroupAxis axis : {GroupAxis::kRows, GroupAxis::kCols}) {
        if (!fits(spec, o) || (o == Orientation::kRow && axis == GroupAxis::kCols)) continue;
        SCOPED_TRACE(name(spec, o));
        Mirror m;
        Quantize op = quantize(m, rough(m, 3 * 72, 88, ++seed), spec, o, 3, axis);
        op.first_expert = 7;
        op.stats = m.zeros(DType::kF64, {kNumQuantStats});
        m.check(op);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(GpuQuantize, old_scales_enter_the_result_and_the_energies) {
  for (const QuantSpec& spec : all_specs()) {
    if (spec.hadamard > 16 || spec.signs == Signs::kFresh) continue;
    for (Orientation o : kBoth) {
      if (!fits(spec, o)) continue;
      SCOPED_TRACE(name(spec, o));
      Mirror m;
      Quantize op = quantize(m, rough(m, 100, 64, 3), spec, o, 2, axis_of(o));
      op.offsets = m.i32({0, 100, 100});
      op.input_scale = m.f32({0.37f, 3.0f});
      if (spec.format == Format::kMxfp8) op.out.tensor_scale = m.fresh(DType::kF32, {2});
      check_with_stats(m, op);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(GpuQuantize, non_finite_values_follow_the_rules) {
  for (const QuantSpec& spec : all_specs()) {
    if (spec.hadamard == 32 || spec.hadamard == 64) continue;
    for (Orientation o : kBoth) {
      if (!fits(spec, o)) continue;
      for (int kind = 0; kind < 4; ++kind) {
        SCOPED_TRACE(name(spec, o) + " kind " + std::to_string(kind));
        Mirror m;
        const TensorView x = rough(m, 40, 160, static_cast<uint64_t>(kind));
        Bf16* v = x.as<Bf16>();
        if (kind != 1) v[3 * 160 + 5] = {0x7FC0}, v[17 * 160 + 130] = {0xFF81};     // NaN of both signs
        if (kind == 1 || kind == 2) v[9 * 160 + 31] = {0x7F80}, v[160] = {0xFF80};  // Inf of both signs
        if (kind == 3) {  // nothing but what does not count, and the largest and smallest numbers
          for (int i = 0; i < 40 * 160; ++i) v[i] = {static_cast<uint16_t>(i % 7 ? 0x8000 : 0x7FC0)};
          v[11] = {0xFF7F}, v[12] = {0x0001}, v[13] = {0x8001}, v[700] = {0x0080};
        }
        check_with_stats(m, quantize(m, x, spec, o, 1, axis_of(o)));
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// Magnitudes from one end of BF16 to the other: scales that saturate, underflow, or leave BF16.
TEST(GpuQuantize, every_magnitude_is_bitwise) {
  for (const QuantSpec& spec : all_specs()) {
    if (spec.hadamard > 16 || spec.signs == Signs::kFresh) continue;
    for (int exponent : {-133, -126, -120, -60, 60, 110, 120, 127}) {
      for (int spread : {0, 20, 200}) {
        SCOPED_TRACE(describe(spec) + " 2^" + std::to_string(exponent) + " spread " + std::to_string(spread));
        Mirror m;
        const TensorView x = m.fresh(DType::kBf16, {16, 64});
        std::mt19937 engine(static_cast<uint32_t>(exponent * 7 + spread));
        for (int i = 0; i < 16 * 64; ++i) {
          const int down = spread == 0 ? 0 : static_cast<int>(engine() % static_cast<uint32_t>(spread));
          const float mantissa = 1.0f + static_cast<float>(engine() % 128) / 128;
          x.as<Bf16>()[i] =
              f32_to_bf16(std::ldexp(engine() % 2 ? mantissa : -mantissa, exponent - down - i / 64 % 3));
        }
        check_with_stats(m, quantize(m, x, spec, Orientation::kRow, 1, GroupAxis::kRows));
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(GpuQuantize, draws_are_bitwise_for_many_keys_and_experts) {
  std::mt19937_64 engine(5);
  for (int round = 0; round < 60; ++round) {
    QuantSpec spec{.format = Format::kNvfp4,
                   .rounding = round % 2 ? Rounding::kMsEden : Rounding::kStochastic};
    if (round % 4 != 0) spec.hadamard = round % 3 ? 16 : 128, spec.signs = Signs::kFresh;
    if (round % 8 == 4)
      spec = {.format = Format::kNvfp4, .rounding = Rounding::kStochastic, .headroom = Headroom::k17over16};
    const Orientation o = kBoth[round / 2 % 2];
    Mirror m(static_cast<uint64_t>(round));
    SCOPED_TRACE(name(spec, o) + " round " + std::to_string(round));
    Quantize op = quantize(m, m.normal(DType::kBf16, {96 + round, 520}), spec, o, 2, axis_of(o));
    op.offsets = m.i32({0, 60, 96 + round});
    op.draw_key = {static_cast<uint32_t>(engine()), static_cast<uint32_t>(engine())};
    op.signs_key = {static_cast<uint32_t>(engine()), static_cast<uint32_t>(engine())};
    op.first_expert = round % 3 == 0 ? -1 : round * 1000;
    m.check(op);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(GpuQuantize, both_orientations_together_are_bitwise) {
  std::mt19937_64 engine(8);
  uint64_t seed = 300;
  for (auto [rounding, headroom] : {std::pair{Rounding::kNearest, Headroom::kNone},
                                    {Rounding::kStochastic, Headroom::kNone},
                                    {Rounding::kStochastic, Headroom::k17over16}}) {
    for (int hadamard : {0, 16, 64}) {
      for (HadamardOut out : {HadamardOut::kFp32, HadamardOut::kBf16}) {
        for (auto [rows, cols] : {std::pair<int64_t, int64_t>{241, 264}, {250, 90}, {1000, 40}}) {
          if (hadamard == 0 && out == HadamardOut::kBf16) continue;
          QuantSpec spec{.format = Format::kNvfp4, .rounding = rounding, .headroom = headroom},
              rotated = spec;
          rotated.hadamard = hadamard;
          rotated.hadamard_out = out;
          SCOPED_TRACE(describe(rotated) + " " + std::to_string(rows) + " x " + std::to_string(cols));
          Mirror m;
          const TensorView x = rough(m, rows, cols, ++seed);
          if (rows == 1000) x.as<Bf16>()[333] = {0x7FC0}, x.as<Bf16>()[9999] = {0xFF80};
          QuantizeBoth op{quantize(m, x, spec, Orientation::kRow, 7, GroupAxis::kRows),
                          quantize(m, x, rotated, Orientation::kColumn, 7, GroupAxis::kCols)};
          const TensorView offsets = m.i32({0, 0, 1, 32, 64, 97, 241, 241});
          for (Quantize* q : {&op.row, &op.column}) {
            q->offsets = offsets;
            q->first_expert = 3;
            q->draw_key = {static_cast<uint32_t>(engine()), static_cast<uint32_t>(engine())};
            q->stats = m.zeros(DType::kF64, {kNumQuantStats});
          }
          m.check(op);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(GpuQuantize, a_weight_and_its_transpose_together_are_bitwise) {
  uint64_t seed = 500;
  for (ScaleRound round : {ScaleRound::kFp32, ScaleRound::kPow2}) {
    for (auto [groups, rows, cols] : {std::tuple<int64_t, int64_t, int64_t>{1, 128, 128},
                                      {3, 64, 384},
                                      {5, 192, 256},
                                      {2, 80, 128},
                                      {2, 64, 96}}) {
      QuantSpec spec{.format = Format::kNvfp4, .block = BlockShape::k16x16, .scale_round = round};
      SCOPED_TRACE(describe(spec) + " " + std::to_string(groups) + " x " + std::to_string(rows) + " x " +
                   std::to_string(cols));
      Mirror m;
      const TensorView x = rough(m, groups * rows, cols, ++seed);
      Bf16* values = x.as<Bf16>();
      values[17] = {0x7FC0}, values[cols + 40] = {0xFF80}, values[5 * cols + 90] = {0x8000};
      if (groups > 1) std::fill(values + rows * cols, values + (rows + 16) * cols, Bf16{0});
      QuantizeBoth op{quantize(m, x, spec, Orientation::kRow, groups, GroupAxis::kRows),
                      quantize(m, x, spec, Orientation::kColumn, groups, GroupAxis::kRows)};
      for (Quantize* q : {&op.row, &op.column}) q->stats = m.zeros(DType::kF64, {kNumQuantStats});
      m.check(op);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(GpuQuantize, unaligned_memory_is_bitwise) {
  for (const QuantSpec& spec : all_specs()) {
    if (spec.hadamard > 16 || spec.signs == Signs::kFresh) continue;
    for (Orientation o : kBoth) {
      if (!fits(spec, o)) continue;
      SCOPED_TRACE(name(spec, o));
      Mirror m;
      const TensorView store = m.normal(DType::kBf16, {70 * 96 + 1});
      const TensorView x{store.as<Bf16>() + 1, DType::kBf16, {70, 96}};
      Quantize op = quantize(m, x, spec, o, 1, axis_of(o));
      const TensorView codes = m.fresh(DType::kU8, {op.out.codes.elements() + 1});
      op.out.codes.data = codes.as<uint8_t>() + 1;
      m.check(op);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(GpuQuantize, tensors_without_elements_are_fine) {
  for (const QuantSpec& spec : {QuantSpec{.format = Format::kMxfp8}, QuantSpec{.format = Format::kNvfp4},
                                QuantSpec{.format = Format::kNvfp4, .scale_scope = ScaleScope::kRow}}) {
    for (Orientation o : kBoth) {
      for (auto [rows, cols] : {std::pair<int64_t, int64_t>{0, 64}, {5, 0}, {0, 0}}) {
        if (!fits(spec, o)) continue;
        Mirror m;
        Quantize op = quantize(m, m.fresh(DType::kBf16, {rows, cols}), spec, o, 2, axis_of(o));
        const int32_t end = static_cast<int32_t>(rows);
        op.offsets = m.i32({0, 0, end});
        op.stats = m.zeros(DType::kF64, {kNumQuantStats});
        m.check(op);
      }
    }
  }
}

// Weights as products of few rows read them, and their way back.
TEST(GpuQuantize, codes_in_the_order_of_few_rows_are_bitwise) {
  for (const BlockShape block : {BlockShape::k1x16, BlockShape::k16x16}) {
    QuantSpec spec;
    spec.format = Format::kNvfp4;
    spec.block = block;
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{3, 90}, {96, 256}}) {
      SCOPED_TRACE(describe(spec) + " " + std::to_string(rows) + " x " + std::to_string(cols));
      Mirror m;
      Quantize op =
          quantize(m, rough(m, rows, cols, 9), spec, Orientation::kRow, rows == 96 ? 3 : 1, GroupAxis::kRows);
      op.out.order = CodeOrder::kStream;
      m.check(op);
      for (const DType type : {DType::kBf16, DType::kF32}) {
        m.check(Dequantize{op.out, {}, DecodeScale::kBlock, m.fresh(type, {rows, cols}), {}});
      }
    }
  }
}

TEST(GpuQuantize, offsets_beyond_the_rows_are_reported) {
  Mirror m;
  Quantize op = quantize(m, m.normal(DType::kBf16, {32, 32}), {.format = Format::kNvfp4}, Orientation::kRow,
                         2, GroupAxis::kRows);
  op.offsets = m.i32({0, 32, 40});
  EXPECT_THROW(m.run_on_gpu(op), InternalError);
}

// The last rows of a matrix of more than 2^31 elements, all of whose other rows are zero.
TEST(GpuQuantize, elements_beyond_2_to_the_31_are_coded) {
  constexpr int64_t kCols = 2048, kRows = (int64_t{1} << 20) + 128 + 7, kTail = 128 + 7;
  Queue cpu = Queue::cpu(4), gpu = Queue::cuda(0);
  HostTensor tail(DType::kBf16, {kTail, kCols});
  fill_normal(tail, 4);
  char* x = static_cast<char*>(gpu.allocate(kRows * kCols * 2));
  gpu.fill_bytes(x, 0, kRows * kCols * 2);
  gpu.copy_from_host(x + (kRows - kTail) * kCols * 2, tail.view().data, kTail * kCols * 2);
  for (const QuantSpec& spec :
       {QuantSpec{.format = Format::kNvfp4, .scale_rule = ScaleRule::kFourOverSix},
        QuantSpec{.format = Format::kNvfp4, .hadamard = 16}, QuantSpec{.format = Format::kMxfp8}}) {
    for (Orientation o : kBoth) {
      const bool row = o == Orientation::kRow;
      const auto layout = [&](int64_t rows) {
        return quant_layout(spec, axis_of(o), 1, row ? rows : kCols, row ? kCols : rows);
      };
      QuantView there = layout(kRows);
      for (TensorView* part : {&there.codes, &there.block_scales, &there.tensor_scale}) {
        if (part->shape.rank() > 0)
          part->data = gpu.allocate(part->shape.elements() * dtype_bytes(part->dtype));
      }
      Operand expected(spec, axis_of(o), 1, row ? kTail : kCols, row ? kCols : kTail);
      Quantize op = quantize_op(tail, o, expected);
      run(cpu, op);
      op.x = {x, DType::kBf16, {kRows, kCols}};
      op.out = there;
      run(gpu, op);
      gpu.synchronize();
      // Row by row of the result: its last bytes, or its last rows.
      const int64_t result_rows = row ? kTail : kCols, skipped = row ? kRows - kTail : 0;
      const auto compare = [&](const TensorView& all, const TensorView& last) {
        const int64_t length = all.dim(1), own = last.dim(1);
        std::vector<uint8_t> got(static_cast<size_t>(own));
        for (int64_t r = 0; r < result_rows; r += row ? 1 : 97) {
          gpu.copy_to_host(got.data(), all.as<uint8_t>() + (skipped + r) * length + length - own, own);
          ASSERT_EQ(0, std::memcmp(got.data(), last.as<uint8_t>() + r * own, static_cast<size_t>(own)))
              << name(spec, o) << " row " << r;
        }
      };
      compare(there.codes, expected.view.codes);
      compare(there.block_scales, expected.view.block_scales);
      for (const TensorView& part : {there.codes, there.block_scales, there.tensor_scale}) {
        if (part.data) gpu.release(part.data);
      }
    }
  }
  gpu.release(x);
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
