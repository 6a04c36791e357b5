// The arithmetic of BF16 attention on tensor cores, one for packed and for cached rows.
//
// The contract of the numbers. Keys are counted from the document's first token (position 0 of a slot):
//   blocks of kBlockKeys keys, kSplitKeys of them in order make a split;
//   within a split, block by block: scores in FP32 from BF16 operands; m = max(m, block's maximum);
//     p = 2^(score * c - m * c) with c = scale * log2(e); l and O are rescaled by 2^(m_old * c - m * c);
//     l takes the FP32 p, O the BF16-rounded p times V, in FP32;
//   the splits are merged in order (Merge below), then O / l is rounded once.
// A key that a row does not read enters with p = 0, and so changes nothing. So a row's bits depend on its
// own keys alone: not on its tile, on the kernel, or on how many splits run at the same time.
// One limit: tensor cores multiply zero by everything, so an infinite or NaN value row makes NaN of the rows
// of its own document that share a tile with it, earlier ones too; never of another document or slot.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/attention_sizes.h"
#include "kernels/cuda/bf16_pair.cuh"
#include "kernels/cuda/gemm_ptx.cuh"
#include "kernels/formats/bf16.h"

namespace fp4t::cuda {

inline constexpr int kBlockKeys = 128;
inline constexpr int kGroupRows = 64;  // rows of four warps, 16 each
inline constexpr int kGroupThreads = 128;

// Shared tiles [rows][64 * panels] of BF16: panels of 64 columns, rows of 128 bytes whose eight 16-byte
// chunks are exchanged by chunk ^ row % 8, the 128-byte swizzle of wgmma and TMA.
__device__ __forceinline__ uint32_t tile_offset(int tile_rows, int row, int chunk) {
  return static_cast<uint32_t>((chunk / 8 * tile_rows + row) * 128 + ((chunk % 8) ^ (row % 8)) * 16);
}

// threadIdx.x, read anew where it is asked for. What comes from it is computed there, too: offsets into tiles
// are many, and kept in registers from one block of keys to the next they would leave none.
__device__ __forceinline__ int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Fragments of a warp's 16 rows: element [j][2 * h + e] is row lane / 4 + 8 * h, column 8 * j + lane % 4 * 2
// + e.
template <int kColumns>
using Fragment = float[kColumns / 8][4];

template <int kColumns>
__device__ __forceinline__ void clear(Fragment<kColumns>& x) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.0f;
}

// out[16][kN] += A[16][kD] B[kN][kD]^T: A the warp's rows from `row` on of a tile of a_rows, B whole.
template <int kD, int kN>
__device__ __forceinline__ void multiply_rows(uint32_t a, int a_rows, int row, uint32_t b, int b_rows,
                                              Fragment<kN>& out) {
  const int lane = thread_now() % 32;
#pragma unroll
  for (int k = 0; k < kD / 16; ++k) {
    uint32_t af[4];
    ldmatrix(a + tile_offset(a_rows, row + lane % 16, 2 * k + lane / 16), af);
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      uint32_t bf[4];
      ldmatrix(b + tile_offset(b_rows, 16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2), bf);
      mma_bf16(out[2 * n], af, bf[0], bf[1]);
      mma_bf16(out[2 * n + 1], af, bf[2], bf[3]);
    }
  }
}

// out[16][kD] += A[16][kK] B[kK][kD]: A from registers, B a tile of b_rows.
template <int kD, int kK>
__device__ __forceinline__ void multiply_columns(const uint32_t (&a)[kK / 16][4], uint32_t b, int b_rows,
                                                 Fragment<kD>& out) {
  const int lane = thread_now() % 32;
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
#pragma unroll
    for (int n = 0; n < kD / 16; ++n) {
      uint32_t bf[4];
      ldmatrix_trans(b + tile_offset(b_rows, 16 * k + lane % 16, 2 * n + lane / 16), bf);
      mma_bf16(out[2 * n], a[k], bf[0], bf[1]);
      mma_bf16(out[2 * n + 1], a[k], bf[2], bf[3]);
    }
  }
}

// BF16 pairs of a fragment as the A operand of the next product.
template <int kK>
__device__ __forceinline__ void pack_operand(const Fragment<kK>& x, uint32_t (&a)[kK / 16][4]) {
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    a[k][0] = pack_bf16(x[2 * k][0], x[2 * k][1]);
    a[k][1] = pack_bf16(x[2 * k][2], x[2 * k][3]);
    a[k][2] = pack_bf16(x[2 * k + 1][0], x[2 * k + 1][1]);
    a[k][3] = pack_bf16(x[2 * k + 1][2], x[2 * k + 1][3]);
  }
}

