// Rotation along the contraction: signs, Sylvester-Hadamard butterflies, one multiplication by
// 1/sqrt(d). The order of additions is part of the contract (NUMERICS.md section 0.0).
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/base/philox.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/quant.h"

// Stops GCC from unrolling a short loop over rows before it vectorises it.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define FP4T_KEEP_LOOP _Pragma("GCC unroll 1")
#else
#define FP4T_KEEP_LOOP
#endif

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

namespace detail {

// Two rounds of butterflies, h and 2h, on the elements 0, h, 2h, 3h of L rows. All loads come before all
// stores, and the loops over rows stay loops, so that compilers see vectors without aliases.
template <int L>
FP4T_HD void hadamard_four(float (*v)[L], int h) {
  float a[L], b[L], c[L], d[L];
  FP4T_KEEP_LOOP
  for (int l = 0; l < L; ++l) {
    a[l] = v[0][l] + v[h][l];
    b[l] = v[0][l] - v[h][l];
    c[l] = v[2 * h][l] + v[3 * h][l];
    d[l] = v[2 * h][l] - v[3 * h][l];
  }
  FP4T_KEEP_LOOP
  for (int l = 0; l < L; ++l) v[0][l] = a[l] + c[l];
  FP4T_KEEP_LOOP
  for (int l = 0; l < L; ++l) v[h][l] = b[l] + d[l];
  FP4T_KEEP_LOOP
  for (int l = 0; l < L; ++l) v[2 * h][l] = a[l] - c[l];
  FP4T_KEEP_LOOP
  for (int l = 0; l < L; ++l) v[3 * h][l] = b[l] - d[l];
}

// One round, h, on the elements 0 and h.
template <int L>
FP4T_HD void hadamard_two(float (*v)[L], int h) {
  float a[L], b[L];
  FP4T_KEEP_LOOP
  for (int l = 0; l < L; ++l) {
    a[l] = v[0][l] + v[h][l];
    b[l] = v[0][l] - v[h][l];
  }
  FP4T_KEEP_LOOP
  for (int l = 0; l < L; ++l) v[0][l] = a[l];
  FP4T_KEEP_LOOP
  for (int l = 0; l < L; ++l) v[h][l] = b[l];
}

}  // namespace detail

// Rotates D elements of L independent rows in place; element i of row l is v[i][l]. Pairs of rounds are
// taken together, which changes the order of memory accesses and of nothing else.
template <int D, int L>
FP4T_HD void hadamard_rotate(float (*v)[L], const HadamardSigns& signs) {
  for (int i = 0; i < D; ++i) {
    const uint32_t flip = (signs.word[i / 32] >> (i % 32)) << 31;
    FP4T_KEEP_LOOP
    for (int l = 0; l < L; ++l) v[i][l] = float_of(bits_of(v[i][l]) ^ flip);
  }
  int h = 1;
  for (; 4 * h <= D; h *= 4) {
    for (int i = 0; i < D; i += 4 * h) {
      for (int j = i; j < i + h; ++j) detail::hadamard_four<L>(v + j, h);
    }
  }
  if (h < D) {
    for (int j = 0; j < h; ++j) detail::hadamard_two<L>(v + j, h);
  }
  const float scale = hadamard_scale(D);
  for (int i = 0; i < D; ++i) {
    FP4T_KEEP_LOOP
    for (int l = 0; l < L; ++l) v[i][l] *= scale;
  }
}

}  // namespace fp4t

#undef FP4T_KEEP_LOOP
