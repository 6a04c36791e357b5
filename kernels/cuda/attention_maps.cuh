// Tensor maps of rows of heads, for the copy engine.
#pragma once

#include <cuda.h>

#include "kernels/base/dtype.h"

namespace fp4t::cuda {

// BF16 [tokens, heads, head_dim], in boxes of `rows` tokens and 64 columns of one head; what lies outside of
// the tensor, columns behind head_dim too, reads as zero.
CUtensorMap head_map(const Bf16* data, int64_t head_dim, int64_t heads, int64_t tokens, int rows);

}  // namespace fp4t::cuda
