// Which core and tile a product gets: pure functions of sizes and pointers, tested without a GPU. Cores
// differ in speed alone.
#pragma once

#include "kernels/cuda/gemm_problem.h"
#include "kernels/formats/quant.h"

namespace fp4t::cuda {

enum class MmaVariant : uint8_t {
#define FP4T_GEMM_MMA(name, tile_m, tile_n, warp_m, warp_n) k##name,
#include "kernels/cuda/gemm_variants.inc"
#undef FP4T_GEMM_MMA
};

// The largest tile that still gives every multiprocessor one.
MmaVariant choose_mma(const GemmProblem& problem, int sm_count);

// Few rows a group: the core that streams weights once (gemm_stream.cuh) takes the product, of BF16 operands
// or of weights that stay NVFP4 codes. `a` is looked at for the latter only in its sizes.
bool stream_takes(const GemmProblem& problem);
bool stream_takes_codes(const GemmProblem& problem, const QuantView& weights);
// Rows of a tile there: 16, 32 or 64; lower than needed where that gives every multiprocessor a block.
int stream_tile_rows(const GemmProblem& problem, int sm_count);
// Fragments of 16 weight rows that a warp holds there beside codes, 1 or 2; two where tiles have 16 rows, K
// is at most 1024 and the blocks, half as many, still come to each multiprocessor several times.
int stream_codes_height(const GemmProblem& problem, int sm_count);
// Stages of a block's ring there, 16, 8, 4 or `least`: as many as let the blocks that share a multiprocessor
// fill it.
int stream_stages(int64_t blocks, int stage_bytes, int sm_count, int64_t shared_bytes, int least = 4);

// The largest unit, 16, 4 or 2 bytes, that every row of an operand can be read in.
int copy_bytes(const GemmSide& side);

}  // namespace fp4t::cuda
