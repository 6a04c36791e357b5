// Prefix sums of integers over a block.
#pragma once

#include <cuda_runtime.h>

namespace fp4t::cuda {

// Sum of x over the threads before this one; `total` over all of them. `scratch` holds 32 values in shared
// memory; blockDim.x is a multiple of 32. Ends with a barrier, so that scratch may be used again at once.
__device__ inline int block_exclusive_sum(int x, int* scratch, int& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  int inclusive = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xFFFFFFFFu, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < warps; ++w) {
    const int sum = scratch[w];
    before += w < warp ? sum : 0;
    total += sum;
  }
  __syncthreads();
  return before + inclusive - x;
}

}  // namespace fp4t::cuda
