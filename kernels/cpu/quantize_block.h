// Coding of tiles: scales and codes of the blocks in a Tile, written to their place in a Region. The
// arithmetic is kernels/formats, lane by lane; this file holds loops, packing and counting.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/base/philox.h"
#include "kernels/cpu/quantize_tile.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/quant.h"

namespace fp4t::cpu {

// What one worker counts; integers and FP64 sums, added up in a fixed order.
struct QuantCounts {
  int64_t flushed = 0, clipped = 0, chose_four = 0, inexact = 0;
  double error_energy = 0, signal_energy = 0, error_signal = 0;
};

// What a coder needs beside the tile.
struct CoderSettings {
  QuantSpec spec;
  PhiloxKey draw_key;
  HadamardSigns signs;
  bool count = false;    // flushed, clipped, chose_four
  bool measure = false;  // energies
};

// Whether BF16 holds a finite value that was computed in FP64.
inline bool fits_bf16(double value) {
  const float narrow = static_cast<float>(value);
  return double{narrow} == value && (bits_of(narrow) & 0xFFFFu) == 0u;
}

// Rotation and rounding to BF16 as the spec says; no-op without a rotation.
void rotate_tile(const CoderSettings& settings, int unit, Tile& tile);

// Largest magnitude of each lane, NaN left out.
void tile_amax(const Tile& tile, int unit, Lanes& amax);

// Tensor scales of 16 rows.
struct LaneScales {
  alignas(64) Lanes encode;
  alignas(64) Lanes decode;
};

// Codes the (rotated) tile at row0, k0 of the region.
void code_tile_nvfp4(const CoderSettings& settings, const Region& region, int64_t row0, int64_t k0, int unit,
                     const Tile& tile, const LaneScales& scales, QuantCounts& counts);
void code_tile_mxfp8(const CoderSettings& settings, const Region& region, int64_t row0, int64_t k0, int unit,
                     const Tile& tile, QuantCounts& counts);

}  // namespace fp4t::cpu
