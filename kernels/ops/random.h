// Tensors of random numbers. The uniform numbers are exact; what is made of them by logarithm, sine and
// cosine in FP64 is rounded once to FP32, so two machines differ in a last bit here and there.
#pragma once

#include "kernels/base/philox.h"
#include "kernels/base/tensor.h"

namespace fp4t {

// out[i] = scale * n_j, j = first_element + i, n_j standard normal by Box and Muller (1958): it takes words
// 2 (j / 2 mod 2) and the next of draw j / 4, the cosine for even j, the sine for odd. BF16 is rounded to
// nearest.
struct FillNormal {
  static constexpr const char* kName = "fill_normal";
  PhiloxKey key;
  float scale;
  TensorView out;             // F32 or BF16, any shape
  int64_t first_element = 0;  // index of element 0 in the logical tensor
  void check() const;
};

}  // namespace fp4t
