#include "kernels/cpu/quantize_tile.h"

#include <algorithm>
#include <cstring>

#include "kernels/formats/bf16.h"

namespace fp4t::cpu {

namespace {

typedef uint16_t U16x8 __attribute__((vector_size(16)));

U16x8 load8(const uint16_t* p) {
  U16x8 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// Eight rows of eight BF16 bits, transposed and widened to FP32: the columns' eight lanes of v[0..7].
void transpose8(const uint16_t* x, int64_t stride, Lanes* v, int lane0) {
  U16x8 a[8], b[8];
  for (int r = 0; r < 8; ++r) a[r] = load8(x + r * stride);
  // Three rounds of interleaving row r with row r + 4 transpose an 8 x 8 matrix.
  for (int round = 0; round < 3; ++round) {
    for (int r = 0; r < 4; ++r) {
      b[2 * r] = __builtin_shufflevector(a[r], a[r + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      b[2 * r + 1] = __builtin_shufflevector(a[r], a[r + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int r = 0; r < 8; ++r) a[r] = b[r];
  }
  for (int i = 0; i < 8; ++i) {
    uint16_t column[8];
    std::memcpy(column, &a[i], sizeof(column));
    for (int l = 0; l < 8; ++l) v[i][lane0 + l] = bf16_to_f32({column[l]});
  }
}

void load_rows(const uint16_t* x, int64_t stride, int unit, Tile& tile) {
  for (int k = 0; k < unit; k += 8) {
    transpose8(x + k, stride, tile.v + k, 0);
    transpose8(x + k + 8 * stride, stride, tile.v + k, 8);
  }
}

void load_columns(const uint16_t* x, int64_t stride, int unit, Tile& tile) {
  for (int k = 0; k < unit; ++k) {
    const uint16_t* row = x + k * stride;
    for_lanes([&](int l) { tile.v[k][l] = bf16_to_f32({row[l]}); });
  }
}

}  // namespace

void load_tile(const Region& region, int64_t row0, int64_t k0, int unit, Tile& tile) {
  const int rows = static_cast<int>(std::clamp<int64_t>(region.rows - row0, 0, kLanes));
  const int cols = static_cast<int>(std::clamp<int64_t>(region.cols - k0, 0, unit));
  const uint16_t* x = reinterpret_cast<const uint16_t*>(region.x) +
                      (region.transposed ? k0 * region.stride + row0 : row0 * region.stride + k0);
  if (rows == kLanes && cols == unit) {
    region.transposed ? load_columns(x, region.stride, unit, tile) : load_rows(x, region.stride, unit, tile);
    return;
  }
  // An edge: copy what there is into a zeroed tile of bits first.
  uint16_t edge[kUnit * kLanes] = {};
  if (region.transposed) {
    for (int k = 0; k < cols; ++k) {
      std::copy_n(x + k * region.stride, rows, edge + k * kLanes);
    }
    load_columns(edge, kLanes, unit, tile);
  } else {
    for (int r = 0; r < rows; ++r) std::copy_n(x + r * region.stride, cols, edge + r * kUnit);
    load_rows(edge, kUnit, unit, tile);
  }
}

}  // namespace fp4t::cpu
