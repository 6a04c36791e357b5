#include "kernels/cuda/attention_maps.cuh"

#include "kernels/cuda/tensor_map.h"

namespace fp4t::cuda {

CUtensorMap head_map(const Bf16* data, int64_t head_dim, int64_t heads, int64_t tokens, int rows) {
  return tensor_map(data, DType::kBf16,
                    {{head_dim, heads, tokens}, {head_dim, heads * head_dim}, {64, 1, rows}});
}

}  // namespace fp4t::cuda
