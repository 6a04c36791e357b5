// NVFP4 coding of tiles (rules: kernels/formats/nvfp4.h, ms_eden.h).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/quantize_block.h"
#include "kernels/formats/ms_eden.h"
#include "kernels/formats/nvfp4.h"

namespace fp4t::cpu {

namespace {

constexpr int kBlock = 16;

// One block of 16 rows on its way to memory.
struct Block {
  alignas(64) LaneBits code[kBlock];
  alignas(64) LaneBits scale;  // E4M3 bytes
  alignas(64) Lanes factor;    // encodes; in MS-EDEN the divisor instead
  alignas(64) LaneBits clipped;
};

void block_amax(const Lanes* v, Lanes& amax) {
  for_lanes([&](int l) { amax[l] = 0.0f; });
  for (int i = 0; i < kBlock; ++i) {
    for_lanes([&](int l) {
      const float a = std::fabs(v[i][l]);
      amax[l] = a > amax[l] ? a : amax[l];
    });
  }
}

// Every lane gets the largest of all: one scale for a 16x16 tile.
void spread_max(Lanes& amax) {
  float top = 0.0f;
  for (int l = 0; l < kLanes; ++l) top = amax[l] > top ? amax[l] : top;
  for_lanes([&](int l) { amax[l] = top; });
}

void factors_of(const LaneBits& scale, const Lanes& decode, Lanes& factor) {
  for_lanes([&](int l) { factor[l] = nvfp4_encode_factor(e4m3_value(scale[l]), decode[l]); });
}

// Squared errors of a candidate scale, element by element.
void candidate_errors(const Lanes* v, const LaneBits& scale, const Lanes& decode, Lanes& factor,
                      Lanes* square) {
  factors_of(scale, decode, factor);
  alignas(64) Lanes s;
  for_lanes([&](int l) { s[l] = e4m3_value(scale[l]); });
  for (int i = 0; i < kBlock; ++i) {
    for_lanes([&](int l) {
      const float d = nvfp4_value(e2m1_round(v[i][l] * factor[l]), s[l], decode[l]) - v[i][l];
      square[i][l] = d * d;
    });
  }
}

// Sums in the contract's order. A tile sums along the rows of the tensor in memory, whichever way it is
// read, so that a weight and its transpose make the same choice.
void sum_errors(const Lanes* square, bool tile, bool transposed, Lanes& sum) {
  for_lanes([&](int l) { sum[l] = 0.0f; });
  if (!tile || !transposed) {
    for (int i = 0; i < kBlock; ++i) {
      for_lanes([&](int l) { sum[l] += square[i][l]; });
    }
  } else {
    for_lanes([&](int l) {
      for (int i = 0; i < kBlock; ++i) sum[i] += square[i][l];
    });
  }
  if (!tile) return;
  float total = 0.0f;
  for (int l = 0; l < kLanes; ++l) total += sum[l];
  for_lanes([&](int l) { sum[l] = total; });
}

void choose_four_over_six(const Lanes* v, const Lanes& amax, const LaneScales& scales, bool tile,
                          bool transposed, Block& block, LaneBits& chose_four) {
  alignas(64) LaneBits scale4;
  alignas(64) Lanes factor4, error6, error4;
  alignas(64) Lanes square[kBlock];
  for_lanes([&](int l) {
    block.scale[l] = nvfp4_scale_at_six(amax[l], scales.encode[l]);
    scale4[l] = nvfp4_scale_at_four(amax[l], scales.encode[l]);
  });
  candidate_errors(v, block.scale, scales.decode, block.factor, square);
  sum_errors(square, tile, transposed, error6);
  candidate_errors(v, scale4, scales.decode, factor4, square);
  sum_errors(square, tile, transposed, error4);
  for_lanes([&](int l) {
    const bool four = error4[l] < error6[l];
    block.scale[l] = four ? scale4[l] : block.scale[l];
    block.factor[l] = four ? factor4[l] : block.factor[l];
    chose_four[l] = four ? 1u : 0u;
  });
}

void code_nearest(const Lanes* v, Block& block) {
  for_lanes([&](int l) { block.clipped[l] = 0; });
  for (int i = 0; i < kBlock; ++i) {
    for_lanes([&](int l) {
      const float y = v[i][l] * block.factor[l];
      block.code[i][l] = e2m1_nearest(y);
      block.clipped[l] += std::fabs(y) > kE2m1Max ? 1u : 0u;
    });
  }
}

// Number of the lanes' block at k in the padded operand.
void block_numbers(const Region& region, int64_t row0, int64_t k, uint64_t* number) {
  for (int l = 0; l < kLanes; ++l) {
    number[l] = region.draw_base + static_cast<uint64_t>((row0 + l) * (region.length / kBlock) + k / kBlock);
  }
}

void draw_lanes(PhiloxKey key, const uint64_t* index, LaneBits* word) {
  for (int l = 0; l < kLanes; ++l) {
    const PhiloxBits b = site_draw(key, index[l]);
    word[0][l] = b.word[0];
    word[1][l] = b.word[1];
    word[2][l] = b.word[2];
    word[3][l] = b.word[3];
  }
}

void code_stochastic(const Lanes* v, const LaneBits* word, Block& block) {
  for_lanes([&](int l) { block.clipped[l] = 0; });
  for (int i = 0; i < kBlock; ++i) {
    for_lanes([&](int l) {
      const float y = v[i][l] * block.factor[l];
      block.code[i][l] = e2m1_stochastic(y, word[i / 4][l] >> (8 * (i % 4)) & 0xFFu);
      block.clipped[l] += std::fabs(y) > kE2m1Max ? 1u : 0u;
    });
  }
}

void store_block(const Region& region, int64_t row0, int64_t k, bool tile, const Block& block) {
  alignas(64) LaneBits low, high;
  for_lanes([&](int l) { low[l] = high[l] = 0; });
  for (int i = 0; i < 8; ++i) {
    for_lanes([&](int l) {
      low[l] |= block.code[i][l] << (4 * i);
      high[l] |= block.code[i + 8][l] << (4 * i);
    });
  }
  const int rows = static_cast<int>(std::min<int64_t>(kLanes, region.padded_rows - row0));
  uint8_t* out = region.codes + (row0 * region.length + k) / 2;
  for (int l = 0; l < rows; ++l) {
    std::memcpy(out + l * region.length / 2, &low[l], 4);
    std::memcpy(out + l * region.length / 2 + 4, &high[l], 4);
  }
  const int64_t per_row = region.length / kBlock;
  uint8_t* scale = region.block_scales + (tile ? row0 / kBlock : row0) * per_row + k / kBlock;
  if (tile) {
    *scale = static_cast<uint8_t>(block.scale[0]);
  } else {
    for (int l = 0; l < rows; ++l) scale[l * per_row] = static_cast<uint8_t>(block.scale[l]);
  }
}

void count_block(const Region& region, const Lanes* v, const Block& block, const LaneScales& scales,
                 bool measure, QuantCounts& counts) {
  LaneBits flushed = {};
  for (int i = 0; i < kBlock; ++i) {
    for_lanes([&](int l) {
      const uint32_t nonzero = (bits_of(v[i][l]) & 0x7FFFFFFFu) != 0u ? 1u : 0u;
      flushed[l] += nonzero & ((block.code[i][l] & 7u) == 0u || block.scale[l] == 0u ? 1u : 0u);
    });
  }
  for (int l = 0; l < kLanes; ++l) {
    counts.flushed += flushed[l];
    counts.clipped += block.clipped[l];
  }
  if (!measure) return;
  const double unit = double{region.input_scale} * double{region.input_scale};
  for (int l = 0; l < kLanes; ++l) {
    double error = 0, signal = 0, error_signal = 0;
    for (int i = 0; i < kBlock; ++i) {
      if (!std::isfinite(v[i][l])) continue;
      const float decoded =
          nvfp4_value(e2m1_value(block.code[i][l]), e4m3_value(block.scale[l]), scales.decode[l]);
      const double x = double{v[i][l]};
      const double d = double{decoded} - x;
      error += d * d;
      signal += x * x;
      error_signal += d * x;
    }
    counts.error_energy += unit * error;
    counts.signal_energy += unit * signal;
    counts.error_signal += unit * error_signal;
  }
}

// q*s counts in 2^-10 and stays below 2^12, so these scales leave q*s*S_dec exact in BF16.
int64_t inexact_values(const Block& block, const LaneScales& scales) {
  int64_t inexact = 0;
  for (int l = 0; l < kLanes; ++l) {
    if (scales.decode[l] >= 0x1p-123f && scales.decode[l] <= 0x1p115f) continue;
    const double s = double{e4m3_value(block.scale[l])} * double{scales.decode[l]};
    for (int i = 0; i < kBlock; ++i) inexact += fits_bf16(double{e2m1_value(block.code[i][l])} * s) ? 0 : 1;
  }
  return inexact;
}

void code_block(const CoderSettings& settings, const Region& region, int64_t row0, int64_t k, const Lanes* v,
                const LaneScales& scales, QuantCounts& counts) {
  const QuantSpec& spec = settings.spec;
  const bool tile = spec.block == BlockShape::k16x16;
  Block block;
  alignas(64) Lanes amax;
  block_amax(v, amax);
  if (tile) spread_max(amax);
  if (spec.scale_rule == ScaleRule::kFourOverSix) {
    LaneBits chose_four;
    choose_four_over_six(v, amax, scales, tile, region.transposed, block, chose_four);
    for (int l = 0; l < (tile ? 1 : kLanes); ++l) counts.chose_four += chose_four[l];
  } else {
    for_lanes([&](int l) {
      block.scale[l] = nvfp4_block_scale(amax[l], nvfp4_block_multiplier(spec.headroom, scales.encode[l]));
    });
    factors_of(block.scale, scales.decode, block.factor);
  }
  if (spec.rounding == Rounding::kStochastic) {
    uint64_t number[kLanes];
    alignas(64) LaneBits word[4];
    block_numbers(region, row0, k, number);
    draw_lanes(settings.draw_key, number, word);
    code_stochastic(v, word, block);
  } else {
    code_nearest(v, block);
  }
  store_block(region, row0, k, tile, block);
  if (!settings.count) return;
  count_block(region, v, block, scales, settings.measure, counts);
  if (spec.scale_round == ScaleRound::kPow2) counts.inexact += inexact_values(block, scales);
}

// Provisional scales and codes of one block, and its part of the rotation group's two sums.
void eden_provisional(const Lanes* v, const LaneScales& scales, Block& block, Lanes& num, Lanes& den) {
  alignas(64) Lanes amax;
  block_amax(v, amax);
  for_lanes([&](int l) {
    block.scale[l] = ms_eden_block_scale(amax[l], scales.decode[l]);
    block.factor[l] = e4m3_value(block.scale[l]) * scales.decode[l];
    block.clipped[l] = 0;
  });
  for (int i = 0; i < kBlock; ++i) {
    for_lanes([&](int l) {
      const float x = v[i][l];
      const float y = x / block.factor[l];
      const uint32_t code = e2m1_nearest(y);
      block.code[i][l] = code;
      block.clipped[l] += std::fabs(y) > kE2m1Max ? 1u : 0u;
      num[l] += x * x;
      den[l] += x * (e2m1_round(y) * block.factor[l]);
    });
  }
}

void code_group_ms_eden(const CoderSettings& settings, const Region& region, int64_t row0, int64_t k,
                        const Lanes* v, const LaneScales& scales, QuantCounts& counts) {
  const int blocks = settings.spec.hadamard / kBlock;
  Block block[kUnit / kBlock];
  alignas(64) Lanes num = {}, den = {};
  for (int b = 0; b < blocks; ++b) eden_provisional(v + b * kBlock, scales, block[b], num, den);
  alignas(64) Lanes correction;
  for_lanes([&](int l) { correction[l] = ms_eden_correction(num[l], den[l]); });
  // Four blocks share one draw; rows of whole fours share it in step.
  const bool in_step = region.length / kBlock % 4 == 0;
  alignas(64) LaneBits word[4];
  for (int b = 0; b < blocks; ++b) {
    uint64_t number[kLanes];
    block_numbers(region, row0, k + b * kBlock, number);
    if (b == 0 || !in_step || number[0] % 4 == 0) {
      uint64_t counter[kLanes];
      for (int l = 0; l < kLanes; ++l) counter[l] = number[l] / 4;
      draw_lanes(settings.draw_key, counter, word);
    }
    for (int l = 0; l < kLanes; ++l) {
      block[b].scale[l] =
          ms_eden_final_scale(correction[l], e4m3_value(block[b].scale[l]), word[number[l] % 4][l]);
    }
    store_block(region, row0, k + b * kBlock, false, block[b]);
    if (settings.count) {
      count_block(region, v + b * kBlock, block[b], scales, settings.measure, counts);
    }
  }
}

template <int D>
void rotate_groups(const HadamardSigns& signs, int unit, Tile& tile) {
  for (int k = 0; k < unit; k += D) hadamard_rotate<D, kLanes>(tile.v + k, signs);
}

}  // namespace

void rotate_tile(const CoderSettings& settings, int unit, Tile& tile) {
  switch (settings.spec.hadamard) {
    case 16:
      rotate_groups<16>(settings.signs, unit, tile);
      break;
    case 32:
      rotate_groups<32>(settings.signs, unit, tile);
      break;
    case 64:
      rotate_groups<64>(settings.signs, unit, tile);
      break;
    case 128:
      rotate_groups<128>(settings.signs, unit, tile);
      break;
    default:
      return;
  }
  if (settings.spec.hadamard_out == HadamardOut::kFp32) return;
  for (int k = 0; k < unit; ++k) {
    for_lanes([&](int l) { tile.v[k][l] = bf16_to_f32(f32_to_bf16(tile.v[k][l])); });
  }
}

void tile_amax(const Tile& tile, int unit, Lanes& amax) {
  for (int k = 0; k < unit; ++k) {
    for_lanes([&](int l) {
      const float a = std::fabs(tile.v[k][l]);
      amax[l] = a > amax[l] ? a : amax[l];
    });
  }
}

void code_tile_nvfp4(const CoderSettings& settings, const Region& region, int64_t row0, int64_t k0, int unit,
                     const Tile& tile, const LaneScales& scales, QuantCounts& counts) {
  if (settings.spec.rounding == Rounding::kMsEden) {
    for (int k = 0; k < unit; k += settings.spec.hadamard) {
      code_group_ms_eden(settings, region, row0, k0 + k, tile.v + k, scales, counts);
    }
    return;
  }
  for (int k = 0; k < unit; k += kBlock) {
    code_block(settings, region, row0, k0 + k, tile.v + k, scales, counts);
  }
}

}  // namespace fp4t::cpu
