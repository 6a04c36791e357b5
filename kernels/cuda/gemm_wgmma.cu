// The host's side of the Hopper core: what it takes, tensor maps, tiles.
#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/numeric.h"
#include "kernels/cuda/gemm_wgmma_kernel.cuh"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/tensor_map.h"

namespace fp4t::cuda {

namespace {

using sm90::Launch, sm90::kTileK, sm90::kTileM;

struct MapShape {
  int64_t inner, outer, matrices;
  int64_t ld, matrix_stride;  // elements
  int box_inner, box_outer;
};

CUtensorMap map_of(const void* data, DType dtype, const MapShape& s) {
  return tensor_map(data, dtype,
                    {{s.inner, s.outer, s.matrices},
                     {s.ld, s.matrices > 1 ? s.matrix_stride : s.ld},
                     {s.box_inner, s.box_outer, 1}});
}

CUtensorMap side_map(const GemmSide& s, int64_t outer, int64_t depth, int64_t matrices, int tile_outer) {
  if (s.mn_major)
    return map_of(s.data, DType::kBf16, {outer, depth, matrices, s.ld, s.group_stride, 64, kTileK});
  return map_of(s.data, DType::kBf16, {depth, outer, matrices, s.ld, s.group_stride, kTileK, tile_outer});
}

// Whole rows of out may leave through a tensor map.
bool out_by_copy(const GemmProblem& p) {
  const int64_t row_bytes = p.ld_out * dtype_bytes(p.out_dtype);
  return aligned16(p.out) && row_bytes % 16 == 0;
}

bool side_fits(const GemmSide& s, int64_t outer, int64_t depth) {
  return aligned16(s.data) && s.ld % 8 == 0 && s.group_stride % 8 == 0 && outer <= INT32_MAX &&
         depth <= INT32_MAX && s.ld < int64_t{1} << 38;
}

// Width of the tiles: whole waves of the machine at the width's cost a tile. Bits do not depend on it.
int tile_width(const GemmProblem& p, int sm_count) {
  struct Choice {
    int width;
    double cost;  // of a tile, in columns: narrow ones read more for each product
  };
  constexpr Choice kChoices[] = {{256, 256}, {192, 200}, {128, 142}};
  const bool cut_rows = p.mode == GemmMode::kGroupedM;
  int best = 0;
  double least = 0;
  for (const Choice& c : kChoices) {
    const int64_t rows = ceil_div(p.m, kTileM) + (cut_rows ? p.groups / 2 : 0);
    const int64_t tiles = rows * ceil_div(p.n, c.width) * (p.mode == GemmMode::kGroupedK ? p.groups : 1);
    // Cut rows or depth: how many tiles there are, or how deep, only the device knows.
    const double waves = p.mode == GemmMode::kDense ? static_cast<double>(ceil_div(tiles, sm_count))
                                                    : static_cast<double>(tiles) / sm_count;
    if (best == 0 || waves * c.cost < least) best = c.width, least = waves * c.cost;
  }
  return best;
}

// A block on every multiprocessor, until the tiles are done. Where ranks exchange something meanwhile, blocks
// of the library that does it hold some multiprocessors: ours would wait for these and then begin a second
// pass over all of their tiles, and the library's wait until ours end. So blocks are shorter there, of at
// least kFewest tiles; starting one takes about as long as a tenth of a tile.
sm90::Shares shares_of(int64_t tiles, const Context& context) {
  constexpr int64_t kShares = 4, kFewest = 4;
  const int64_t width = std::min<int64_t>(tiles, context.sm_count);
  const int64_t passes = ceil_div(tiles, width);
  const int64_t shares = context.shares_device ? std::clamp<int64_t>(passes / kFewest, 1, kShares) : 1;
  return {static_cast<int>(width), ceil_div(passes, shares) * width};
}

}  // namespace

bool wgmma_takes(const Queue& queue, const GemmProblem& p) {
  if (!on_sm90(queue)) return false;
  if (p.k <= 0 || p.n <= 0 || p.n > INT32_MAX || p.groups > INT32_MAX) return false;
  if (!side_fits(p.a, p.m, p.k) || !side_fits(p.b, p.n, p.k)) return false;
  if (p.a.mn_major && !p.b.mn_major) return false;
  switch (p.mode) {
    case GemmMode::kDense:
      return true;
    case GemmMode::kGroupedM:
      return !p.a.mn_major;
    case GemmMode::kGroupedK:
      return p.a.mn_major == p.b.mn_major && (p.a.mn_major || p.offset_multiple % 8 == 0);
  }
  return false;
}

void launch_wgmma(Queue& queue, const GemmProblem& p) {
  if (p.m <= 0 || p.groups <= 0) return;
  const Context& context = context_of(queue);
  const bool cut_depth = p.mode == GemmMode::kGroupedK;
  const int tile_n = tile_width(p, context.sm_count);
  const int64_t matrices = p.mode == GemmMode::kGroupedM ? p.groups : 1;
  const int64_t out_matrices = cut_depth ? p.groups : 1;

  Launch launch{};
  launch.mode = p.mode;
  launch.out_bf16 = p.out_dtype == DType::kBf16;
  launch.accumulate = p.accumulate;
  launch.tma_out = out_by_copy(p);
  launch.m = static_cast<int>(p.m), launch.n = static_cast<int>(p.n), launch.k = static_cast<int>(p.k);
  launch.groups = static_cast<int>(p.groups);
  launch.offsets = p.offsets;
  launch.out = p.out;
  launch.ld_out = p.ld_out;
  launch.scales = scales_of(p);

  sm90::Maps maps{};
  maps.a = side_map(p.a, p.m, p.k, 1, kTileM);
  maps.b = side_map(p.b, p.n, p.k, matrices, tile_n);
  if (launch.tma_out) {
    const int columns = launch.out_bf16 ? 64 : 32;
    maps.out = map_of(p.out, p.out_dtype, {p.n, p.m, out_matrices, p.ld_out, p.m * p.ld_out, columns, 16});
  }
  // Of kGroupedM no more tiles than every group's rows rounded up.
  const int64_t row_tiles = ceil_div(p.m, kTileM) + (p.mode == GemmMode::kGroupedM ? p.groups : 0);
  const int64_t tiles = row_tiles * ceil_div(p.n, tile_n) * out_matrices;
  launch.shares = shares_of(tiles, context);
  const sm90::Grid grid{tile_n, static_cast<int>(launch.shares.width * ceil_div(tiles, launch.shares.tiles)),
                        context.stream};
  if (p.a.mn_major) return sm90::launch_mn_mn(maps, launch, grid);
  if (p.b.mn_major) return sm90::launch_k_mn(maps, launch, grid);
  if (cut_depth) return sm90::launch_k_k_cut(maps, launch, grid);
  sm90::launch_k_k(maps, launch, grid);
}

}  // namespace fp4t::cuda
