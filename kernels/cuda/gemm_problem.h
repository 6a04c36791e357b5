// A product of BF16 operands as the cores take it: what an op of kernels/ops/gemm.h becomes once its
// operands are prepared (codes dequantised to BF16). Pointers are the device's; nothing here is read on
// the host. Internal to kernels/cuda.
//
//   kDense     out [M, N] = alpha * A [M, K] B [N, K]^T
//   kGroupedM  rows [offsets[g], offsets[g + 1]) of A and out belong to group g and meet matrix g of B;
//              rows from offsets[G] on (M is a capacity) are neither read nor written
//   kGroupedK  out [G, M, N]: matrix g sums over depth [offsets[g], offsets[g + 1]) of A and B; depth from
//              offsets[G] on (K is a capacity) may hold anything, NaN included. A group without depth
//              gives zeros, or leaves its matrix alone when accumulating, whatever the scales hold
//
// A depth of 0 gives zeros (or leaves out alone) in every mode. The order in which a core sums depends on
// (N, K) alone, never on M, a row's place or the grid; with kGroupedK on the group's own depth.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/queue.h"

namespace fp4t::cuda {

enum class GemmMode : uint8_t { kDense, kGroupedM, kGroupedK };

// Which of an operand's tensor scales an output element takes; kNone multiplies by nothing.
enum class ScaleOf : uint8_t { kNone, kAll, kGroup, kRow };  // kRow: rows of A, of out in kGroupedM too

struct GemmSide {
  const Bf16* data = nullptr;
  // false (K-major): [outer, depth], depth contiguous. true (MN-major, "transposed"): [depth, outer].
  bool mn_major = false;
  int64_t ld = 0;            // elements from one stored row to the next
  int64_t group_stride = 0;  // elements from one group's matrix to the next; B of kGroupedM only
  const float* scale = nullptr;
  ScaleOf scale_of = ScaleOf::kNone;
};

struct GemmProblem {
  GemmMode mode = GemmMode::kDense;
  int64_t m = 0, n = 0, k = 0;  // m of kGroupedM and k of kGroupedK are capacities
  GemmSide a, b;

  const int32_t* offsets = nullptr;  // device, I32 [groups + 1]; null when dense
  int64_t groups = 1;
  // Every bound in `offsets` is a multiple of this. K-major operands of kGroupedK (dequantised codes) come
  // with 32, MN-major ones (plain values) with 1; both sides are always of the same major there.
  int64_t offset_multiple = 1;

  void* out = nullptr;            // group g of kGroupedK at out + g * m * ld_out
  DType out_dtype = DType::kF32;  // kF32 or kBf16
  int64_t ld_out = 0;
  bool accumulate = false;  // F32 only: out = fp32(fp32(alpha * acc) + out)
};

// The wgmma core (gemm_wgmma.cu): whether it is built for this machine and takes this product (alignment,
// sizes worth it), decided from the host's fields and pointers alone; and its launch.
bool wgmma_takes(const Queue& queue, const GemmProblem& problem);
void launch_wgmma(Queue& queue, const GemmProblem& problem);

}  // namespace fp4t::cuda
