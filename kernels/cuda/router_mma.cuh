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

inline constexpr int kRouterChunk = 128;
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

// acc += a b over 16 elements for a whole `a` and a `b` in pieces, and the other way round.
__device__ __forceinline__ void multiply_pieces(float (&acc)[4], const uint32_t (&a)[1][4],
                                                const uint32_t (&b)[kPieces][2]) {
#pragma unroll
  for (int p = kPieces - 1; p >= 0; --p) mma_bf16(acc, a[0], b[p][0], b[p][1]);
}
__device__ __forceinline__ void multiply_pieces(float (&acc)[4], const uint32_t (&a)[kPieces][4],
                                                const uint32_t (&b)[1][2]) {
#pragma unroll
  for (int p = kPieces - 1; p >= 0; --p) mma_bf16(acc, a[p], b[0][0], b[0][1]);
}

}  // namespace fp4t::cuda
