// The router's products in tiles of shared memory, for many tokens: out[m, n] = sum over k of a[m, k] b[n, k]
// in pieces (router_mma.cuh). Copies run kStages - 1 steps ahead.
#pragma once

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/router_mma.cuh"

namespace fp4t::cuda {

inline constexpr int kTileDepth = kRouterChunk;  // a step, summed by itself
inline constexpr int kStages = 4;
inline constexpr int kTileThreads = 256;

struct TiledProduct {
  const void *a, *b;
  int64_t m, n, k;
  float* out;     // [m, n]; of slice s at out + s * m * n
  int64_t slice;  // of k for one blockIdx.z, a multiple of kRouterChunk
};

// An operand's tile: `kOuter` values of m or n by kTileDepth of k. In memory either index is contiguous, and
// its size a multiple of 16 bytes; pitches keep fragments free of bank conflicts.
template <class T, bool kAlongK, int kOuter>
struct OperandTile {
  static constexpr bool kWhole = sizeof(T) == 2;  // BF16: no pieces
  static constexpr int kSplit = kWhole ? 1 : kPieces;
  static constexpr int kPer16 = 16 / static_cast<int>(sizeof(T));
  static constexpr int kRows = kAlongK ? kOuter : kTileDepth, kColumns = kAlongK ? kTileDepth : kOuter;
  static constexpr int kPad = kAlongK && !kWhole ? 32 : 16;
  static constexpr int kPitch = kColumns * static_cast<int>(sizeof(T)) + kPad;  // bytes
  static constexpr int kBytes = kRows * kPitch;

  __device__ static void load(char* tile, const T* p, int64_t outer, int64_t outers, int64_t k, int64_t k_end,
                              int64_t ks) {
    constexpr int kChunks = kColumns / kPer16;
#pragma unroll
    for (int i = 0; i < kRows * kChunks / kTileThreads; ++i) {
      const int at = i * kTileThreads + static_cast<int>(threadIdx.x);
      const int r = at / kChunks, c = at % kChunks * kPer16;
      const int64_t o = outer + (kAlongK ? r : c), kk = k + (kAlongK ? c : r);
      const bool inside = o < outers && kk < k_end;
      const T* from = inside ? p + (kAlongK ? o * ks + kk : kk * outers + o) : p;
      cp_async16(shared_address(tile + r * kPitch + c * static_cast<int>(sizeof(T))), from, inside ? 16 : 0);
    }
  }

  // The 16 x 16 fragment at (outer, k), in pieces.
  __device__ static void fragment(const char* tile, int outer, int k, int lane, uint32_t (&f)[kSplit][4]) {
    if constexpr (kWhole) {
      static_assert(kAlongK, "x is contiguous along the width");
      ldmatrix(shared_address(tile + (outer + lane % 16) * kPitch + (k + lane / 16 * 8) * 2), f[0]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pair(tile, outer + lane / 4 + i % 2 * 8, k + lane % 4 * 2 + i / 2 * 8, i, f);
    }
  }
  // Two 8 x 16 fragments, at (outer, k) and (outer + 8, k).
  __device__ static void fragments(const char* tile, int outer, int k, int lane,
                                   uint32_t (&f)[2][kSplit][2]) {
    if constexpr (kWhole) {
      static_assert(!kAlongK, "x is contracted over the tokens");
      uint32_t all[4];
      ldmatrix_trans(shared_address(tile + (k + lane % 16) * kPitch + (outer + lane / 16 * 8) * 2), all);
      f[0][0][0] = all[0], f[0][0][1] = all[1], f[1][0][0] = all[2], f[1][0][1] = all[3];
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) pair(tile, outer + 8 * n + lane / 4, k + lane % 4 * 2 + 8 * i, i, f[n]);
      }
    }
  }

 private:
  template <int kRegisters>
  __device__ static void pair(const char* tile, int outer, int k, int at,
                              uint32_t (&f)[kPieces][kRegisters]) {
    float low, high;
    if constexpr (kAlongK) {
      const float2 both = *reinterpret_cast<const float2*>(tile + outer * kPitch + k * 4);
      low = both.x, high = both.y;
    } else {
      low = *reinterpret_cast<const float*>(tile + k * kPitch + outer * 4);
      high = *reinterpret_cast<const float*>(tile + (k + 1) * kPitch + outer * 4);
    }
    uint32_t piece[kPieces];
    split(low, high, piece);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) f[p][at] = piece[p];
  }
};

// Operands and how the warps share the tile: kWarpsM x kWarpsN warps of kM x kN fragments.
template <class TA, bool kAlongKA, class TB, bool kAlongKB, int kWarpsM, int kM, int kWarpsN, int kN>
struct Tiling {
  static constexpr int kTileM = kWarpsM * kM * 16, kTileN = kWarpsN * kN * 8;
  static_assert(kWarpsM * kWarpsN * 32 == kTileThreads && kN % 2 == 0);
  using A = OperandTile<TA, kAlongKA, kTileM>;
  using B = OperandTile<TB, kAlongKB, kTileN>;
  using ElementA = TA;
  using ElementB = TB;
  static constexpr int kStageBytes = A::kBytes + B::kBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  using Sums = float[kM][kN][4];

