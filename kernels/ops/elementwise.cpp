#include "kernels/ops/elementwise.h"

#include "kernels/ops/expect.h"

namespace fp4t {

namespace {

// Elementwise in place is fine; a shifted overlap is not.
void expect_same_or_disjoint(const char* op, const char* field_a, const TensorView& a, const char* field_b,
                             const TensorView& b) {
  const bool same = a.data == b.data && a.bytes() == b.bytes();
  if (!same) expect_disjoint(op, field_a, a, field_b, b);
}

void check_clamp(const char* op, float clamp) { FP4T_CHECK(clamp >= 0.0f, op, ".clamp ", clamp); }

}  // namespace

void SwigluForward::check() const {
  expect_rank(kName, "out", out, 2);
  const int64_t tokens = out.dim(0), width = out.dim(1);
  expect_float(kName, "gate_up", gate_up, {tokens, 2 * width});
  expect_tensor(kName, "out", out, gate_up.dtype, {tokens, width});
  expect_disjoint(kName, "out", out, "gate_up", gate_up);
  check_clamp(kName, clamp);
  if (!rounded.empty()) rounded.check(kName, out);
}

void SwigluBackward::check() const {
  expect_rank(kName, "dout", dout, 2);
  const int64_t tokens = dout.dim(0), width = dout.dim(1);
  expect_float(kName, "gate_up", gate_up, {tokens, 2 * width});
  expect_tensor(kName, "dout", dout, gate_up.dtype, {tokens, width});
  expect_tensor(kName, "dgate_up", dgate_up, gate_up.dtype, gate_up.shape);
  expect_same_or_disjoint(kName, "dgate_up", dgate_up, "gate_up", gate_up);
  expect_disjoint(kName, "dgate_up", dgate_up, "dout", dout);
  check_clamp(kName, clamp);
}

void Add::check() const {
  expect_float(kName, "a", a, out.shape);
  expect_float(kName, "b", b, out.shape);
  expect_float(kName, "out", out, out.shape);
  expect_same_or_disjoint(kName, "out", out, "a", a);
  expect_same_or_disjoint(kName, "out", out, "b", b);
}

void Cast::check() const {
  expect_float(kName, "x", x, out.shape);
  expect_float(kName, "out", out, out.shape);
  expect_same_or_disjoint(kName, "out", out, "x", x);
}

void LinearCombination::check() const {
  expect_tensor(kName, "x", x, DType::kF32, out.shape);
  expect_tensor(kName, "out", out, DType::kF32, out.shape);
  expect_same_or_disjoint(kName, "out", out, "x", x);
  if (!y.empty()) {
    expect_tensor(kName, "y", y, DType::kF32, out.shape);
    expect_same_or_disjoint(kName, "out", out, "y", y);
  }
}

}  // namespace fp4t
