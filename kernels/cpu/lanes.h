// Eight FP32 lanes for the loops that compilers do not vectorise by themselves: sums along a row and
// small matrix products held in registers. The order of every sum is written here once and depends on
// the length alone, so the bits are the same for each row, thread and instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

// Every function here is inlined; how an unsupported vector would be passed in registers does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace fp4t::cpu {

typedef float F8 __attribute__((vector_size(32)));

[[gnu::always_inline]] inline F8 load8(const float* p) {
  F8 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

[[gnu::always_inline]] inline void store8(float* p, F8 v) { std::memcpy(p, &v, sizeof(v)); }

[[gnu::always_inline]] inline F8 splat8(float x) { return F8{x, x, x, x, x, x, x, x}; }

// Keeps v in a register: GCC would otherwise load it again for every use, and loads are the bottleneck.
[[gnu::always_inline]] inline void keep8([[maybe_unused]] F8& v) {
#if defined(__AVX2__) && defined(__FMA__)
  asm("" : "+x"(v));
#endif
}

// a * b + c, rounded once.
[[gnu::always_inline]] inline F8 fma8(F8 a, F8 b, F8 c) {
#if defined(__AVX2__) && defined(__FMA__)
  return reinterpret_cast<F8>(_mm256_fmadd_ps(a, b, c));
#else
  F8 r = c;
  for (int i = 0; i < 8; ++i) r[i] = std::fma(a[i], b[i], c[i]);
  return r;
#endif
}

// b where the two do not compare.
[[gnu::always_inline]] inline F8 max8(F8 a, F8 b) { return a > b ? a : b; }
[[gnu::always_inline]] inline F8 abs8(F8 v) { return v < F8{} ? -v : v; }

// The eight lanes, halved in a tree.
[[gnu::always_inline]] inline float sum8(F8 v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// <a, b>: element i goes to lane i mod 32 by fma, the lanes are added in a tree.
inline float dot(const float* a, const float* b, int64_t n) {
  F8 acc[4] = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int r = 0; r < 4; ++r) acc[r] = fma8(load8(a + i + 8 * r), load8(b + i + 8 * r), acc[r]);
  }
  if (i < n) {
    float tail_a[32] = {}, tail_b[32] = {};
    std::memcpy(tail_a, a + i, static_cast<size_t>(n - i) * sizeof(float));
    std::memcpy(tail_b, b + i, static_cast<size_t>(n - i) * sizeof(float));
    for (int r = 0; r < 4; ++r) acc[r] = fma8(load8(tail_a + 8 * r), load8(tail_b + 8 * r), acc[r]);
  }
  return sum8((acc[0] + acc[2]) + (acc[1] + acc[3]));
}

// out[c] = in[c] transposed, 8 x 8; strides in elements.
inline void transpose8x8(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  F8 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = load8(in + i * in_stride);
  for (int i = 0; i < 4; ++i) {
    s[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    s[2 * i + 1] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = __builtin_shufflevector(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * j + 1] = __builtin_shufflevector(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    store8(out + i * out_stride, __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    store8(out + (i + 4) * out_stride, __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}

}  // namespace fp4t::cpu
