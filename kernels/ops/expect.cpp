#include "kernels/ops/expect.h"

#include <cstdint>

namespace fp4t {

namespace {

void expect_memory(const char* op, const char* field, const TensorView& view) {
  FP4T_CHECK(view.data != nullptr || view.elements() == 0, op, ".", field, " ", view.shape, " has no memory");
}

}  // namespace

void expect_tensor(const char* op, const char* field, const TensorView& view, DType dtype,
                   const Shape& shape) {
  FP4T_CHECK(view.dtype == dtype && view.shape == shape, op, ".", field, " is ", dtype_name(view.dtype), " ",
             view.shape, ", must be ", dtype_name(dtype), " ", shape);
  expect_memory(op, field, view);
}

void expect_float(const char* op, const char* field, const TensorView& view, const Shape& shape) {
  FP4T_CHECK((view.dtype == DType::kBf16 || view.dtype == DType::kF32) && view.shape == shape, op, ".", field,
             " is ", dtype_name(view.dtype), " ", view.shape, ", must be bf16 or fp32 ", shape);
  expect_memory(op, field, view);
}

void expect_rank(const char* op, const char* field, const TensorView& view, int rank) {
  FP4T_CHECK(view.shape.rank() == rank, op, ".", field, " is ", view.shape, ", must have rank ", rank);
}

void expect_disjoint(const char* op, const char* field_a, const TensorView& a, const char* field_b,
                     const TensorView& b) {
  const auto begin_a = reinterpret_cast<uintptr_t>(a.data), begin_b = reinterpret_cast<uintptr_t>(b.data);
  const bool apart = a.bytes() == 0 || b.bytes() == 0 ||
                     begin_a + static_cast<uintptr_t>(a.bytes()) <= begin_b ||
                     begin_b + static_cast<uintptr_t>(b.bytes()) <= begin_a;
  FP4T_CHECK(apart, op, ".", field_a, " overlaps ", field_b);
}

}  // namespace fp4t
