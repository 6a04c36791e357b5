// Non-owning views. A TensorView is dense and row-major; views never own and never allocate.
// Quantised data has a view of its own (kernels/formats/quant.h).
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/base/check.h"
#include "kernels/base/dtype.h"

namespace fp4t {

// Up to four dimensions, outermost first.
class Shape {
 public:
  static constexpr int kMaxRank = 4;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) {
    FP4T_CHECK(dims.size() <= kMaxRank, "rank ", dims.size());
    for (int64_t d : dims) {
      FP4T_CHECK(d >= 0, "negative dimension ", d);
      dims_[static_cast<size_t>(rank_++)] = d;
    }
  }

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[static_cast<size_t>(i)]; }
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= (*this)[i];
    return n;
  }
  bool operator==(const Shape&) const = default;
  std::string text() const;  // "[2, 3]"

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

std::ostream& operator<<(std::ostream& out, const Shape& shape);

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;

  int64_t elements() const { return data_or_shape_elements(); }
  int64_t bytes() const { return elements() * dtype_bytes(dtype); }
  // True for a default-constructed view: "not given" where an op's field is optional.
  bool empty() const { return data == nullptr && shape.rank() == 0; }
  int64_t dim(int i) const { return shape[i]; }

  // Typed pointer; throws when the element type differs.
  template <class T>
  T* as() const {
    FP4T_CHECK(DTypeOf<T>::value == dtype, "tensor is ", dtype_name(dtype), ", asked for ",
               dtype_name(DTypeOf<T>::value));
    return static_cast<T*>(data);
  }

  // Rows [begin, begin + count) of the outermost dimension.
  TensorView rows(int64_t begin, int64_t count) const;
  // Same elements, other shape; throws when the counts differ.
  TensorView reshape(const Shape& new_shape) const;

 private:
  int64_t data_or_shape_elements() const { return shape.rank() == 0 && !data ? 0 : shape.elements(); }
};

// Calls body(T{}) with the element type of a BF16 or F32 tensor.
template <class Body>
void for_float_type(DType dtype, const Body& body) {
  FP4T_CHECK(dtype == DType::kBf16 || dtype == DType::kF32, dtype_name(dtype));
  if (dtype == DType::kBf16) {
    body(Bf16{});
  } else {
    body(float{});
  }
}

// A tensor with its global name, as checkpoints and reports see it.
struct NamedTensor {
  std::string name;
  TensorView view;
};

}  // namespace fp4t
