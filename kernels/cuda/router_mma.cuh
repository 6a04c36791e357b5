// FP32 products on the BF16 tensor cores. An FP32 number is the exact sum of three BF16 pieces, cut off its
// bits from the top, and a product of pieces is exact; what the cores round is the running sum, which they
// cut off. So sums run over kRouterChunk elements of the contraction and are then added in FP32, in order.
// The order of everything depends on the contraction alone: for each 16 elements the products of the
// smallest pieces first. Kernels of any tiling therefore give the same bits for the same row.
// Rejected: longer running sums (with 128 elements and 6 products each, 48 steps towards zero, NMSE 1.0e-12
// on an H200), TF32 (half the rate, 11 bits a piece).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/gemm_ptx.cuh"
#include "kernels/formats/bf16.h"

namespace fp4t::cuda {

inline constexpr int kRouterChunk = 32;
inline constexpr int kPieces = 3;

// The pieces of two neighbours, packed, largest first.
__device__ __forceinline__ void split(float low, float high, uint32_t (&piece)[kPieces]) {
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const uint32_t l = bits_of(low), h = bits_of(high);
    piece[p] = __byte_perm(l, h, 0x7632);
    low = low - float_of(l & 0xFFFF0000u);
    high = high - float_of(h & 0xFFFF0000u);
  }
}

// The products of pieces that count, smallest first, as (piece of a, piece of b); an operand in BF16 is its
// only piece. Of two operands in pieces, products below 2^-24 of the whole are left out.
template <int kPiecesA, int kPiecesB>
struct Products {
  static constexpr int kCount = kPiecesA * kPiecesB == kPieces * kPieces ? 6 : kPiecesA * kPiecesB;
  // For two operands in pieces: (0, 2) (1, 1) (2, 0) (0, 1) (1, 0) (0, 0).
  __host__ __device__ static constexpr int a(int i) {
    if (kPiecesA == 1) return 0;
    return kPiecesB == 1 ? kPiecesA - 1 - i : i < 3 ? i : i < 5 ? i - 3 : 0;
  }
  __host__ __device__ static constexpr int b(int i) {
    if (kPiecesB == 1) return 0;
    return kPiecesA == 1 ? kPiecesB - 1 - i : i < 3 ? 2 - i : i < 5 ? 4 - i : 0;
  }
};

}  // namespace fp4t::cuda