// Element [j][i] of the fragment that was packed, rounded.
template <int kTiles>
__device__ __forceinline__ float operand_element(const uint32_t (&a)[kTiles][4], int j, int i) {
  const uint32_t pair = a[j / 2][j % 2 * 2 + i / 2];
  return float_of(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
}

// Over the four lanes that hold a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// m * c; an empty row's maximum, -inf, counts as 0, since its scores are all -inf.
__device__ __forceinline__ float scaled_max(float m, float c) { return m == -INFINITY ? 0.0f : m * c; }

// State of a thread's two rows (lane / 4 and lane / 4 + 8) within a split; l is this lane's part.
struct SoftmaxState {
  float m[2], l[2];
  __device__ __forceinline__ void clear() {
    m[0] = m[1] = -INFINITY;
    l[0] = l[1] = 0.0f;
  }
};

// Scores of columns that a row does not read become -inf; `valid` is the row's keys from the block's first
// key on.
template <int kN>
__device__ __forceinline__ void mask_scores(Fragment<kN>& s, const int (&valid)[2]) {
  const int first = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (8 * j + first + i % 2 >= valid[i / 2]) s[j][i] = -INFINITY;
    }
  }
}

// Scores become probabilities; `rescale` is what O has to be multiplied by.
template <int kN>
__device__ __forceinline__ void softmax_block(Fragment<kN>& s, float c, SoftmaxState& state,
                                              float (&rescale)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
    for (int j = 1; j < kN / 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
    const float m = fmaxf(state.m[h], row_max(largest));
    const float mc = scaled_max(m, c);
    rescale[h] = exp2_approx(__fmul_rn(state.m[h], c) - mc);  // exactly 1 where m stays
    state.m[h] = m;
    // Four runs of columns by themselves, then a tree: warps that share a block's keys can do the same.
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float p0 = exp2_approx(__fmaf_rn(s[j][2 * h], c, -mc));
      const float p1 = exp2_approx(__fmaf_rn(s[j][2 * h + 1], c, -mc));
      s[j][2 * h] = p0;
      s[j][2 * h + 1] = p1;
      sum[j / (kN / 32)] += p0 + p1;
    }
    state.l[h] = __fmaf_rn(state.l[h], rescale[h], (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

template <int kD>
__device__ __forceinline__ void rescale_rows(Fragment<kD>& o, const float (&rescale)[2]) {
#pragma unroll
  for (int j = 0; j < kD / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o[j][i] *= rescale[i / 2];
  }
}

// Joins a later split to an earlier sum: the factors of both, and the new maximum and sum. l is whole.
struct Merge {
  float earlier, later;
  __device__ __forceinline__ Merge(float c, float later_m, float later_l, float& m, float& l) {
    const float largest = fmaxf(m, later_m);
    const float mc = scaled_max(largest, c);
    earlier = exp2_approx(__fmul_rn(m, c) - mc);
    later = exp2_approx(__fmul_rn(later_m, c) - mc);
    m = largest;
    l = __fmaf_rn(l, earlier, later_l * later);
  }
  __device__ __forceinline__ float operator()(float earlier_o, float later_o) const {
    return __fmaf_rn(earlier_o, earlier, later_o * later);
  }
};

// Natural logarithm of the sum of the exponentials.
__device__ __forceinline__ float log_sum(float m, float l, float c) {
  return (scaled_max(m, c) + log2f(l)) * 0.69314718055994530942f;
}

// Loads rows [0, rows) of `kD` columns into a tile of tile_rows, zeros behind `valid` rows and behind
// `columns` (a multiple of 8). `from` is row 0, `stride` in elements.
template <int kD, int kThreads>
__device__ __forceinline__ void load_tile(uint32_t tile, int tile_rows, const Bf16* from, int64_t stride,
                                          int valid, int columns) {
  constexpr int kChunks = kD / 8;
  const int thread = thread_now(), chunk = thread % kChunks;
#pragma unroll 4
  for (int row = thread / kChunks; row < tile_rows; row += kThreads / kChunks) {
    const bool zero = row >= valid || chunk * 8 >= columns;
    cp_async16(tile + tile_offset(tile_rows, row, chunk), zero ? from : from + row * stride + chunk * 8,
               zero ? 0 : 16);
  }
}

}  // namespace fp4t::cuda
