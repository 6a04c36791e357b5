// MXFP8 coding of tiles (rules: kernels/formats/mxfp8.h).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/quantize_block.h"
#include "kernels/formats/mxfp8.h"

namespace fp4t::cpu {

namespace {

constexpr int kBlock = 32;

void count_block(const Lanes* v, const LaneBits* code, const Lanes& factor, bool measure,
                 QuantCounts& counts) {
  LaneBits flushed = {}, clipped = {};
  for (int i = 0; i < kBlock; ++i) {
    for_lanes([&](int l) {
      const uint32_t nonzero = (bits_of(v[i][l]) & 0x7FFFFFFFu) != 0u ? 1u : 0u;
      flushed[l] += nonzero & ((code[i][l] & 0x7Fu) == 0u ? 1u : 0u);
      clipped[l] += std::fabs(v[i][l] * factor[l]) > kE4m3Max ? 1u : 0u;
    });
  }
  for (int l = 0; l < kLanes; ++l) {
    counts.flushed += flushed[l];
    counts.clipped += clipped[l];
  }
  if (!measure) return;
  for (int l = 0; l < kLanes; ++l) {
    const double scale = 1.0 / double{factor[l]};
    for (int i = 0; i < kBlock; ++i) {
      if (!std::isfinite(v[i][l])) continue;
      const double x = double{v[i][l]};
      const double d = double{e4m3_value(code[i][l])} * scale - x;
      counts.error_energy += d * d;
      counts.signal_energy += x * x;
      counts.error_signal += d * x;
    }
  }
}

// Scales of 2^-124 to 2^119 leave every product with a code exact in BF16 (NUMERICS.md section 0.0).
int64_t inexact_values(const LaneBits* code, const LaneBits& scale) {
  int64_t inexact = 0;
  for (int l = 0; l < kLanes; ++l) {
    if (scale[l] >= 127 - 124 && scale[l] <= 127 + 119) continue;
    const double s = double{e8m0_value(scale[l])};
    for (int i = 0; i < kBlock; ++i) {
      const double q = double{e4m3_value(code[i][l])};
      inexact += q == q && !fits_bf16(q * s) ? 1 : 0;
    }
  }
  return inexact;
}

void store_codes(const Region& region, int64_t row0, int64_t k, const LaneBits* word, int rows) {
  for (int l = 0; l < rows; ++l) {
    uint32_t out[kBlock / 4];
    for (int w = 0; w < kBlock / 4; ++w) out[w] = word[w][l];
    std::memcpy(region.codes + (row0 + l) * region.length + k, out, sizeof(out));
  }
}

}  // namespace

void code_tile_mxfp8(const CoderSettings& settings, const Region& region, int64_t row0, int64_t k0, int unit,
                     const Tile& tile, QuantCounts& counts) {
  const int rows = static_cast<int>(std::min<int64_t>(kLanes, region.padded_rows - row0));
  for (int b = 0; b < unit / kBlock; ++b) {
    const Lanes* v = tile.v + b * kBlock;
    alignas(64) Lanes amax = {};
    for (int i = 0; i < kBlock; ++i) {
      for_lanes([&](int l) {
        const float a = std::fabs(v[i][l]);
        amax[l] = a > amax[l] ? a : amax[l];
      });
    }
    alignas(64) LaneBits scale;
    alignas(64) Lanes factor;
    for_lanes([&](int l) {
      scale[l] = mxfp8_block_scale(amax[l]);
      factor[l] = mxfp8_encode_factor(scale[l]);
    });
    alignas(64) LaneBits code[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      for_lanes([&](int l) { code[i][l] = e4m3_nearest(v[i][l] * factor[l]); });
    }
    alignas(64) LaneBits word[kBlock / 4];
    for (int w = 0; w < kBlock / 4; ++w) {
      for_lanes([&](int l) {
        word[w][l] =
            code[4 * w][l] | code[4 * w + 1][l] << 8 | code[4 * w + 2][l] << 16 | code[4 * w + 3][l] << 24;
      });
    }
    const int64_t k = k0 + b * kBlock;
    store_codes(region, row0, k, word, rows);
    for (int l = 0; l < rows; ++l) {
      region.block_scales[(row0 + l) * (region.length / kBlock) + k / kBlock] =
          static_cast<uint8_t>(scale[l]);
    }
    if (!settings.count) continue;
    count_block(v, code, factor, settings.measure, counts);
    counts.inexact += inexact_values(code, scale);
  }
}

}  // namespace fp4t::cpu
