#include "kernels/ops/capability.h"

namespace fp4t {

std::string head_dim_obstacle(const Machine& machine, int64_t head_dim) {
  return machine.backend == Backend::kCuda ? cuda::head_dim_obstacle(head_dim) : "";
}

int64_t workspace_bytes(const Machine& machine, const ProductCodes& codes) {
  return machine.backend == Backend::kCuda ? cuda::workspace_bytes(codes) : 0;
}

int64_t workspace_bytes(const Machine& machine, const CachedRows& rows) {
  return machine.backend == Backend::kCuda ? cuda::workspace_bytes(rows) : 0;
}

int64_t workspace_bytes(const Machine& machine, int64_t rows, int64_t heads, int64_t vocabulary) {
  return machine.backend == Backend::kCuda ? cuda::workspace_bytes(rows, heads, vocabulary) : 0;
}

}  // namespace fp4t
