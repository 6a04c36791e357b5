// Where a block of the grid works: one tile of one group's output. Offsets are read here, on the device,
// so that a grid is sized by capacities alone and blocks without work leave at once.
#pragma once

#include <cuda_runtime.h>

#include "kernels/base/numeric.h"
#include "kernels/cuda/gemm_problem.h"

namespace fp4t::cuda {

struct GemmGrid {
  GemmMode mode;
  int64_t m, n, k;
  const int32_t* offsets;
  int32_t groups;
  int64_t tiles_m, tiles_n;  // of one matrix; of all groups together, at most, in kGroupedM

  int64_t blocks() const { return tiles_m * tiles_n * (mode == GemmMode::kGroupedK ? groups : 1); }
};

inline GemmGrid grid_of(const GemmProblem& p, int64_t tile_m, int64_t tile_n) {
  GemmGrid g{p.mode, p.m, p.n, p.k, p.offsets, static_cast<int32_t>(p.groups), 0, ceil_div(p.n, tile_n)};
  // Every group may end in a tile of its own, and no more groups have tiles than there are rows.
  g.tiles_m = ceil_div(p.m, tile_m);
  if (p.mode == GemmMode::kGroupedM) g.tiles_m = p.m / tile_m + (p.groups < p.m ? p.groups : p.m);
  return g;
}

struct GemmTile {
  int64_t group;
  int64_t row, row_end;  // first row of the tile, and the end of its group's rows
  int64_t col;
  int64_t k_begin, k_end;
};

// Group and first row of the tile with this number among all groups' tiles; false beyond the last. Every
// warp finds it by itself: a lane counts the tiles of neighbouring groups, the lane that owns the tile walks
// them again.
__device__ inline bool locate_rows(const GemmGrid& grid, int number, int tile_m, GemmTile* tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int each = (grid.groups + 31) / 32;
  const int first = lane * each < grid.groups ? lane * each : grid.groups;
  const int last = first + each < grid.groups ? first + each : grid.groups;
  int tiles = 0, begin = grid.offsets[first];
#pragma unroll 4
  for (int g = first; g < last; ++g) {
    const int end = grid.offsets[g + 1];
    tiles += (end - begin + tile_m - 1) / tile_m;
    begin = end;
  }
  int sum = tiles;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += other;
  }
  const int owner = __popc(__ballot_sync(0xFFFFFFFFu, sum <= number));
  if (owner == 32) return false;
  int group = first, row = 0, end = 0;
  if (lane == owner) {
    int left = number - (sum - tiles);
    for (;; ++group) {
      row = grid.offsets[group];
      end = grid.offsets[group + 1];
      const int here = (end - row + tile_m - 1) / tile_m;
      if (left < here) break;
      left -= here;
    }
    row += left * tile_m;
  }
  tile->group = __shfl_sync(0xFFFFFFFFu, group, owner);
  tile->row = __shfl_sync(0xFFFFFFFFu, row, owner);
  tile->row_end = __shfl_sync(0xFFFFFFFFu, end, owner);
  return true;
}

// Rows of tiles advance together over the columns, kPanel at a time, so that what is in flight at once
// reads few rows of either operand.
__device__ inline bool locate(const GemmGrid& grid, unsigned block, int tile_m, int tile_n, GemmTile* tile) {
  constexpr unsigned kPanel = 8;
  // Grids have less than 2^31 blocks, so none of these overflows.
  const auto tiles_m = static_cast<unsigned>(grid.tiles_m), tiles_n = static_cast<unsigned>(grid.tiles_n);
  const unsigned matrix = block / (tiles_m * tiles_n), place = block % (tiles_m * tiles_n);
  const unsigned panel = place / (kPanel * tiles_n), inside = place % (kPanel * tiles_n);
  const unsigned height = tiles_m - panel * kPanel < kPanel ? tiles_m - panel * kPanel : kPanel;
  const unsigned tile_row = panel * kPanel + inside % height;
  *tile = {0, int64_t{tile_row} * tile_m, grid.m, int64_t{inside / height} * tile_n, 0, grid.k};
  if (grid.mode == GemmMode::kGroupedM) return locate_rows(grid, static_cast<int>(tile_row), tile_m, tile);
  if (grid.mode == GemmMode::kGroupedK) {
    tile->group = matrix;
    tile->k_begin = grid.offsets[matrix];
    tile->k_end = grid.offsets[matrix + 1];
  }
  return true;
}

}  // namespace fp4t::cuda
