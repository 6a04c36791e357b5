// The core for every shape and alignment: mma.sync m16n8k16 over a ring of shared memory. Each output is
// one chain of k = 0, 16, 32, ... in one accumulator, whatever the tile: the same bits for a row whatever
// rows are around it.
#pragma once

#include "kernels/cuda/gemm_epilogue.cuh"
#include "kernels/cuda/gemm_ptx.cuh"
#include "kernels/cuda/gemm_store.cuh"
#include "kernels/cuda/gemm_tiles.cuh"

namespace fp4t::cuda {

// One side as a kernel sees it.
struct MmaSide {
  const Bf16* data;
  int64_t ld;
  int64_t group_stride;
  int copy_bytes;  // largest unit that every row allows: 16, 4 or 2
};

struct MmaArgs {
  GemmGrid grid;
  MmaSide a, b;
  GemmScales scales;
  GemmOut out;
};

inline constexpr int kMmaDepth = 32;  // of one stage of the ring
inline constexpr int kMmaStages = 4;

// Eight elements of a row into shared memory, zeros for those from `valid` on.
__device__ __forceinline__ void copy_chunk(uint32_t shared, const Bf16* global, int valid, int copy_bytes) {
  if (copy_bytes == 16) {
    cp_async16(shared, global, 2 * valid);
  } else if (copy_bytes == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int left = valid - 2 * i;
      cp_async4(shared + 4 * i, global + (left > 0 ? 2 * i : 0), left <= 0 ? 0 : left == 1 ? 2 : 4);
    }
  } else {
    uint32_t word[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < valid) word[i / 2] |= static_cast<uint32_t>(global[i].bits) << (i % 2 * 16);
    }
    store_shared16(shared, word);
  }
}

__device__ __forceinline__ int clamp8(int64_t left) {
  return left <= 0 ? 0 : left >= 8 ? 8 : static_cast<int>(left);
}

// A tile of `kRows` outer elements by kMmaDepth in shared memory. K-major: rows of four chunks of 16
// bytes; MN-major: kMmaDepth rows of kRows / 8 chunks. Chunks are permuted so that the eight rows that
// ldmatrix reads at a time lie in different banks.
template <int kRows, bool kMnMajor>
struct MmaTile {
  static constexpr int kBytes = kRows * kMmaDepth * 2;

  static __device__ __forceinline__ uint32_t chunk_at(int outer_chunk_or_row, int depth_row_or_chunk) {
    if constexpr (kMnMajor) {
      return static_cast<uint32_t>(
          (depth_row_or_chunk * (kRows / 8) + (outer_chunk_or_row ^ (depth_row_or_chunk & 7))) * 16);
    } else {
      return static_cast<uint32_t>(
          (outer_chunk_or_row * 4 + (depth_row_or_chunk ^ ((outer_chunk_or_row >> 1) & 3))) * 16);
    }
  }

  // Outer elements from `outer` (valid up to outer_end), depth from k (up to k_end).
  template <int kThreads>
  static __device__ __forceinline__ void load(uint32_t shared, const MmaSide& side, const Bf16* base,
                                              int64_t outer, int64_t outer_end, int64_t k, int64_t k_end) {
    constexpr int kChunks = kRows * kMmaDepth / 8;
    static_assert(kChunks % kThreads == 0);
#pragma unroll 1  // registers
    for (int i = 0; i < kChunks / kThreads; ++i) {
      const int c = i * kThreads + static_cast<int>(threadIdx.x);
      if constexpr (kMnMajor) {
        const int depth = c / (kRows / 8), chunk = c % (kRows / 8);
        const int64_t at = outer + chunk * 8;
        const int valid = k + depth < k_end ? clamp8(outer_end - at) : 0;
        copy_chunk(shared + chunk_at(chunk, depth), valid > 0 ? base + (k + depth) * side.ld + at : base,
                   valid, side.copy_bytes);
      } else {
        const int row = c / 4, chunk = c % 4;
        const int64_t at = k + chunk * 8;
        const int valid = outer + row < outer_end ? clamp8(k_end - at) : 0;
        copy_chunk(shared + chunk_at(row, chunk), valid > 0 ? base + (outer + row) * side.ld + at : base,
                   valid, side.copy_bytes);
      }
    }
  }

