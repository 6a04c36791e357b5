// Copies from global to shared memory that the thread does not wait for (cp.async, all of sm_80 and later).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp4t::cuda {

// 16 bytes; both addresses are multiples of 16. Without `take` it writes zeros and reads nothing.
__device__ __forceinline__ void copy_async16(void* shared, const void* global, bool take = true) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(take ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending groups of this thread are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fp4t::cuda
