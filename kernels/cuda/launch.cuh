// Launches of kernels that may begin while the one before them in the stream still runs (programmatic
// dependent launch): on their way, they wait for it themselves. Between small kernels that saves most of a
// launch.
#pragma once

#include <utility>

#include "kernels/cuda/context.h"

namespace fp4t::cuda {

// First thing in a kernel that is launched by launch_early: until everything enqueued before it has run and
// its writes are here. Before it a kernel may read its arguments, and touch no memory. Then the next one may
// come.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class... Parameters, class... Arguments>
void launch_early(const Queue& queue, const char* op, void (*kernel)(Parameters...), dim3 grid, int threads,
                  int64_t shared_bytes, Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = context_of(queue).stream;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...), op);
}

}  // namespace fp4t::cuda
