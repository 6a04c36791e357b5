#include "kernels/ops/loss.h"

#include <cmath>

#include "kernels/ops/expect.h"

namespace fp4t {

namespace {

void expect_distribution(const char* op, float temperature, float top_p) {
  FP4T_CHECK(temperature > 0.0f && std::isfinite(temperature), op, ".temperature ", temperature);
  FP4T_CHECK(top_p > 0.0f && top_p <= 1.0f, op, ".top_p ", top_p);
}

void expect_rows_of(const char* op, const TensorView& logits, const TensorView& targets) {
  expect_rank(op, "logits", logits, 2);
  FP4T_CHECK(logits.dim(1) >= 1, op, ".logits ", logits.shape, " has no vocabulary");
  expect_tensor(op, "logits", logits, DType::kF32, logits.shape);
  expect_tensor(op, "targets", targets, DType::kI32, {logits.dim(0)});
}

}  // namespace

void LogProbForward::check() const {
  expect_rows_of(kName, logits, targets);
  expect_distribution(kName, temperature, top_p);
  const Shape rows{logits.dim(0)};
  expect_tensor(kName, "log_prob", log_prob, DType::kF32, rows);
  expect_tensor(kName, "lse", lse, DType::kF32, rows);
  if (!entropy.empty()) expect_tensor(kName, "entropy", entropy, DType::kF32, rows);
  for (const TensorView& output : {log_prob, lse, entropy}) {
    expect_disjoint(kName, "an output", output, "logits", logits);
    expect_disjoint(kName, "an output", output, "targets", targets);
  }
}

void LogProbBackward::check() const {
  expect_rows_of(kName, logits, targets);
  expect_distribution(kName, temperature, top_p);
  const Shape rows{logits.dim(0)};
  expect_tensor(kName, "lse", lse, DType::kF32, rows);
  expect_tensor(kName, "d_log_prob", d_log_prob, DType::kF32, rows);
  if (!d_lse.empty()) expect_tensor(kName, "d_lse", d_lse, DType::kF32, rows);
  if (!d_entropy.empty()) {
    expect_tensor(kName, "d_entropy", d_entropy, DType::kF32, rows);
    expect_tensor(kName, "entropy", entropy, DType::kF32, rows);
  }
  expect_float(kName, "dlogits", dlogits, logits.shape);
  for (const TensorView& input : {targets, lse, entropy, d_log_prob, d_lse, d_entropy}) {
    expect_disjoint(kName, "dlogits", dlogits, "an input", input);
  }
  // A row is read before it is written, so FP32 gradients may take the place of the logits.
  if (dlogits.data != logits.data || dlogits.dtype != logits.dtype) {
    expect_disjoint(kName, "dlogits", dlogits, "logits", logits);
  }
}

}  // namespace fp4t
