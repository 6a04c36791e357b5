// Rotation along the contraction: signs, Sylvester-Hadamard butterflies, one multiplication by
// 1/sqrt(d). The order of additions is part of the contract (NUMERICS.md section 0.0).
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/base/philox.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/quant.h"

namespace fp4t {

// 128 signs, bit i % 32 of word i / 32 for element i of a rotation group; set means minus.
struct HadamardSigns {
  uint32_t word[4];
};

// The recipe's fixed vector + + + - + - - - - - - + - + - -, repeated (NUMERICS.md section 1.3).
inline constexpr uint32_t kFixedSigns = 0xD7E8u;

// Signs of a rotation: fixed, or the site's draw 0, which both operands of a product share.
FP4T_HD HadamardSigns hadamard_signs(Signs signs, PhiloxKey key) {
  if (signs == Signs::kFixed) {
    const uint32_t w = kFixedSigns | kFixedSigns << 16;
    return {{w, w, w, w}};
  }
  const PhiloxBits b = site_draw(key, 0);
  return {{b.word[0], b.word[1], b.word[2], b.word[3]}};
}

// fp32(1 / sqrt(d)) for d = 16, 32, 64, 128.
FP4T_HD float hadamard_scale(int d) {
  return d == 16 ? 0.25f : d == 32 ? 0x1.6a09e6p-3f : d == 64 ? 0.125f : 0x1.6a09e6p-4f;
}

// Rotates D elements of L independent rows in place; element i of row l is v[i][l].
template <int D, int L>
FP4T_HD void hadamard_rotate(float (*v)[L], const HadamardSigns& signs) {
  for (int i = 0; i < D; ++i) {
    const uint32_t flip = (signs.word[i / 32] >> (i % 32)) << 31;
    for (int l = 0; l < L; ++l) v[i][l] = float_of(bits_of(v[i][l]) ^ flip);
  }
  for (int h = 1; h < D; h *= 2) {
    for (int i = 0; i < D; i += 2 * h) {
      for (int j = i; j < i + h; ++j) {
        for (int l = 0; l < L; ++l) {
          const float a = v[j][l];
          const float b = v[j + h][l];
          v[j][l] = a + b;
          v[j + h][l] = a - b;
        }
      }
    }
  }
  const float scale = hadamard_scale(D);
  for (int i = 0; i < D; ++i) {
    for (int l = 0; l < L; ++l) v[i][l] *= scale;
  }
}

}  // namespace fp4t
