// The quantisers of NUMERICS.md section 0.0 once more, as plain loops over one matrix: slow, without lanes,
// tiles, groups or orientations, written from the text. Only the element codecs are shared with the code
// under test; they have exhaustive tests of their own.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/base/numeric.h"
#include "kernels/base/philox.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/e2m1.h"
#include "kernels/formats/e4m3.h"
#include "kernels/formats/e8m0.h"
#include "kernels/formats/quant.h"

namespace fp4t::test {

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<float> v;
  float& at(int64_t r, int64_t c) { return v[static_cast<size_t>(r * cols + c)]; }
  float at(int64_t r, int64_t c) const { return v[static_cast<size_t>(r * cols + c)]; }
};

inline Matrix transposed(const Matrix& m) {
  Matrix out{m.cols, m.rows, std::vector<float>(m.v.size())};
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t c = 0; c < m.cols; ++c) out.at(c, r) = m.at(r, c);
  }
  return out;
}

struct ReferenceKeys {
  PhiloxKey draw, signs;
  uint64_t draw_base = 0;
  bool weight_is_transposed = false;  // the matrix is the transpose of what lies in memory
};

struct ReferenceResult {
  std::vector<uint8_t> codes, block_scales;  // padded shape, as stored
  std::vector<float> tensor_scale;
  Matrix rotated;  // the values that were coded, padded shape
  double flushed = 0, clipped = 0, chose_four = 0;
};

inline float magnitude_max(float top, float x) { return std::fabs(x) > top ? std::fabs(x) : top; }

// Pads to the stored shape and rotates.
inline Matrix padded_and_rotated(const Matrix& x, const QuantSpec& spec, const ReferenceKeys& keys) {
  Matrix m{align_up(x.rows, outer_padding(spec)), align_up(x.cols, contraction_padding(spec)), {}};
  m.v.resize(static_cast<size_t>(m.rows * m.cols), 0.0f);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) m.at(r, c) = x.at(r, c);
  }
  const int64_t d = spec.hadamard;
  if (d == 0) return m;
  const PhiloxBits fresh = philox4x32(keys.signs, 0, 0, 0, 0);
  const std::string fixed = "+++-+------+-+--";
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t g = 0; g < m.cols; g += d) {
      float* v = &m.at(r, g);
      for (int64_t i = 0; i < d; ++i) {
        const bool minus = spec.signs == Signs::kFixed ? fixed[static_cast<size_t>(i % 16)] == '-'
                                                       : (fresh.word[i / 32] >> (i % 32) & 1) != 0;
        v[i] *= minus ? -1.0f : 1.0f;
      }
      for (int64_t h = 1; h < d; h *= 2) {
        for (int64_t i = 0; i < d; ++i) {
          if (i & h) continue;
          const float a = v[i], b = v[i + h];
          v[i] = a + b;
          v[i + h] = a - b;
        }
      }
      const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));
      for (int64_t i = 0; i < d; ++i) v[i] *= scale;
    }
  }
  if (spec.hadamard_out == HadamardOut::kBf16) {
    for (float& v : m.v) v = bf16_to_f32(f32_to_bf16(v));
  }
  return m;
}

struct ReferenceScale {
  float encode, decode;
};

inline ReferenceScale reference_tensor_scale(const QuantSpec& spec, float amax) {
  const float huge = std::numeric_limits<float>::max();
  if (spec.rounding == Rounding::kMsEden) {
    const float v = static_cast<float>(6 / ((17.0 / 16) * 0.93));
    return {0, amax == 0 ? 1.0f : amax / (255.99f * v)};
  }
  const float top = spec.headroom == Headroom::k17over16         ? 448.0f * static_cast<float>(96.0 / 17)
                    : spec.scale_rule == ScaleRule::kFourOverSix ? 256.0f * 6.0f
                                                                 : 448.0f * 6.0f;
  float encode = std::fmin(top / amax, huge);
  if (amax == 0 || encode == 0) encode = 1;
  float decode = 1.0f / encode;
  if (spec.scale_round == ScaleRound::kPow2) {
    float power = 0x1p-126f;
    while (power < decode) power *= 2;
    decode = power;
    encode = 1.0f / power;
  }
  return {encode, decode};
}

