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
// warp finds it by itself.
__device__ inline bool locate_rows(const GemmGrid& grid, int64_t number, int tile_m, GemmTile* tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int64_t before = 0;  // tiles of the groups already passed
  for (int base = 0; base < grid.groups; base += 32) {
    const int g = base + lane;
    const int64_t begin = g < grid.groups ? grid.offsets[g] : 0;
    const int64_t end = g < grid.groups ? grid.offsets[g + 1] : 0;
    const int tiles = static_cast<int>((end - begin + tile_m - 1) / tile_m);
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += other;
    }
    const int total = __shfl_sync(0xFFFFFFFFu, sum, 31);
    if (number < before + total) {
      const unsigned past = __ballot_sync(0xFFFFFFFFu, before + sum <= number);
      const int owner = __popc(past);
      tile->group = base + owner;
      const int64_t first = before + __shfl_sync(0xFFFFFFFFu, sum - tiles, owner);
      tile->row = __shfl_sync(0xFFFFFFFFu, begin, owner) + (number - first) * tile_m;
      tile->row_end = __shfl_sync(0xFFFFFFFFu, end, owner);
      return true;
    }
    before += total;
  }
  return false;
}

// Rows of tiles advance together over the columns, kPanel at a time, so that what is in flight at once
// reads few rows of either operand.
__device__ inline bool locate(const GemmGrid& grid, int64_t block, int tile_m, int tile_n, GemmTile* tile) {
  constexpr int64_t kPanel = 8;
  const int64_t per_matrix = grid.tiles_m * grid.tiles_n;
  const int64_t matrix = block / per_matrix, place = block % per_matrix;
  const int64_t panel = place / (kPanel * grid.tiles_n);
  const int64_t height = grid.tiles_m - panel * kPanel < kPanel ? grid.tiles_m - panel * kPanel : kPanel;
  const int64_t inside = place - panel * kPanel * grid.tiles_n;
  const int64_t tile_row = panel * kPanel + inside % height;
  *tile = {0, tile_row * tile_m, grid.m, inside / height * tile_n, 0, grid.k};
  if (grid.mode == GemmMode::kGroupedM) return locate_rows(grid, tile_row, tile_m, tile);
  if (grid.mode == GemmMode::kGroupedK) {
    tile->group = matrix;
    tile->k_begin = grid.offsets[matrix];
    tile->k_end = grid.offsets[matrix + 1];
  }
  return true;
}

}  // namespace fp4t::cuda
