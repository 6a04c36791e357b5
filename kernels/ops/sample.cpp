#include "kernels/ops/sample.h"

#include <cmath>

#include "kernels/ops/expect.h"

namespace fp4t {

void SampleTokens::check() const {
  expect_rank(kName, "logits", logits, 2);
  const Shape rows{logits.dim(0)};
  FP4T_CHECK(logits.dim(1) >= 1 && logits.dim(1) <= int64_t{1} << 30, kName, ".logits ", logits.shape);
  expect_tensor(kName, "logits", logits, DType::kF32, logits.shape);
  FP4T_CHECK(temperature >= 0.0f && std::isfinite(temperature), kName, ".temperature ", temperature);
  FP4T_CHECK(top_p > 0.0f && top_p <= 1.0f, kName, ".top_p ", top_p);
  expect_tensor(kName, "sample_ids", sample_ids, DType::kI64, rows);
  expect_tensor(kName, "positions", positions, DType::kI32, rows);
  expect_tensor(kName, "tokens", tokens, DType::kI32, rows);
  expect_tensor(kName, "log_prob", log_prob, DType::kF32, rows);
  for (const TensorView& output : {tokens, log_prob}) {
    expect_disjoint(kName, "an output", output, "logits", logits);
    expect_disjoint(kName, "an output", output, "sample_ids", sample_ids);
    expect_disjoint(kName, "an output", output, "positions", positions);
  }
}

}  // namespace fp4t
