// Tensor maps for the copy engine: how a tensor of three dimensions lies in memory, and the box that one copy
// brings into shared memory. What lies outside of the tensor reads as zero; in shared memory rows have 128
// bytes, swizzled as wgmma wants them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/base/dtype.h"

namespace fp4t::cuda {

struct TensorMapShape {
  int64_t size[3];    // elements, the innermost dimension first
  int64_t stride[2];  // elements from one index to the next, of the two outer dimensions
  int box[3];
};

// BF16 or F32. `data` is 16-byte aligned, and so are the strides.
CUtensorMap tensor_map(const void* data, DType dtype, const TensorMapShape& shape);

}  // namespace fp4t::cuda
