// Operands of products on both sides of a Mirror.
#pragma once

#include "kernels/formats/code_order.h"
#include "tests/support/coded_operand.h"
#include "tests/support/mirror.h"

namespace fp4t::test {

// What one BF16 rounding explains: a sum in another order may round to the neighbour, rarely.
constexpr Exactness kBf16Out = Nmse(1e-6);

// Plain values [rows, depth] or [depth, rows], with `scales` tensor scales (none where 0).
inline Operand plain(Mirror& m, DType dtype, int64_t rows, int64_t depth, bool transposed,
                     int64_t scales = 0) {
  Operand o;
  o.values = m.normal(dtype, transposed ? Shape{depth, rows} : Shape{rows, depth});
  o.transposed = transposed;
  if (scales > 0) o.scale = m.normal(DType::kF32, {scales});
  return o;
}

// A stack of matrices, one a group.
inline Operand stacked(Mirror& m, DType dtype, int64_t groups, int64_t rows, int64_t depth, bool transposed,
                       int64_t scales = 0) {
  Operand o;
  o.values = m.normal(dtype, transposed ? Shape{groups, depth, rows} : Shape{groups, rows, depth});
  o.transposed = transposed;
  if (scales > 0) o.scale = m.normal(DType::kF32, {scales});
  return o;
}

// Random codes, in the padding too.
inline Operand coded(Mirror& m, const QuantSpec& spec, GroupAxis axis, int64_t groups, int64_t rows,
                     int64_t cols, uint64_t seed) {
  const CodedOperand source(spec, axis, groups, rows, cols, seed);
  const QuantView& from = source.view();
  Operand o;
  o.codes = m.quant(quant_layout(spec, axis, groups, rows, cols));
  std::memcpy(o.codes.codes.data, from.codes.data, static_cast<size_t>(code_bytes(from)));
  std::memcpy(o.codes.block_scales.data, from.block_scales.data,
              static_cast<size_t>(block_scale_bytes(from)));
  if (!from.tensor_scale.empty()) {
    std::memcpy(o.codes.tensor_scale.data, from.tensor_scale.data,
                static_cast<size_t>(tensor_scale_bytes(from)));
  } else {
    o.codes.tensor_scale = {};
  }
  return o;
}

inline void put_in_stream_order(Operand& o) {
  for (int64_t i = 0; i < code_bytes(o.codes); i += 16) {
    uint32_t natural[4], stream[4];
    std::memcpy(natural, o.codes.codes.as<uint8_t>() + i, sizeof natural);
    to_stream(natural, stream);
    std::memcpy(o.codes.codes.as<uint8_t>() + i, stream, sizeof stream);
  }
  o.codes.order = CodeOrder::kStream;
}

// NVFP4 weights of products of few rows.
inline Operand streamed(Mirror& m, const QuantSpec& spec, int64_t groups, int64_t rows, int64_t cols,
                        uint64_t seed) {
  Operand o = coded(m, spec, GroupAxis::kRows, groups, rows, cols, seed);
  put_in_stream_order(o);
  return o;
}

inline QuantSpec nvfp4(BlockShape block = BlockShape::k1x16, int32_t hadamard = 0) {
  QuantSpec s;
  s.format = Format::kNvfp4;
  s.block = block;
  s.hadamard = hadamard;
  return s;
}
inline QuantSpec row_scaled() {
  QuantSpec s = nvfp4();
  s.scale_scope = ScaleScope::kRow;
  return s;
}
inline QuantSpec mxfp8() {
  QuantSpec s;
  s.format = Format::kMxfp8;
  return s;
}

// An output; accumulated into, it begins with values.
inline TensorView output(Mirror& m, DType dtype, const Shape& shape, bool accumulate = false) {
  const TensorView out = accumulate ? m.normal(dtype, shape) : m.fresh(dtype, shape);
  if (dtype == DType::kBf16) m.compare_by(out, kBf16Out);
  return out;
}

}  // namespace fp4t::test
