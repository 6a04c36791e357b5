// Token embedding.
#pragma once

#include "kernels/base/tensor.h"

namespace fp4t {

struct EmbedForward {
  static constexpr const char* kName = "embed_forward";
  TensorView table;   // act [V, D]
  TensorView tokens;  // I32 [T], in [0, V)
  TensorView out;     // act [T, D]
  void check() const;
};

struct EmbedBackward {
  static constexpr const char* kName = "embed_backward";
  TensorView dout;    // act [T, D]
  TensorView tokens;  // I32 [T]
  TensorView dtable;  // F32 [V, D], added to; each row sums its tokens in index order
  void check() const;
};

}  // namespace fp4t
