// The core of the fp32 format: an explicit fma chain k = 0 .. K-1 an output, the CPU's bits.
#include "kernels/cuda/context.h"
#include "kernels/cuda/gemm_cores.h"
#include "kernels/cuda/gemm_store.cuh"
#include "kernels/cuda/gemm_tiles.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256, kEach = 4;

struct Fp32Side {
  const float* data;
  int64_t outer_stride, depth_stride, group_stride;
};

struct Fp32Args {
  GemmGrid grid;
  Fp32Side a, b;
  GemmScales scales;
  GemmOut out;
};

// shared[k][i] = element (outer + i, k0 + k), zero where there is none; neighbouring threads read
// neighbouring elements.
__device__ void load_tile(const Fp32Side& side, const float* base, int64_t outer, int64_t outer_end,
                          int64_t k0, int64_t k_end, float (&shared)[kDepth][kTile + kEach]) {
#pragma unroll
  for (int step = 0; step < kTile * kDepth / kThreads; ++step) {
    const int c = step * kThreads + static_cast<int>(threadIdx.x);
    const int i = side.depth_stride == 1 ? c / kDepth : c % kTile;
    const int k = side.depth_stride == 1 ? c % kDepth : c / kTile;
    const bool inside = outer + i < outer_end && k0 + k < k_end;
    shared[k][i] = inside ? base[(outer + i) * side.outer_stride + (k0 + k) * side.depth_stride] : 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads) gemm_fp32(const __grid_constant__ Fp32Args args) {
  __shared__ __align__(16) float a_tile[kDepth][kTile + kEach], b_tile[kDepth][kTile + kEach];
  GemmTile tile;
  if (!locate(args.grid, blockIdx.x, kTile, kTile, &tile)) return;
  const int row0 = static_cast<int>(threadIdx.x) / 16 * kEach,
            col0 = static_cast<int>(threadIdx.x) % 16 * kEach;
  const float* b = args.b.data + tile.group * args.b.group_stride;
  float acc[kEach][kEach] = {};
  for (int64_t k0 = tile.k_begin; k0 < tile.k_end; k0 += kDepth) {
    load_tile(args.a, args.a.data, tile.row, tile.row_end, k0, tile.k_end, a_tile);
    load_tile(args.b, b, tile.col, args.grid.n, k0, tile.k_end, b_tile);
    __syncthreads();
    const int depth = tile.k_end - k0 < kDepth ? static_cast<int>(tile.k_end - k0) : kDepth;
    for (int k = 0; k < depth; ++k) {
      const float4 x = *reinterpret_cast<const float4*>(&a_tile[k][row0]);
      const float4 y = *reinterpret_cast<const float4*>(&b_tile[k][col0]);
      const float xs[kEach] = {x.x, x.y, x.z, x.w}, ys[kEach] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) acc[i][j] = __fmaf_rn(xs[i], ys[j], acc[i][j]);
      }
    }
    __syncthreads();
  }
  const bool empty = tile.k_begin >= tile.k_end;  // zeros whatever the scales hold
  if (empty && args.out.accumulate) return;
  const int64_t matrix = args.grid.mode == GemmMode::kGroupedK ? tile.group * args.grid.m : 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t row = tile.row + row0 + i;
    if (row >= tile.row_end) break;
    const Alpha alpha = empty ? Alpha{1, 1} : alpha_of(args.scales, tile.group, row);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t col = tile.col + col0 + j;
      if (col < args.grid.n)
        store_one(args.out, (matrix + row) * args.out.ld + col, scaled(acc[i][j], alpha));
    }
  }
}

}  // namespace

void launch_fp32(Queue& queue, const GemmProblem& p, const float* a, const float* b) {
  const auto side = [](const GemmSide& s, const float* data) {
    return Fp32Side{data, s.mn_major ? 1 : s.ld, s.mn_major ? s.ld : 1, s.group_stride};
  };
  const Fp32Args args{grid_of(p, kTile, kTile), side(p.a, a), side(p.b, b), scales_of(p), out_of(p)};
  const int64_t blocks = args.grid.blocks();
  if (blocks == 0) return;
  FP4T_CHECK(blocks < int64_t{1} << 31, blocks, " tiles");
  gemm_fp32<<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(queue)>>>(args);
  check_launch("gemm");
}

}  // namespace fp4t::cuda
