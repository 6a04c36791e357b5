// The launches behind the op bodies of gemm.cu (gemm_problem.h has the wgmma core's).
#pragma once

#include "kernels/cuda/gemm_choose.h"
#include "kernels/cuda/gemm_problem.h"

namespace fp4t::cuda {

// mma.sync, any shape and alignment (gemm_mma.cuh).
void launch_mma(Queue& queue, const GemmProblem& problem);

// The stored row of A, of `count`, that each row of the product is made from; null: its own.
struct RowIndex {
  const int32_t* rows = nullptr;
  int64_t count = 0;
};
// Few rows (gemm_stream.cuh): weights as BF16, or as NVFP4 codes in CodeOrder::kStream; then b has scales
// only.
void launch_stream_bf16(Queue& queue, const GemmProblem& problem);
void launch_stream_nvfp4(Queue& queue, const GemmProblem& problem, const QuantView& weights,
                         const RowIndex& index = {});

// F32 operands, one chain of fma k = 0 .. K-1 an output: the CPU's bits. `problem` has no data pointers.
void launch_fp32(Queue& queue, const GemmProblem& problem, const float* a, const float* b);

// How launch_mma launches one variant; one definition a file, for the compiler's sake.
#define FP4T_GEMM_MMA(name, tile_m, tile_n, warp_m, warp_n) void launch_##name(Queue&, const GemmProblem&);
#include "kernels/cuda/gemm_variants.inc"
#undef FP4T_GEMM_MMA

}  // namespace fp4t::cuda
