#include "kernels/ops/norm.h"

#include "kernels/ops/expect.h"

namespace fp4t {

void NormForward::check() const {
  expect_rank(kName, "x", x, 2);
  const Shape rows = {x.dim(0), x.dim(1)};
  expect_float(kName, "x", x, rows);
  expect_tensor(kName, "weight", weight, DType::kF32, {x.dim(1)});
  expect_tensor(kName, "out", out, x.dtype, rows);
  expect_tensor(kName, "rstd", rstd, DType::kF32, {x.dim(0)});
  expect_disjoint(kName, "out", out, "x", x);
  FP4T_CHECK(eps > 0.0f, kName, ".eps ", eps);
  FP4T_CHECK(residual.empty() == sum.empty(), kName, ": residual and sum come together");
  if (!residual.empty()) {
    expect_tensor(kName, "residual", residual, x.dtype, rows);
    expect_tensor(kName, "sum", sum, x.dtype, rows);
    expect_disjoint(kName, "out", out, "sum", sum);
    expect_disjoint(kName, "out", out, "residual", residual);
  }
  if (!rounded.empty()) rounded.check(kName, out);
}

void NormBackward::check() const {
  expect_rank(kName, "x", x, 2);
  const Shape rows = {x.dim(0), x.dim(1)};
  expect_float(kName, "x", x, rows);
  expect_tensor(kName, "weight", weight, DType::kF32, {x.dim(1)});
  expect_tensor(kName, "rstd", rstd, DType::kF32, {x.dim(0)});
  expect_tensor(kName, "dout", dout, x.dtype, rows);
  if (!dresidual.empty()) expect_tensor(kName, "dresidual", dresidual, x.dtype, rows);
  expect_tensor(kName, "dx", dx, x.dtype, rows);
  expect_tensor(kName, "dweight", dweight, DType::kF32, {x.dim(1)});
  expect_disjoint(kName, "dx", dx, "x", x);
  expect_disjoint(kName, "dx", dx, "dout", dout);
  expect_disjoint(kName, "dweight", dweight, "weight", weight);
}

namespace {

// The fields that both directions of QkNormRope share.
template <class Op>
void check_heads(const Op& op) {
  expect_rank(Op::kName, "qkv", op.qkv, 2);
  FP4T_CHECK(op.heads > 0 && op.kv_heads > 0 && op.head_dim > 0 && op.head_dim % 2 == 0, Op::kName,
             ": heads ", op.heads, ", kv_heads ", op.kv_heads, ", head_dim ", op.head_dim, " (must be even)");
  const int64_t tokens = op.qkv.dim(0);
  expect_float(Op::kName, "qkv", op.qkv, {tokens, (op.heads + 2 * op.kv_heads) * op.head_dim});
  expect_tensor(Op::kName, "positions", op.positions, DType::kI32, {tokens});
  expect_rank(Op::kName, "cos", op.cos, 2);
  const Shape table = {op.cos.dim(0), op.head_dim / 2};
  expect_tensor(Op::kName, "cos", op.cos, DType::kF32, table);
  expect_tensor(Op::kName, "sin", op.sin, DType::kF32, table);
  FP4T_CHECK(op.q_weight.empty() == op.k_weight.empty(), Op::kName, ": q_weight and k_weight come together");
  if (!op.q_weight.empty()) {
    expect_tensor(Op::kName, "q_weight", op.q_weight, DType::kF32, {op.head_dim});
    expect_tensor(Op::kName, "k_weight", op.k_weight, DType::kF32, {op.head_dim});
    expect_tensor(Op::kName, "rstd", op.rstd, DType::kF32, {tokens, op.heads + op.kv_heads});
  }
}

}  // namespace

void QkNormRopeForward::check() const {
  check_heads(*this);
  expect_tensor(kName, "out", out, qkv.dtype, qkv.shape);
  expect_disjoint(kName, "out", out, "qkv", qkv);
  FP4T_CHECK(q_weight.empty() || eps > 0.0f, kName, ".eps ", eps);
}

void QkNormRopeBackward::check() const {
  check_heads(*this);
  expect_tensor(kName, "dout", dout, qkv.dtype, qkv.shape);
  expect_tensor(kName, "dqkv", dqkv, qkv.dtype, qkv.shape);
  if (!q_weight.empty()) {
    expect_disjoint(kName, "dqkv", dqkv, "qkv", qkv);
    expect_tensor(kName, "dq_weight", dq_weight, DType::kF32, {head_dim});
    expect_tensor(kName, "dk_weight", dk_weight, DType::kF32, {head_dim});
    expect_disjoint(kName, "dq_weight", dq_weight, "dk_weight", dk_weight);
  }
}

}  // namespace fp4t
