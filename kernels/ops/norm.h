// RMSNorm (Zhang and Sennrich 2019): y = x * rstd * w, rstd = 1/sqrt(mean(x^2) + eps), statistics in FP32.
// "act" below is the dtype of tensors between ops: BF16, or F32 under the fp32 format.
#pragma once

#include "kernels/ops/quantize.h"

namespace fp4t {

struct NormForward {
  static constexpr const char* kName = "norm_forward";
  TensorView x;         // act [T, D]
  TensorView residual;  // optional act [T, D]: the norm reads sum = act(x + residual)
  TensorView weight;    // F32 [D]
  float eps;
  TensorView sum;            // act [T, D], required with residual
  TensorView out;            // act [T, D]
  TensorView rstd;           // F32 [T]
  RoundedRows rounded = {};  // optional, of out
  void check() const;
};

struct NormBackward {
  static constexpr const char* kName = "norm_backward";
  TensorView x;          // act [T, D], what was normalised (sum where there was a residual)
  TensorView weight;     // F32 [D]
  TensorView rstd;       // F32 [T]
  TensorView dout;       // act [T, D]
  TensorView dresidual;  // optional act [T, D], gradient arriving past the norm, added to dx
  TensorView dx;         // act [T, D]; may alias dresidual
  TensorView dweight;    // F32 [D], added to; summed over fixed chunks of tokens in order
  void check() const;
};

// Query and key normalisation (optional) followed by rotary embedding (Su et al. 2021, half-split form)
// on packed rows [q heads | k heads | v heads] of head_dim each; v is copied.
struct QkNormRopeForward {
  static constexpr const char* kName = "qk_norm_rope_forward";
  TensorView qkv;  // act [T, (heads + 2 kv_heads) * head_dim]
  int64_t heads, kv_heads, head_dim;
  TensorView positions;  // I32 [T], < rows of the tables
  TensorView cos, sin;   // F32 [max_position, head_dim / 2]
  TensorView q_weight;   // optional F32 [head_dim]; both or none
  TensorView k_weight;   // optional F32 [head_dim]
  float eps;
  TensorView out;   // act, shape of qkv
  TensorView rstd;  // F32 [T, heads + kv_heads], when the weights are given
  void check() const;
};

struct QkNormRopeBackward {
  static constexpr const char* kName = "qk_norm_rope_backward";
  TensorView qkv;  // act, the forward's input; read only when the weights are given
  int64_t heads, kv_heads, head_dim;
  TensorView positions;  // I32 [T]
  TensorView cos, sin;
  TensorView q_weight, k_weight, rstd;  // as in the forward
  TensorView dout;                      // act, shape of qkv
  TensorView dqkv;                      // act, shape of qkv; may alias dout
  TensorView dq_weight;                 // F32 [head_dim], added to; when the weights are given
  TensorView dk_weight;
  void check() const;
};

}  // namespace fp4t
