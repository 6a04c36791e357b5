// Owned tensors for tests, filled from a seed; NaN-poisoned when fresh so that unwritten output shows.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/base/tensor.h"

namespace fp4t::test {

// An owned host tensor; `view()` is what ops take.
class HostTensor {
 public:
  HostTensor(DType dtype, const Shape& shape) : dtype_(dtype), shape_(shape) {
    bytes_.assign(static_cast<size_t>(shape.elements() * dtype_bytes(dtype)) + 1, 0xFF);
  }
  TensorView view() { return {bytes_.data(), dtype_, shape_}; }
  template <class T>
  T* as() {
    return view().as<T>();
  }
  int64_t elements() const { return shape_.elements(); }
  void zero() { std::fill(bytes_.begin(), bytes_.end(), uint8_t{0}); }
  // Byte equality of contents.
  bool same_bytes(const HostTensor& other) const { return bytes_ == other.bytes_; }

 private:
  DType dtype_;
  Shape shape_;
  std::vector<uint8_t> bytes_;
};

// BF16 by rounding to nearest even, for test inputs only.
inline Bf16 to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  u += 0x7FFFu + ((u >> 16) & 1u);
  return {static_cast<uint16_t>(u >> 16)};
}
inline float from_bf16(Bf16 x) {
  const uint32_t u = uint32_t{x.bits} << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Standard normal values times `scale`, in the tensor's own dtype (F32 or BF16).
inline void fill_normal(HostTensor& t, uint64_t seed, float scale = 1.0f) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  const TensorView v = t.view();
  for (int64_t i = 0; i < v.elements(); ++i) {
    if (v.dtype == DType::kF32) {
      v.as<float>()[i] = normal(engine);
    } else {
      v.as<Bf16>()[i] = to_bf16(normal(engine));
    }
  }
}

}  // namespace fp4t::test
