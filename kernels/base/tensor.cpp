#include "kernels/base/tensor.h"

#include <ostream>

namespace fp4t {

std::string Shape::text() const {
  std::string out = "[";
  for (int i = 0; i < rank_; ++i) out += (i ? ", " : "") + std::to_string((*this)[i]);
  return out + "]";
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << shape.text(); }

TensorView TensorView::rows(int64_t begin, int64_t count) const {
  FP4T_CHECK(shape.rank() >= 1, "a scalar has no rows");
  FP4T_CHECK(begin >= 0 && count >= 0 && begin + count <= shape[0], "rows [", begin, ", ", begin + count,
             ") of ", shape);
  const int64_t row = shape[0] ? shape.elements() / shape[0] : 0;
  TensorView out = *this;
  out.data = static_cast<char*>(data) + begin * row * dtype_bytes(dtype);
  switch (shape.rank()) {
    case 1:
      out.shape = {count};
      break;
    case 2:
      out.shape = {count, shape[1]};
      break;
    case 3:
      out.shape = {count, shape[1], shape[2]};
      break;
    default:
      out.shape = {count, shape[1], shape[2], shape[3]};
  }
  return out;
}

TensorView TensorView::reshape(const Shape& new_shape) const {
  FP4T_CHECK_EQ(new_shape.elements(), shape.elements(), "reshape of ", shape, " to ", new_shape);
  TensorView out = *this;
  out.shape = new_shape;
  return out;
}

}  // namespace fp4t