namespace reference_detail {

inline float factor_of(uint32_t scale, float decode) {
  return std::fmin(1.0f / (e4m3_value(scale) * decode), std::numeric_limits<float>::max());
}

// Candidate error of a block of `height` rows; a transposed tile is summed as it lies in memory.
inline float candidate_error(const Matrix& m, int64_t r0, int64_t c0, int64_t height, uint32_t scale,
                             float decode, bool as_transposed) {
  const float factor = factor_of(scale, decode);
  float total = 0;
  for (int64_t a = 0; a < height; ++a) {
    float row = 0;
    for (int64_t b = 0; b < 16; ++b) {
      const float x = as_transposed ? m.at(r0 + b, c0 + a) : m.at(r0 + a, c0 + b);
      const float d = e2m1_value(e2m1_nearest(x * factor)) * e4m3_value(scale) * decode - x;
      row += d * d;
    }
    total += row;
  }
  return total;
}

inline void store_code(ReferenceResult& out, int64_t element, uint32_t code) {
  out.codes[static_cast<size_t>(element / 2)] |= static_cast<uint8_t>(code << (element % 2 * 4));
}

inline void code_nvfp4_block(const QuantSpec& spec, const ReferenceKeys& keys, const ReferenceScale& scale,
                             int64_t r0, int64_t c0, ReferenceResult& out) {
  const Matrix& m = out.rotated;
  const int64_t height = spec.block == BlockShape::k16x16 ? 16 : 1;
  float amax = 0;
  for (int64_t r = r0; r < r0 + height; ++r) {
    for (int64_t c = c0; c < c0 + 16; ++c) amax = magnitude_max(amax, m.at(r, c));
  }
  uint32_t s = 0;
  if (spec.scale_rule == ScaleRule::kFourOverSix) {
    const float base = (amax / 6.0f) * scale.encode;
    const uint32_t s6 = e4m3_nearest(std::fmin(base, 448.0f));
    const uint32_t s4 = e4m3_nearest(std::fmin(1.5f * base, 448.0f));
    const bool flip = height == 16 && keys.weight_is_transposed;
    const bool four = candidate_error(m, r0, c0, height, s4, scale.decode, flip) <
                      candidate_error(m, r0, c0, height, s6, scale.decode, flip);
    s = four ? s4 : s6;
    out.chose_four += four ? 1 : 0;
  } else {
    const float six = spec.headroom == Headroom::k17over16 ? static_cast<float>(96.0 / 17) : 6.0f;
    s = e4m3_nearest(amax * (scale.encode * (1.0f / six)));
  }
  const float factor = factor_of(s, scale.decode);
  for (int64_t r = r0; r < r0 + height; ++r) {
    const uint64_t b = keys.draw_base + static_cast<uint64_t>(r * (m.cols / 16) + c0 / 16);
    const PhiloxBits draw = site_draw(keys.draw, b);
    for (int i = 0; i < 16; ++i) {
      const float x = m.at(r, c0 + i), y = x * factor;
      const uint32_t bits = draw.word[i / 4] >> (8 * (i % 4)) & 255;
      const uint32_t code =
          spec.rounding == Rounding::kStochastic ? e2m1_stochastic(y, bits) : e2m1_nearest(y);
      store_code(out, r * m.cols + c0 + i, code);
      out.flushed += x != 0 && (code % 8 == 0 || s == 0) ? 1 : 0;
      out.clipped += std::fabs(y) > 6 ? 1 : 0;
    }
  }
  out.block_scales[static_cast<size_t>(r0 / height * (m.cols / 16) + c0 / 16)] = static_cast<uint8_t>(s);
}

inline void code_eden_group(const QuantSpec& spec, const ReferenceKeys& keys, const ReferenceScale& scale,
                            int64_t r, int64_t g, ReferenceResult& out) {
  const Matrix& m = out.rotated;
  const float v = static_cast<float>(6 / ((17.0 / 16) * 0.93));
  float num = 0, den = 0;
  std::vector<uint32_t> provisional;
  for (int64_t c0 = g; c0 < g + spec.hadamard; c0 += 16) {
    float amax = 0;
    for (int64_t c = c0; c < c0 + 16; ++c) amax = magnitude_max(amax, m.at(r, c));
    uint32_t s = e4m3_nearest(std::fmin((amax / v) / scale.decode, 448.0f));
    if (s == 0) s = 0x38;
    provisional.push_back(s);
    const float t = e4m3_value(s) * scale.decode;
    for (int64_t c = c0; c < c0 + 16; ++c) {
      const float x = m.at(r, c), y = x / t;
      const uint32_t code = e2m1_nearest(y);
      store_code(out, r * m.cols + c, code);
      num += x * x;
      den += x * (e2m1_value(code) * t);
      out.clipped += std::fabs(y) > 6 ? 1 : 0;
    }
  }
  const bool usable = den > 0 && std::isfinite(den) && std::isfinite(num);
  const float kappa = usable ? num / den : 1.0f;
  for (size_t i = 0; i < provisional.size(); ++i) {
    const int64_t c0 = g + static_cast<int64_t>(i) * 16;
    const uint64_t b = keys.draw_base + static_cast<uint64_t>(r * (m.cols / 16) + c0 / 16);
    const uint32_t word = site_draw(keys.draw, b / 4).word[b % 4];
    const double z = double{std::fmin(kappa * e4m3_value(provisional[i]), 448.0f)};
    uint32_t below = 0;
    while (below < 0x7E && double{e4m3_value(below + 1)} <= z) ++below;
    double fraction = 0;
    if (below < 0x7E) {
      const double low = double{e4m3_value(below)};
      fraction = (z - low) / (double{e4m3_value(below + 1)} - low);
    }
    const bool up = std::floor(fraction * 0x1p24) + (word >> 8) >= 0x1p24;
    const uint32_t s = below + (up ? 1 : 0);
    out.block_scales[static_cast<size_t>((r * m.cols + c0) / 16)] = static_cast<uint8_t>(s);
    for (int64_t c = c0; c < c0 + 16; ++c) {
      const uint32_t code = out.codes[static_cast<size_t>((r * m.cols + c) / 2)] >> (c % 2 * 4) & 15;
      out.flushed += m.at(r, c) != 0 && (code % 8 == 0 || s == 0) ? 1 : 0;
    }
  }
}

}  // namespace reference_detail

