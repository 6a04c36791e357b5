// Owned quantised operands and inputs for the tests of this folder.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/formats/bf16.h"
#include "kernels/formats/legal.h"
#include "kernels/ops/run.h"
#include "tests/formats/reference.h"
#include "tests/support/tensors.h"

namespace fp4t::test {

// A QuantView with its memory, filled with 0xFF before use; a guard byte pattern follows every part.
struct Operand {
  static constexpr size_t kGuard = 64;
  std::vector<uint8_t> codes, block_scales;
  std::vector<float> tensor_scale;
  QuantView view;

  Operand(const QuantSpec& spec, GroupAxis axis, int64_t groups, int64_t rows, int64_t cols)
      : view(quant_layout(spec, axis, groups, rows, cols)) {
    codes.assign(static_cast<size_t>(code_bytes(view)) + kGuard, 0xFF);
    block_scales.assign(static_cast<size_t>(block_scale_bytes(view)) + kGuard, 0xFF);
    tensor_scale.assign(static_cast<size_t>(tensor_scale_bytes(view) / 4), std::nanf(""));
    view.codes.data = codes.data();
    view.block_scales.data = block_scales.data();
    if (spec.format == Format::kNvfp4) view.tensor_scale.data = tensor_scale.data();
  }
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;
  bool guards_intact() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (codes[codes.size() - 1 - i] != 0xFF || block_scales[block_scales.size() - 1 - i] != 0xFF)
        return false;
    }
    return true;
  }
};

// Everything that the recipe can ask of an operand in this format, without illegal combinations.
inline std::vector<QuantSpec> all_specs() {
  std::vector<QuantSpec> out = {QuantSpec{.format = Format::kMxfp8}};
  for (auto block : {BlockShape::k1x16, BlockShape::k16x16})
    for (auto rule : {ScaleRule::kAmax, ScaleRule::kFourOverSix})
      for (auto scope : {ScaleScope::kTensor, ScaleScope::kRow})
        for (auto round : {ScaleRound::kFp32, ScaleRound::kPow2})
          for (auto rounding : {Rounding::kNearest, Rounding::kStochastic, Rounding::kMsEden})
            for (auto headroom : {Headroom::kNone, Headroom::k17over16})
              for (int32_t hadamard : {0, 16, 32, 64, 128})
                for (auto signs : {Signs::kFixed, Signs::kFresh})
                  for (auto hout : {HadamardOut::kFp32, HadamardOut::kBf16}) {
                    const QuantSpec s{Format::kNvfp4, block,    rule,  scope, round,          rounding,
                                      headroom,       hadamard, signs, hout,  Source::kTensor};
                    if (conflict_in(s).empty()) out.push_back(s);
                  }
  return out;
}

// BF16 values with everything that hurts: scales apart by rows, zero blocks, negative zeros, halfway points,
// subnormals, large outliers.
inline Matrix rough_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal;
  Matrix m{rows, cols, std::vector<float>(static_cast<size_t>(rows * cols))};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const uint64_t kind = (static_cast<uint64_t>(r / 5 + c / 16) * 2654435761u + seed) % 11;
      float x = normal(engine);
      if (kind == 0) x = engine() % 2 ? 0.0f : -0.0f;
      if (kind == 1) x *= 1e-5f;
      if (kind == 2) x = static_cast<float>(static_cast<int>(engine() % 25) - 12) * 0.25f;
      if (kind == 3 && c % 16 == 3) x *= 50;
      if (kind == 4 && r % 3 == 0) x = 1e-39f * x;
      m.at(r, c) = bf16_to_f32(f32_to_bf16(x));
    }
  }
  return m;
}

inline HostTensor bf16_tensor(const Matrix& m) {
  HostTensor t(DType::kBf16, {m.rows, m.cols});
  for (size_t i = 0; i < m.v.size(); ++i) t.as<Bf16>()[i] = f32_to_bf16(m.v[i]);
  return t;
}

inline HostTensor i32_tensor(const std::vector<int32_t>& values) {
  HostTensor t(DType::kI32, {static_cast<int64_t>(values.size())});
  std::memcpy(t.view().data, values.data(), values.size() * 4);
  return t;
}

inline constexpr PhiloxKey kDrawKey{0x12345678u, 0x9ABCDEF0u};
inline constexpr PhiloxKey kSignsKey{0x0BADCAFEu, 0x600DF00Du};

// An op with this suite's keys; the caller adds what else it needs.
inline Quantize quantize_op(HostTensor& x, Orientation orientation, const Operand& out) {
  Quantize op{};
  op.x = x.view();
  op.orientation = orientation;
  op.draw_key = kDrawKey;
  op.signs_key = kSignsKey;
  op.out = out.view;
  return op;
}

// The values that the codes stand for, row by row.
inline std::vector<float> decoded(Queue& queue, const Operand& q) {
  HostTensor out(DType::kF32, {q.view.rows, q.view.cols});
  run(queue, Dequantize{q.view, {}, DecodeScale::kFull, out.view(), {}});
  return {out.as<float>(), out.as<float>() + out.elements()};
}

}  // namespace fp4t::test
