// Tensors of random numbers. The uniform numbers are exact; what is made of them by logarithm, sine and
// cosine in FP64 is rounded once to FP32, so two machines differ in a last bit here and there.
#pragma once

#include "kernels/base/philox.h"
#include "kernels/base/tensor.h"

namespace fp4t {

// out[i] = scale * n_i, n_i standard normal by Box and Muller (1958): element i takes words 2 (i / 2 mod 2)
// and the next of draw i / 4, the cosine for even i, the sine for odd. BF16 is rounded to nearest.
struct FillNormal {
  static constexpr const char* kName = "fill_normal";
  PhiloxKey key;
  float scale;
  TensorView out;  // F32 or BF16, any shape
  void check() const;
};

}  // namespace fp4t