inline ReferenceResult reference_mxfp8(const Matrix& x, const QuantSpec& spec) {
  ReferenceResult out;
  out.rotated = padded_and_rotated(x, spec, {});
  const Matrix& m = out.rotated;
  out.codes.resize(m.v.size());
  out.block_scales.resize(m.v.size() / 32);
  for (size_t b = 0; b < out.block_scales.size(); ++b) {
    float amax = 0;
    for (size_t i = 32 * b; i < 32 * b + 32; ++i) amax = magnitude_max(amax, m.v[i]);
    const uint32_t scale = e8m0_round_up(amax * (1.0f / 448.0f));
    out.block_scales[b] = static_cast<uint8_t>(scale);
    for (size_t i = 32 * b; i < 32 * b + 32; ++i) {
      const float y = m.v[i] * static_cast<float>(std::ldexp(1.0, 127 - static_cast<int>(scale)));
      out.codes[i] = static_cast<uint8_t>(e4m3_nearest(y));
      out.flushed += m.v[i] != 0 && out.codes[i] % 128 == 0 ? 1 : 0;
      out.clipped += std::fabs(y) > 448 ? 1 : 0;
    }
  }
  return out;
}

inline ReferenceResult reference_quantize(const Matrix& x, const QuantSpec& spec, const ReferenceKeys& keys) {
  if (spec.format == Format::kMxfp8) return reference_mxfp8(x, spec);
  ReferenceResult out;
  out.rotated = padded_and_rotated(x, spec, keys);
  const Matrix& m = out.rotated;
  const int64_t height = outer_padding(spec);
  out.codes.assign(m.v.size() / 2, 0);
  out.block_scales.assign(m.v.size() / static_cast<size_t>(16 * height), 0);
  float whole = 0;
  for (float v : m.v) whole = magnitude_max(whole, v);
  const bool row_scope = spec.scale_scope == ScaleScope::kRow;
  for (int64_t r = 0; r < m.rows; r += height) {
    float amax = whole;
    if (row_scope) {
      amax = 0;
      for (int64_t c = 0; c < m.cols; ++c) amax = magnitude_max(amax, m.at(r, c));
    }
    const ReferenceScale scale = reference_tensor_scale(spec, amax);
    if (row_scope) out.tensor_scale.push_back(scale.decode);
    if (spec.rounding == Rounding::kMsEden) {
      for (int64_t g = 0; g < m.cols; g += spec.hadamard) {
        reference_detail::code_eden_group(spec, keys, scale, r, g, out);
      }
    } else {
      for (int64_t c = 0; c < m.cols; c += 16) {
        reference_detail::code_nvfp4_block(spec, keys, scale, r, c, out);
      }
    }
  }
  if (!row_scope) out.tensor_scale.push_back(reference_tensor_scale(spec, whole).decode);
  return out;
}

}  // namespace fp4t::test
