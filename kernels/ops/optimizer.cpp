#include "kernels/ops/optimizer.h"

#include "kernels/ops/expect.h"

namespace fp4t {

namespace {

void check_copy(const char* op, const TensorView& copy, const TensorView& master) {
  if (copy.empty()) return;
  expect_tensor(op, "copy", copy, DType::kBf16, master.shape);
  expect_disjoint(op, "copy", copy, "master", master);
}

void check_apply(const char* op, const TensorView& apply) {
  if (!apply.empty()) expect_tensor(op, "apply", apply, DType::kI32, {1});
}

}  // namespace

void AdamWStep::check() const {
  expect_rank(kName, "master", master, 1);
  const Shape n = {master.dim(0)};
  expect_float(kName, "grad", grad, n);
  expect_tensor(kName, "grad_scale", grad_scale, DType::kF32, {1});
  expect_float(kName, "master", master, n);
  expect_float(kName, "m", m, n);
  expect_float(kName, "v", v, n);
  check_copy(kName, copy, master);
  expect_disjoint(kName, "m", m, "v", v);
  expect_disjoint(kName, "m", m, "master", master);
  expect_disjoint(kName, "v", v, "master", master);
  expect_disjoint(kName, "grad", grad, "master", master);
  FP4T_CHECK(beta1 >= 0.0f && beta1 < 1.0f && beta2 >= 0.0f && beta2 < 1.0f && eps >= 0.0f, kName, ": beta1 ",
             beta1, ", beta2 ", beta2, ", eps ", eps);
  check_apply(kName, apply);
}

void SumSquares::check() const {
  expect_rank(kName, "x", x, 1);
  expect_float(kName, "x", x, {x.dim(0)});
  expect_tensor(kName, "sum", sum, DType::kF64, {1});
  expect_tensor(kName, "nonfinite", nonfinite, DType::kF64, {1});
}

void SumSquaresChunks::check() const {
  expect_rank(kName, "x", x, 1);
  expect_float(kName, "x", x, {x.dim(0)});
  FP4T_CHECK(matrix >= 1 && first >= 0, kName, ": element ", first, ", matrices of ", matrix);
  FP4T_CHECK(first % matrix % kChunk == 0, kName, ": element ", first, " begins no chunk");
  expect_tensor(kName, "sums", sums, DType::kF64, {chunks(), 2});
}

void ClipFactor::check() const {
  expect_tensor(kName, "sum", sum, DType::kF64, {1});
  expect_tensor(kName, "nonfinite", nonfinite, DType::kF64, {1});
  expect_tensor(kName, "factor", factor, DType::kF32, {1});
  expect_tensor(kName, "apply", apply, DType::kI32, {1});
}

void MuonMomentum::check() const {
  expect_rank(kName, "momentum", momentum, 1);
  const Shape n = {momentum.dim(0)};
  expect_float(kName, "grad", grad, n);
  expect_tensor(kName, "grad_scale", grad_scale, DType::kF32, {1});
  expect_float(kName, "momentum", momentum, n);
  expect_tensor(kName, "update", update, DType::kF32, n);
  expect_disjoint(kName, "update", update, "momentum", momentum);
  expect_disjoint(kName, "update", update, "grad", grad);
  expect_disjoint(kName, "momentum", momentum, "grad", grad);
  check_apply(kName, apply);
}

void ApplyUpdate::check() const {
  expect_rank(kName, "master", master, 1);
  const Shape n = {master.dim(0)};
  expect_tensor(kName, "update", update, DType::kF32, n);
  expect_float(kName, "master", master, n);
  check_copy(kName, copy, master);
  expect_disjoint(kName, "update", update, "master", master);
  check_apply(kName, apply);
}

}  // namespace fp4t
