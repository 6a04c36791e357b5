// Sums and maxima over a warp or a block, in an order that depends on the block's size alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp4t::cuda {

// Every lane gets the result; a butterfly, so all lanes add in the same tree.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}

// Every thread gets the result. `scratch` holds 33 values of T in shared memory; blockDim.x is a multiple
// of 32. Ends with a barrier, so that scratch may be used again at once.
template <class T>
__device__ T block_sum(T x, T* scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  x = warp_sum(x);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  if (warp == 0) {
    const T total = warp_sum(lane < warps ? scratch[lane] : T{});
    if (lane == 0) scratch[32] = total;
  }
  __syncthreads();
  const T out = scratch[32];
  __syncthreads();
  return out;
}

}  // namespace fp4t::cuda
