#include "kernels/ops/moe.h"

#include <cmath>
#include <limits>

#include "kernels/ops/expect.h"

namespace fp4t {

namespace {

void expect_top_k(const char* op, int64_t top_k, int64_t num_experts) {
  FP4T_CHECK(top_k >= 1 && top_k <= num_experts, op, ".top_k ", top_k, " of ", num_experts, " experts");
}

// Rows and offsets are 32-bit indices.
void expect_rows(const char* op, int64_t rows) {
  FP4T_CHECK(rows <= std::numeric_limits<int32_t>::max(), op, ": ", rows, " rows do not fit 32-bit indices");
}

// Elementwise in place is fine.
void expect_in_place_or_disjoint(const char* op, const char* field_a, const TensorView& a,
                                 const char* field_b, const TensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype) expect_disjoint(op, field_a, a, field_b, b);
}

}  // namespace

void RouterLogits::check() const {
  expect_rank(kName, "x", x, 2);
  expect_rank(kName, "weight", weight, 2);
  const int64_t tokens = x.dim(0), width = x.dim(1), experts = weight.dim(0);
  expect_float(kName, "x", x, {tokens, width});
  expect_tensor(kName, "weight", weight, DType::kF32, {experts, width});
  expect_tensor(kName, "logits", logits, DType::kF32, {tokens, experts});
  expect_disjoint(kName, "logits", logits, "x", x);
  expect_disjoint(kName, "logits", logits, "weight", weight);
}

void RouterLogitsBackward::check() const {
  expect_rank(kName, "x", x, 2);
  expect_rank(kName, "weight", weight, 2);
  const int64_t tokens = x.dim(0), width = x.dim(1), experts = weight.dim(0);
  expect_float(kName, "x", x, {tokens, width});
  expect_tensor(kName, "weight", weight, DType::kF32, {experts, width});
  expect_tensor(kName, "dlogits", dlogits, DType::kF32, {tokens, experts});
  expect_tensor(kName, "dx", dx, DType::kF32, {tokens, width});
  expect_tensor(kName, "dweight", dweight, DType::kF32, {experts, width});
  for (const TensorView& input : {x, weight, dlogits}) {
    expect_disjoint(kName, "dx", dx, "an input", input);
    expect_disjoint(kName, "dweight", dweight, "an input", input);
  }
  expect_disjoint(kName, "dx", dx, "dweight", dweight);
}

void Route::check() const {
  expect_rank(kName, "logits", logits, 2);
  const int64_t tokens = logits.dim(0), num_experts = logits.dim(1);
  expect_top_k(kName, top_k, num_experts);
  expect_rows(kName, tokens * top_k);
  expect_tensor(kName, "logits", logits, DType::kF32, {tokens, num_experts});
  expect_tensor(kName, "bias", bias, DType::kF32, {num_experts});
  expect_tensor(kName, "scores", scores, DType::kF32, {tokens, num_experts});
  expect_tensor(kName, "experts", experts, DType::kI32, {tokens, top_k});
  expect_tensor(kName, "gates", gates, DType::kF32, {tokens, top_k});
  expect_tensor(kName, "offsets", offsets, DType::kI32, {num_experts + 1});
  expect_tensor(kName, "row_of", row_of, DType::kI32, {tokens, top_k});
  expect_tensor(kName, "token_of", token_of, DType::kI32, {tokens * top_k});
  FP4T_CHECK(std::isfinite(gate_scale), kName, ".gate_scale ", gate_scale);
  if (!replay.empty()) {
    expect_tensor(kName, "replay", replay, DType::kI32, {tokens, top_k});
    expect_tensor(kName, "differs", differs, DType::kI32, {tokens});
  }
  for (const TensorView& output : {scores, experts, gates, offsets, row_of, token_of}) {
    expect_disjoint(kName, "an output", output, "logits", logits);
    expect_disjoint(kName, "an output", output, "bias", bias);
  }
}

void RouterStats::check() const {
  expect_rank(kName, "logits", logits, 2);
  const int64_t tokens = logits.dim(0), num_experts = logits.dim(1);
  expect_top_k(kName, top_k, num_experts);
  expect_tensor(kName, "logits", logits, DType::kF32, {tokens, num_experts});
  expect_tensor(kName, "scores", scores, DType::kF32, {tokens, num_experts});
  expect_tensor(kName, "offsets", offsets, DType::kI32, {num_experts + 1});
  expect_tensor(kName, "sums", sums, DType::kF64, {2});
  expect_tensor(kName, "load", load, DType::kI64, {num_experts});
}

