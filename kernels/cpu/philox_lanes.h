// Four neighbouring draws of a site at once: the words of site_draw (kernels/base/philox.h), bit for bit.
#pragma once

#include <cstdint>

#include "kernels/base/philox.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fp4t::cpu {

constexpr int kDraws = 4;

// words[w][i] = site_draw(site, first + i).word[w].
#if defined(__AVX2__)
inline void site_draws(PhiloxKey site, uint64_t first, uint32_t (&words)[4][kDraws]) {
  // A counter word lies in the low half of each 64-bit lane. The high halves hold leftovers, which
  // products do not read and sums by xor keep to themselves.
  const __m256i multiplier0 = _mm256_set1_epi64x(0xD2511F53), multiplier1 = _mm256_set1_epi64x(0xCD9E8D57);
  __m256i c0 =
      _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(first)), _mm256_setr_epi64x(0, 1, 2, 3));
  __m256i c1 = _mm256_srli_epi64(c0, 32), c2 = _mm256_setzero_si256(), c3 = c2;
  for (int round = 0; round < 10; ++round) {
    const __m256i p0 = _mm256_mul_epu32(c0, multiplier0), p1 = _mm256_mul_epu32(c2, multiplier1);
    const __m256i key0 = _mm256_set1_epi64x(site.lo), key1 = _mm256_set1_epi64x(site.hi);
    c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), key0);
    c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), key1);
    c1 = p1;
    c3 = p0;
    site.lo += 0x9E3779B9u;
    site.hi += 0xBB67AE85u;
  }
  const __m256i lanes[4] = {c0, c1, c2, c3};
  for (int w = 0; w < 4; ++w) {
    uint64_t wide[kDraws];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide), lanes[w]);
    for (int i = 0; i < kDraws; ++i) words[w][i] = static_cast<uint32_t>(wide[i]);
  }
}
#else
inline void site_draws(PhiloxKey site, uint64_t first, uint32_t (&words)[4][kDraws]) {
  for (int i = 0; i < kDraws; ++i) {
    const PhiloxBits bits = site_draw(site, first + static_cast<uint64_t>(i));
    for (int w = 0; w < 4; ++w) words[w][i] = bits.word[w];
  }
}
#endif

}  // namespace fp4t::cpu
