// Elementwise ops between the products.
#pragma once

#include "kernels/ops/quantize.h"

namespace fp4t {

// out = silu(gate) * up (Shazeer 2020) on rows [gate F | up F]. With clamp > 0: gate is limited from
// above by clamp, up to [-clamp, clamp] (0: no clamp).
struct SwigluForward {
  static constexpr const char* kName = "swiglu_forward";
  TensorView gate_up;  // act [T, 2F]
  float clamp;
  TensorView out;            // act [T, F]
  RoundedRows rounded = {};  // optional, of out
  void check() const;
};

struct SwigluBackward {
  static constexpr const char* kName = "swiglu_backward";
  TensorView gate_up;  // act [T, 2F]
  float clamp;
  TensorView dout;      // act [T, F]
  TensorView dgate_up;  // act [T, 2F]; may alias gate_up
  void check() const;
};

// out = a + b in FP32, rounded once to out's dtype; out may alias a or b.
struct Add {
  static constexpr const char* kName = "add";
  TensorView a, b, out;  // BF16 or F32, same shape
  void check() const;
};

// out = x in another dtype (BF16 and F32), rounded to nearest even.
struct Cast {
  static constexpr const char* kName = "cast";
  TensorView x, out;
  void check() const;
};

// out = a * x + b * y in FP32 (products and sum rounded one by one); y may be empty; out may alias.
struct LinearCombination {
  static constexpr const char* kName = "linear_combination";
  float a;
  TensorView x;  // F32
  float b;
  TensorView y;  // F32, same shape, or empty
  TensorView out;
  void check() const;
};

}  // namespace fp4t
