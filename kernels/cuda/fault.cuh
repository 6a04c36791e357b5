// Reporting faults from kernels (kernels/cuda/context.h).
#pragma once

#include <cstring>

#include "kernels/cuda/context.h"

namespace fp4t::cuda {

// What a kernel needs to report; by value in its arguments.
struct FaultSink {
  Fault* fault;
  char op[32];
};

inline FaultSink fault_sink(const Queue& queue, const char* op) {
  FaultSink sink{context_of(queue).fault, {}};
  std::strncpy(sink.op, op, sizeof(sink.op) - 1);
  return sink;
}

// The first report wins; which of several kernels or threads comes first is not determined, and the run
// stops with any of them.
__device__ inline void report(const FaultSink& sink, FaultKind kind, int64_t position, int32_t value) {
  if (atomicCAS(&sink.fault->kind, 0u, static_cast<uint32_t>(kind)) != 0u) return;
  sink.fault->value = value;
  sink.fault->position = position;
  for (int i = 0; i < static_cast<int>(sizeof(sink.op)); ++i) sink.fault->op[i] = sink.op[i];
  __threadfence_system();
}

}  // namespace fp4t::cuda