  // One step; pieces outside, sums inside, so that no product waits for the one before it.
  __device__ static void multiply(const char* stage, int m, int n, int lane, Sums& acc) {
    using P = Products<A::kSplit, B::kSplit>;
#pragma unroll
    for (int k = 0; k < kTileDepth; k += 16) {
      uint32_t a[kM][A::kSplit][4];
#pragma unroll
      for (int i = 0; i < kM; ++i) A::fragment(stage, m + 16 * i, k, lane, a[i]);
#pragma unroll
      for (int j = 0; j < kN; j += 2) {
        uint32_t b[2][B::kSplit][2];
        B::fragments(stage + A::kBytes, n + 8 * j, k, lane, b);
#pragma unroll
        for (int p = 0; p < P::kCount; ++p) {
#pragma unroll
          for (int i = 0; i < kM; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              mma_bf16(acc[i][j + h], a[i][P::a(p)], b[h][P::b(p)][0], b[h][P::b(p)][1]);
            }
          }
        }
      }
    }
  }
  __device__ static void add(const Sums& acc, Sums& total) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) total[i][j][r] = total[i][j][r] + acc[i][j][r];
      }
    }
  }
  __device__ static void store(const Sums& total, float* out, int64_t m, int64_t n, int64_t rows,
                               int64_t columns) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int64_t row = m + 16 * i + 8 * h, column = n + 8 * j;
          if (row >= rows || column >= columns) continue;
          float* p = out + row * columns + column;
          if (columns % 2 == 0) {
            *reinterpret_cast<float2*>(p) = make_float2(total[i][j][2 * h], total[i][j][2 * h + 1]);
          } else {
            p[0] = total[i][j][2 * h];
            if (column + 1 < columns) p[1] = total[i][j][2 * h + 1];
          }
        }
      }
    }
  }
};

template <class Tiling>
__global__ void __launch_bounds__(kTileThreads, 1)
    tiled_product(TiledProduct p, int warps_n, int warp_m, int warp_n) {
  extern __shared__ __align__(16) char shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t m0 = int64_t{blockIdx.x} * Tiling::kTileM, n0 = int64_t{blockIdx.y} * Tiling::kTileN;
  const int m = warp / warps_n * warp_m, n = warp % warps_n * warp_n;
  const int64_t k_begin = int64_t{blockIdx.z} * p.slice;
  const int64_t k_end = k_begin + p.slice < p.k ? k_begin + p.slice : p.k;
  const int64_t steps = (k_end - k_begin + kTileDepth - 1) / kTileDepth;
  const auto load = [&](int64_t step) {
    if (step < steps) {
      char* stage = shared + step % kStages * Tiling::kStageBytes;
      const int64_t k = k_begin + step * kTileDepth;
      Tiling::A::load(stage, static_cast<const typename Tiling::ElementA*>(p.a), m0, p.m, k, k_end, p.k);
      Tiling::B::load(stage + Tiling::A::kBytes, static_cast<const typename Tiling::ElementB*>(p.b), n0, p.n,
                      k, k_end, p.k);
    }
    cp_async_commit();
  };
  typename Tiling::Sums total = {};
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) load(s);
  for (int64_t step = 0; step < steps; ++step) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1);
    typename Tiling::Sums acc = {};
    Tiling::multiply(shared + step % kStages * Tiling::kStageBytes, m, n, lane, acc);
    Tiling::add(acc, total);
  }
  Tiling::store(total, p.out + blockIdx.z * p.m * p.n, m0 + m + lane / 4, n0 + n + lane % 4 * 2, p.m, p.n);
}

template <class TA, bool kAlongKA, class TB, bool kAlongKB, int kWarpsM, int kM, int kWarpsN, int kN>
void launch_tiles(Queue& queue, const char* op, const TiledProduct& p) {
  using T = Tiling<TA, kAlongKA, TB, kAlongKB, kWarpsM, kM, kWarpsN, kN>;
  FP4T_CUDA(
      cudaFuncSetAttribute(tiled_product<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes));
  const dim3 grid(static_cast<unsigned>(ceil_div(p.m, T::kTileM)),
                  static_cast<unsigned>(ceil_div(p.n, T::kTileN)),
                  static_cast<unsigned>(ceil_div(p.k, p.slice)));
  tiled_product<T><<<grid, kTileThreads, T::kSharedBytes, stream_of(queue)>>>(p, kWarpsN, kM * 16, kN * 8);
  check_launch(op);
}

}  // namespace fp4t::cuda
