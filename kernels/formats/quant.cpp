#include "kernels/formats/quant.h"

#include <numeric>

#include "kernels/base/numeric.h"

namespace fp4t {

int64_t block_length(const QuantSpec& spec) { return spec.format == Format::kMxfp8 ? 32 : 16; }

int64_t contraction_padding(const QuantSpec& spec) {
  if (!spec.quantised()) return 1;
  return std::lcm(std::lcm(block_length(spec), std::max<int64_t>(spec.hadamard, 1)), int64_t{32});
}

int64_t outer_padding(const QuantSpec& spec) {
  return spec.format == Format::kNvfp4 && spec.block == BlockShape::k16x16 ? 16 : 1;
}

QuantView quant_layout(const QuantSpec& spec, GroupAxis axis, int64_t groups, int64_t rows, int64_t cols) {
  FP4T_CHECK(spec.quantised(), "no codes in ", name_of(spec.format));
  QuantView v;
  v.spec = spec;
  v.group_axis = axis;
  v.groups = groups;
  v.rows = rows;
  v.cols = cols;
  const int64_t pad = contraction_padding(spec);
  const int64_t outer = outer_padding(spec);
  // Every group may need a whole padding of its own; the bound holds for any split of the elements.
  v.padded_rows = axis == GroupAxis::kRows && outer > 1
                      ? (groups == 1 ? align_up(rows, outer) : align_up(rows + groups * (outer - 1), outer))
                      : align_up(rows, outer);
  v.padded_cols =
      axis == GroupAxis::kCols && groups > 1 ? align_up(cols + groups * (pad - 1), pad) : align_up(cols, pad);
  const int64_t per_byte = spec.format == Format::kNvfp4 ? 2 : 1;
  v.codes = {nullptr, DType::kU8, {v.padded_rows, v.padded_cols / per_byte}};
  v.block_scales = {nullptr, DType::kU8, {v.padded_rows / outer, v.padded_cols / block_length(spec)}};
  if (spec.format == Format::kNvfp4) {
    v.tensor_scale = {nullptr, DType::kF32, {spec.scale_scope == ScaleScope::kRow ? rows : groups}};
  }
  return v;
}

int64_t code_bytes(const QuantView& v) { return v.codes.shape.elements(); }
int64_t block_scale_bytes(const QuantView& v) { return v.block_scales.shape.elements(); }
int64_t tensor_scale_bytes(const QuantView& v) {
  return v.spec.format == Format::kNvfp4 ? v.tensor_scale.shape.elements() * 4 : 0;
}

const char* name_of(Format v) {
  switch (v) {
    case Format::kBf16:
      return "bf16";
    case Format::kFp32:
      return "fp32";
    case Format::kMxfp8:
      return "mxfp8";
    case Format::kNvfp4:
      return "nvfp4";
  }
  return "?";
}
const char* name_of(BlockShape v) { return v == BlockShape::k1x16 ? "1x16" : "16x16"; }
const char* name_of(ScaleRule v) { return v == ScaleRule::kAmax ? "amax" : "four_over_six"; }
const char* name_of(ScaleScope v) { return v == ScaleScope::kTensor ? "tensor" : "row"; }
const char* name_of(ScaleRound v) { return v == ScaleRound::kFp32 ? "fp32" : "pow2"; }
const char* name_of(Rounding v) {
  switch (v) {
    case Rounding::kNearest:
      return "nearest";
    case Rounding::kStochastic:
      return "stochastic";
    case Rounding::kMsEden:
      return "ms_eden";
  }
  return "?";
}
const char* name_of(Headroom v) { return v == Headroom::kNone ? "none" : "17/16"; }
const char* name_of(Signs v) { return v == Signs::kFixed ? "fixed" : "fresh"; }
const char* name_of(HadamardOut v) { return v == HadamardOut::kFp32 ? "fp32" : "bf16"; }
const char* name_of(Source v) { return v == Source::kTensor ? "tensor" : "forward"; }

std::string describe(const QuantSpec& s) {
  std::string out = name_of(s.format);
  const QuantSpec d;
  if (s.format == Format::kNvfp4) {
    out += std::string(" ") + name_of(s.block);
    if (s.scale_rule != d.scale_rule) out += std::string(" ") + name_of(s.scale_rule);
    if (s.scale_scope != d.scale_scope) out += std::string(" scope ") + name_of(s.scale_scope);
    if (s.scale_round != d.scale_round) out += std::string(" scale ") + name_of(s.scale_round);
    if (s.rounding != d.rounding) out += std::string(" ") + name_of(s.rounding);
    if (s.headroom != d.headroom) out += std::string(" headroom ") + name_of(s.headroom);
    if (s.hadamard != 0) {
      out += " hadamard " + std::to_string(s.hadamard) + " " + name_of(s.signs);
      if (s.hadamard_out != d.hadamard_out) out += std::string(" rotated to ") + name_of(s.hadamard_out);
    }
  }
  if (s.source != d.source) out += std::string(" source ") + name_of(s.source);
  return out;
}

}  // namespace fp4t
