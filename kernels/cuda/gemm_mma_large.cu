#include "kernels/cuda/gemm_mma_launch.cuh"

namespace fp4t::cuda {

void launch_Large(Queue& queue, const GemmProblem& problem) { launch_tile<128, 128, 64, 32>(queue, problem); }

}  // namespace fp4t::cuda
