// Owned codes and scales with random bits, and a decoder of its own to read them: products of codes are
// tested against this, not against the decoder that the product uses.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/base/numeric.h"
#include "kernels/formats/quant.h"
#include "kernels/ops/gemm.h"
#include "tests/support/gemm_reference.h"

namespace fp4t::test {

inline float plain_e2m1(uint32_t code) {
  constexpr float kMagnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kMagnitude[code & 7] : kMagnitude[code & 7];
}

inline float plain_e4m3(uint32_t code) {
  const int exponent = static_cast<int>(code >> 3 & 15);
  const float mantissa = static_cast<float>(code & 7);
  const float magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// Stored codes of a matrix; every stored element, padding too, holds a finite random code.
class CodedOperand {
 public:
  CodedOperand(const QuantSpec& spec, GroupAxis axis, int64_t groups, int64_t rows, int64_t cols,
               uint64_t seed)
      : view_(quant_layout(spec, axis, groups, rows, cols)) {
    std::mt19937_64 engine(seed);
    codes_.resize(static_cast<size_t>(code_bytes(view_)));
    scales_.resize(static_cast<size_t>(block_scale_bytes(view_)));
    tensor_scales_.resize(static_cast<size_t>(tensor_scale_bytes(view_) / 4));
    const bool nvfp4 = spec.format == Format::kNvfp4;
    for (auto& c : codes_) {
      c = static_cast<uint8_t>(engine());
      if (!nvfp4 && (c & 0x7F) == 0x7F) c = 0x38;
    }
    for (auto& s : scales_) s = static_cast<uint8_t>(nvfp4 ? 0x28 + engine() % 32 : 120 + engine() % 8);
    for (auto& s : tensor_scales_) s = 0.25f + static_cast<float>(engine() % 1000) * 0.001f;
    view_.codes.data = codes_.data();
    view_.block_scales.data = scales_.data();
    if (nvfp4) view_.tensor_scale.data = tensor_scales_.data();
    if (!nvfp4) view_.tensor_scale = {};
  }
  CodedOperand(const CodedOperand&) = delete;
  CodedOperand& operator=(const CodedOperand&) = delete;

  const QuantView& view() const { return view_; }
  Operand operand() const {
    Operand o;
    o.codes = view_;
    return o;
  }
  // Tensor scale of group g or row g, kNoScale for MXFP8.
  float scale(int64_t g) const {
    return tensor_scales_.empty() ? kNoScale : tensor_scales_[static_cast<size_t>(g)];
  }
  std::vector<float>& tensor_scales() { return tensor_scales_; }

  // Stored rows [begin, begin + count) of a kRows view, the first `depth` elements of each.
  Dense rows(int64_t begin, int64_t count, int64_t depth) const {
    Dense d(count, depth);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t k = 0; k < depth; ++k) d.at(r, k) = value(0, view_.padded_cols, begin + r, k);
    }
    return d;
  }
  // The group of a kCols view that is stored from column `begin` on, `width` wide: its first `depth`
  // elements of the logical rows.
  Dense group(int64_t begin, int64_t width, int64_t depth) const {
    Dense d(view_.rows, depth);
    for (int64_t r = 0; r < view_.rows; ++r) {
      for (int64_t k = 0; k < depth; ++k) d.at(r, k) = value(begin * view_.padded_rows, width, r, k);
    }
    return d;
  }

 private:
  // Element (row, k) of a stored matrix of this width whose first element is element `origin`.
  float value(int64_t origin, int64_t width, int64_t row, int64_t k) const {
    const int64_t i = origin + row * width + k;
    const int64_t block = block_length(view_.spec), outer = outer_padding(view_.spec);
    const int64_t scale = origin / (block * outer) + row / outer * (width / block) + k / block;
    const uint8_t s = scales_[static_cast<size_t>(scale)];
    if (view_.spec.format == Format::kNvfp4) {
      const uint32_t pair = codes_[static_cast<size_t>(i / 2)];
      return plain_e2m1(i % 2 == 0 ? pair & 15 : pair >> 4) * plain_e4m3(s);
    }
    return plain_e4m3(codes_[static_cast<size_t>(i)]) * std::ldexp(1.0f, s - 127);
  }

  QuantView view_;
  std::vector<uint8_t> codes_, scales_;
  std::vector<float> tensor_scales_;
};

}  // namespace fp4t::test
