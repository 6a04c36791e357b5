// The innermost product: a tile of R rows by 2 W columns, W the lanes of one vector.
//   acc[r, n] = fma(a[r, k], b[k, n], acc[r, n]) for k = 0..depth-1, in FP32, in this order.
// Lanes run over n only, so every output is one chain of fma: the same bits for any vector width, tile
// height, or split of the contraction (partial sums stored in FP32 are exact). Tests compare each set of
// lanes with PortableLanes, which is plain std::fma.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#if (defined(__AVX2__) && defined(__FMA__)) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace fp4t::cpu {

template <int W>
struct PortableLanes {
  static constexpr int kWidth = W;
  struct Vector {
    float lane[W];
  };
  static Vector zero() { return {}; }
  static Vector load(const float* p) {
    Vector v;
    for (int i = 0; i < W; ++i) v.lane[i] = p[i];
    return v;
  }
  static void store(float* p, const Vector& v) {
    for (int i = 0; i < W; ++i) p[i] = v.lane[i];
  }
  static Vector broadcast(float x) {
    Vector v;
    for (int i = 0; i < W; ++i) v.lane[i] = x;
    return v;
  }
  static Vector fma(const Vector& a, const Vector& b, const Vector& c) {
    Vector v;
    for (int i = 0; i < W; ++i) v.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
    return v;
  }
};

#if defined(__AVX512F__)
struct Avx512Lanes {
  static constexpr int kWidth = 16;
  using Vector = __m512;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
  static Vector broadcast(float x) { return _mm512_set1_ps(x); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
};
using NativeLanes = Avx512Lanes;
#elif defined(__AVX2__) && defined(__FMA__)
struct Avx2Lanes {
  static constexpr int kWidth = 8;
  using Vector = __m256;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
  static Vector broadcast(float x) { return _mm256_set1_ps(x); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
};
using NativeLanes = Avx2Lanes;
#else
using NativeLanes = PortableLanes<8>;
#endif

// Six rows by two vectors are 12 accumulators: more than the 8 that two fma units of latency 4 need, and
// few enough for the 16 registers of AVX2.
constexpr int kTileRows = 6;
constexpr int kTileCols = 2 * NativeLanes::kWidth;

// a: R rows, `a_stride` floats apart; b: [depth, kTileCols]; acc: [R, kTileCols], read unless `fresh`.
using TileKernel = void (*)(int64_t depth, const float* a, int64_t a_stride, const float* b, float* acc,
                            bool fresh);

template <class L, int R>
void tile_product(int64_t depth, const float* a, int64_t a_stride, const float* b, float* acc, bool fresh) {
  constexpr int kWidth = L::kWidth;
  typename L::Vector c[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    c[r][0] = fresh ? L::zero() : L::load(acc + r * 2 * kWidth);
    c[r][1] = fresh ? L::zero() : L::load(acc + r * 2 * kWidth + kWidth);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const typename L::Vector b0 = L::load(b);
    const typename L::Vector b1 = L::load(b + kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename L::Vector x = L::broadcast(a[r * a_stride + k]);
      c[r][0] = L::fma(x, b0, c[r][0]);
      c[r][1] = L::fma(x, b1, c[r][1]);
    }
    b += 2 * kWidth;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    L::store(acc + r * 2 * kWidth, c[r][0]);
    L::store(acc + r * 2 * kWidth + kWidth, c[r][1]);
  }
}

// Kernel for 1..kTileRows rows at index rows - 1.
template <class L>
constexpr std::array<TileKernel, kTileRows> tile_kernels() {
  return {tile_product<L, 1>, tile_product<L, 2>, tile_product<L, 3>,
          tile_product<L, 4>, tile_product<L, 5>, tile_product<L, 6>};
}

}  // namespace fp4t::cpu
