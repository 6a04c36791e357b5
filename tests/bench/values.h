// Owned tensors for benchmarks: the same values in every run, integers counting up modulo a bound.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/tensor.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

constexpr int64_t kValuesBound = 257;

class Values {
 public:
  // Floats lie in [-1, 1).
  Values(DType dtype, const Shape& shape) : dtype_(dtype), shape_(shape) {
    bytes_.resize(static_cast<size_t>(shape.elements() * dtype_bytes(dtype)));
    uint32_t state = 1;
    for (int64_t i = 0; i < shape.elements(); ++i) {
      state = state * 1664525u + 1013904223u;
      const float x = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
      if (dtype == DType::kF32) view().as<float>()[i] = x;
      if (dtype == DType::kBf16) view().as<Bf16>()[i] = f32_to_bf16(x);
      if (dtype == DType::kI32) view().as<int32_t>()[i] = static_cast<int32_t>(i % kValuesBound);
      if (dtype == DType::kI64) view().as<int64_t>()[i] = i;
    }
  }
  TensorView view() { return {bytes_.data(), dtype_, shape_}; }

 private:
  DType dtype_;
  Shape shape_;
  std::vector<char> bytes_;
};

}  // namespace fp4t
