// Checks of op arguments, for the check() bodies: each throws InternalError with the op, the field and
// both sides. Values inside tensors (indices, lengths) are the bodies' to check, where they are read.
#pragma once

#include "kernels/base/tensor.h"

namespace fp4t {

// Exactly this dtype and shape, and memory behind it unless it has no elements.
void expect_tensor(const char* op, const char* field, const TensorView& view, DType dtype,
                   const Shape& shape);

// BF16 or F32: what tensors between ops, and stored masters and moments, may be.
void expect_float(const char* op, const char* field, const TensorView& view, const Shape& shape);

void expect_rank(const char* op, const char* field, const TensorView& view, int rank);

// No byte in common; ops name the aliases that they allow.
void expect_disjoint(const char* op, const char* field_a, const TensorView& a, const char* field_b,
                     const TensorView& b);

}  // namespace fp4t
