// The working set of the CPU quantisers: a tile of up to 128 contraction elements of 16 rows, element
// index first, so that every step is a loop over 16 independent rows that the compiler vectorises, and
// sums along a row keep their index order. Both orientations fill the same tile.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace fp4t::cpu {

inline constexpr int kLanes = 16;  // rows side by side: the height of a 16x16 tile, two AVX vectors
inline constexpr int kUnit = 128;  // the longest rotation group

using Lanes = float[kLanes];
using LaneBits = uint32_t[kLanes];

// body(l) for every lane, as one loop of vector operations. Unrolling it before vectorisation would make
// GCC vectorise over elements instead and shuffle the lanes.
template <class Body>
__attribute__((always_inline)) inline void for_lanes(const Body& body) {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 1
#endif
  for (int l = 0; l < kLanes; ++l) body(l);
}

struct Tile {
  alignas(64) Lanes v[kUnit];
};

// One matrix to be coded: the whole operand, or one group of it.
struct Region {
  const Bf16* x = nullptr;  // row r, element k: x[r * stride + k], or x[k * stride + r] when transposed
  int64_t stride = 0;
  bool transposed = false;
  int64_t rows = 0, cols = 0;           // logical
  int64_t padded_rows = 0, length = 0;  // stored
  uint8_t* codes = nullptr;             // of the region's first element
  uint8_t* block_scales = nullptr;      // of its first block
  float* tensor_scale = nullptr;        // one, or one a row; null: none
  float input_scale = 1.0f;
  uint64_t draw_base = 0;  // added to the number of every block
};

// Elements [k0, k0 + unit) of rows [row0, row0 + 16), zero beyond the logical shape. `unit` is a multiple
// of 16, at most kUnit.
void load_tile(const Region& region, int64_t row0, int64_t k0, int unit, Tile& tile);

}  // namespace fp4t::cpu
