// Dequantize on the GPU against the CPU: every byte is a legal code, so random bytes are the operands.
#include <random>

#include "kernels/ops/quantize.h"
#include "tests/formats/operand.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

// Bytes below `limit`. Scale byte 255 is left out: no quantiser writes it, and a NaN times a NaN has the
// bits of either.
void fill_random(const TensorView& t, std::mt19937& engine, uint32_t limit = 256) {
  for (int64_t i = 0; i < t.elements(); ++i) t.as<uint8_t>()[i] = static_cast<uint8_t>(engine() % limit);
}

const QuantSpec kSpecs[] = {
    {.format = Format::kMxfp8},
    {.format = Format::kNvfp4},
    {.format = Format::kNvfp4, .block = BlockShape::k16x16},
    {.format = Format::kNvfp4, .scale_scope = ScaleScope::kRow, .scale_round = ScaleRound::kPow2},
    {.format = Format::kNvfp4, .hadamard = 128},
};

TEST(GpuDequantize, any_codes_are_bitwise_in_every_layout) {
  std::mt19937 engine(1);
  for (const QuantSpec& spec : kSpecs) {
    for (GroupAxis axis : {GroupAxis::kRows, GroupAxis::kCols}) {
      for (bool ragged : {false, true}) {
        for (auto [rows, cols] : {std::pair<int64_t, int64_t>{150, 90}, {90, 150}, {150, 300}, {300, 150}}) {
          for (DecodeScale scale : {DecodeScale::kBlock, DecodeScale::kRow, DecodeScale::kFull}) {
            if (scale == DecodeScale::kRow && spec.scale_scope != ScaleScope::kRow) continue;
            if (axis == GroupAxis::kCols && spec.scale_scope == ScaleScope::kRow) continue;
            for (DType out : {DType::kBf16, DType::kF32}) {
              Mirror m;
              SCOPED_TRACE(describe(spec) + (axis == GroupAxis::kRows ? " rows " : " cols ") +
                           std::to_string(rows) + " x " + std::to_string(cols) +
                           (ragged ? " ragged" : " equal"));
              const int64_t groups = ragged ? 5 : 3;
              Dequantize op{};
              op.x = m.quant(quant_layout(spec, axis, groups, rows, cols));
              fill_random(op.x.codes, engine);
              fill_random(op.x.block_scales, engine, 255);
              for (int64_t i = 0; i < op.x.tensor_scale.elements(); ++i) {
                op.x.tensor_scale.as<float>()[i] = std::ldexp(1.0f + static_cast<float>(i % 5) / 8, -3);
              }
              const int32_t end = static_cast<int32_t>(axis == GroupAxis::kRows ? rows : cols);
              if (ragged) op.offsets = m.i32({0, 31, 31, 32, 65, end - 4});
              op.scale = scale;
              op.out = m.fresh(out, {rows, cols});
              op.inexact = m.zeros(DType::kF64, {1});
              m.check(op);
              if (testing::Test::HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(GpuDequantize, unaligned_and_empty_operands_are_fine) {
  std::mt19937 engine(2);
  for (const QuantSpec& spec : kSpecs) {
    Mirror m;
    Dequantize op{};
    op.x = m.quant(quant_layout(spec, GroupAxis::kRows, 1, 48, 128));
    const TensorView codes = m.fresh(DType::kU8, {op.x.codes.elements() + 1});
    const TensorView out = m.fresh(DType::kBf16, {48 * 128 + 1});
    fill_random(codes, engine);
    fill_random(op.x.block_scales, engine, 255);
    op.x.codes.data = codes.as<uint8_t>() + 1;
    for (int64_t i = 0; i < op.x.tensor_scale.elements(); ++i) op.x.tensor_scale.as<float>()[i] = 0.5f;
    op.scale = DecodeScale::kFull;
    op.out = {out.as<Bf16>() + 1, DType::kBf16, {48, 128}};
    m.check(op);
    op = {};
    op.x = m.quant(quant_layout(spec, GroupAxis::kRows, 2, 0, 128));
    op.scale = DecodeScale::kBlock;
    op.out = m.fresh(DType::kF32, {0, 128});
    m.check(op);
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