  // Fragment of A: rows [outer, outer + 16), depth [16 step, 16 step + 16).
  static __device__ __forceinline__ void fragment_a(uint32_t shared, int outer, int step, uint32_t (&f)[4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8;
    if constexpr (kMnMajor) {
      ldmatrix_trans(shared + chunk_at(outer / 8 + matrix % 2, step * 16 + lane % 8 + matrix / 2 * 8), f);
    } else {
      ldmatrix(shared + chunk_at(outer + lane % 16, step * 2 + lane / 16), f);
    }
  }
  // Fragments of B for two neighbouring tiles of eight: f[2 t], f[2 t + 1] belong to tile t.
  static __device__ __forceinline__ void fragment_b(uint32_t shared, int outer, int step, uint32_t (&f)[4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8;
    if constexpr (kMnMajor) {
      ldmatrix_trans(shared + chunk_at(outer / 8 + matrix / 2, step * 16 + lane % 8 + matrix % 2 * 8), f);
    } else {
      ldmatrix(shared + chunk_at(outer + lane % 8 + matrix / 2 * 8, step * 2 + matrix % 2), f);
    }
  }
};

template <int kTileM, int kTileN, int kWarpM, int kWarpN, bool kAMn, bool kBMn>
struct MmaKernel {
  static constexpr int kWarpsM = kTileM / kWarpM, kWarpsN = kTileN / kWarpN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  using TileA = MmaTile<kTileM, kAMn>;
  using TileB = MmaTile<kTileN, kBMn>;
  static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
  static constexpr int kSharedBytes = kMmaStages * kStageBytes;
  static constexpr int kFragM = kWarpM / 16, kFragN = kWarpN / 8;

  static __device__ __forceinline__ void multiply(uint32_t stage, int warp_m, int warp_n,
                                                  float (&acc)[kFragM][kFragN][4]) {
#pragma unroll
    for (int step = 0; step < kMmaDepth / 16; ++step) {
      uint32_t a[kFragM][4], b[kFragN / 2][4];
#pragma unroll
      for (int i = 0; i < kFragM; ++i) TileA::fragment_a(stage, warp_m + 16 * i, step, a[i]);
#pragma unroll
      for (int j = 0; j < kFragN / 2; ++j) {
        TileB::fragment_b(stage + TileA::kBytes, warp_n + 16 * j, step, b[j]);
      }
#pragma unroll
      for (int i = 0; i < kFragM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragN; ++j)
          mma_bf16(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  static __device__ __forceinline__ void store(const MmaArgs& args, const GemmTile& tile, int warp_m,
                                               int warp_n, const float (&acc)[kFragM][kFragN][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool empty = tile.k_begin >= tile.k_end;  // zeros whatever the scales hold
    if (empty && args.out.accumulate) return;
    const int64_t matrix = args.grid.mode == GemmMode::kGroupedK ? tile.group * args.grid.m : 0;
#pragma unroll
    for (int i = 0; i < kFragM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = tile.row + warp_m + 16 * i + 8 * half + lane / 4;
        if (row >= tile.row_end) continue;
        const Alpha alpha = empty ? Alpha{1, 1} : alpha_of(args.scales, tile.group, row);
#pragma unroll
        for (int j = 0; j < kFragN; ++j) {
          const int64_t col = tile.col + warp_n + 8 * j + lane % 4 * 2;
          if (col >= args.grid.n) continue;
          store_pair(args.out, (matrix + row) * args.out.ld + col, col + 1 < args.grid.n,
                     scaled(acc[i][j][2 * half], alpha), scaled(acc[i][j][2 * half + 1], alpha));
        }
      }
    }
  }

  static __device__ __forceinline__ void run(const MmaArgs& args, uint32_t shared) {
    GemmTile tile;
    if (!locate(args.grid, blockIdx.x, kTileM, kTileN, &tile)) return;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int warp_m = warp % kWarpsM * kWarpM, warp_n = warp / kWarpsM * kWarpN;
    const Bf16* a = args.a.data;
    const Bf16* b = args.b.data + tile.group * args.b.group_stride;
    float acc[kFragM][kFragN][4] = {};
    const auto load = [&](int stage, int64_t k) {
      const uint32_t at = shared + static_cast<uint32_t>(stage * kStageBytes);
      TileA::template load<kThreads>(at, args.a, a, tile.row, tile.row_end, k, tile.k_end);
      TileB::template load<kThreads>(at + TileA::kBytes, args.b, b, tile.col, args.grid.n, k, tile.k_end);
    };
    int64_t next = tile.k_begin;
#pragma unroll
    for (int s = 0; s < kMmaStages - 1; ++s, next += kMmaDepth) {
      if (next < tile.k_end) load(s, next);
      cp_async_commit();
    }
    int stage = 0;
    for (int64_t k = tile.k_begin; k < tile.k_end; k += kMmaDepth, next += kMmaDepth) {
      cp_async_wait<kMmaStages - 2>();
      __syncthreads();
      if (next < tile.k_end) load((stage + kMmaStages - 1) % kMmaStages, next);
      cp_async_commit();
      multiply(shared + static_cast<uint32_t>(stage * kStageBytes), warp_m, warp_n, acc);
      stage = (stage + 1) % kMmaStages;
    }
    store(args, tile, warp_m, warp_n, acc);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 2) gemm_mma(const __grid_constant__ MmaArgs args) {
  extern __shared__ __align__(128) unsigned char shared[];
  Kernel::run(args, shared_address(shared));
}

}  // namespace fp4t::cuda
