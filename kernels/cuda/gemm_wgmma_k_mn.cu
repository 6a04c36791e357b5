#include "kernels/cuda/gemm_wgmma_kernel.cuh"

namespace fp4t::cuda::sm90 {

void launch_k_mn(const Maps& maps, const Launch& p, const Grid& grid) {
  launch_any<false, true, false>(maps, p, grid);
}

}  // namespace fp4t::cuda::sm90
