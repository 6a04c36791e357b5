#include "kernels/cuda/gemm_wgmma_kernel.cuh"

namespace fp4t::cuda::sm90 {

void launch_k_k_cut(const Maps& maps, const Launch& p, const Grid& grid) {
  launch_any<false, false, true>(maps, p, grid);
}

}  // namespace fp4t::cuda::sm90
