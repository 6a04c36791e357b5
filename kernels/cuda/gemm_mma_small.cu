#include "kernels/cuda/gemm_mma_launch.cuh"

namespace fp4t::cuda {

void launch_Small(Queue& queue, const GemmProblem& problem) { launch_tile<64, 64, 32, 32>(queue, problem); }

}  // namespace fp4t::cuda