void RouteBackward::check() const {
  expect_rank(kName, "logits", logits, 2);
  expect_rank(kName, "experts", experts, 2);
  const int64_t tokens = logits.dim(0), num_experts = logits.dim(1), top_k = experts.dim(1);
  expect_top_k(kName, top_k, num_experts);
  expect_tensor(kName, "logits", logits, DType::kF32, {tokens, num_experts});
  expect_tensor(kName, "scores", scores, DType::kF32, {tokens, num_experts});
  expect_tensor(kName, "experts", experts, DType::kI32, {tokens, top_k});
  expect_tensor(kName, "offsets", offsets, DType::kI32, {num_experts + 1});
  expect_tensor(kName, "dgates", dgates, DType::kF32, {tokens, top_k});
  expect_tensor(kName, "dlogits", dlogits, DType::kF32, {tokens, num_experts});
  for (const TensorView& input : {logits, scores, experts, offsets, dgates}) {
    expect_disjoint(kName, "dlogits", dlogits, "an input", input);
  }
}

void PermuteRows::check() const {
  expect_rank(kName, "x", x, 2);
  expect_rank(kName, "token_of", token_of, 1);
  const int64_t rows = token_of.dim(0), width = x.dim(1);
  expect_tensor(kName, "x", x, x.dtype, x.shape);
  expect_tensor(kName, "token_of", token_of, DType::kI32, {rows});
  expect_tensor(kName, "out", out, x.dtype, {rows, width});
  expect_disjoint(kName, "out", out, "x", x);
  expect_disjoint(kName, "out", out, "token_of", token_of);
  if (row_of.empty()) return;
  expect_rank(kName, "row_of", row_of, 2);
  expect_tensor(kName, "row_of", row_of, DType::kI32, {x.dim(0), row_of.dim(1)});
  FP4T_CHECK_EQ(row_of.elements(), rows, kName);
  expect_disjoint(kName, "out", out, "row_of", row_of);
}

void CombineExperts::check() const {
  expect_rank(kName, "out", out, 2);
  expect_rank(kName, "row_of", row_of, 2);
  const int64_t tokens = out.dim(0), width = out.dim(1), top_k = row_of.dim(1);
  expect_top_k(kName, top_k, num_experts);
  expect_rows(kName, tokens * top_k);
  expect_rank(kName, "y", y, 2);
  expect_float(kName, "y", y, {partial ? y.dim(0) : tokens * top_k, width});
  expect_tensor(kName, "row_of", row_of, DType::kI32, {tokens, top_k});
  expect_tensor(kName, "experts", experts, DType::kI32, {tokens, top_k});
  if (!gates.empty()) expect_tensor(kName, "gates", gates, DType::kF32, {tokens, top_k});
  expect_float(kName, "out", out, {tokens, width});
  for (const TensorView& input : {y, row_of, experts, gates}) {
    expect_disjoint(kName, "out", out, "an input", input);
  }
  if (!shared.empty()) {
    expect_float(kName, "shared", shared, {tokens, width});
    expect_in_place_or_disjoint(kName, "out", out, "shared", shared);
  }
  if (!residual.empty()) {
    expect_float(kName, "residual", residual, {tokens, width});
    expect_in_place_or_disjoint(kName, "out", out, "residual", residual);
  }
}

void CombineExpertsBackward::check() const {
  expect_rank(kName, "dout", dout, 2);
  expect_rank(kName, "gates", gates, 2);
  const int64_t tokens = gates.dim(0), width = dout.dim(1), top_k = gates.dim(1);
  expect_rows(kName, tokens * top_k);
  expect_float(kName, "dout", dout, {dout_of.empty() ? tokens : dout.dim(0), width});
  if (!dout_of.empty()) expect_tensor(kName, "dout_of", dout_of, DType::kI32, {tokens});
  expect_rank(kName, "y", y, 2);
  const int64_t rows = tokens * top_k;
  expect_tensor(kName, "y", y, dout.dtype, {rows, width});
  if (row_of.empty()) {
    FP4T_CHECK(top_k == 1, kName, ": rows of ", top_k, " choices without row_of");
  } else {
    expect_tensor(kName, "row_of", row_of, DType::kI32, {tokens, top_k});
  }
  expect_tensor(kName, "gates", gates, DType::kF32, {tokens, top_k});
  expect_tensor(kName, "dy", dy, dout.dtype, {rows, width});
  expect_tensor(kName, "dgates", dgates, DType::kF32, {tokens, top_k});
  for (const TensorView& input : {dout, y, row_of, gates, dout_of}) {
    expect_disjoint(kName, "dgates", dgates, "an input", input);
  }
  for (const TensorView& input : {dout, row_of, gates, dout_of})
    expect_disjoint(kName, "dy", dy, "an input", input);
  if (dy.data != y.data) expect_disjoint(kName, "dy", dy, "y", y);
  expect_disjoint(kName, "dy", dy, "dgates", dgates);
}

void UpdateExpertBias::check() const {
  expect_rank(kName, "load", load, 1);
  expect_tensor(kName, "load", load, DType::kI64, load.shape);
  expect_tensor(kName, "bias", bias, DType::kF32, load.shape);
  FP4T_CHECK(std::isfinite(rate), kName, ".rate ", rate);
}

}  // namespace fp4t
