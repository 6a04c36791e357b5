#include "kernels/ops/policy.h"

#include "kernels/ops/expect.h"

namespace fp4t {

void SequenceLogRatio::check() const {
  expect_rank(kName, "log_prob", log_prob, 1);
  const Shape rows = log_prob.shape;
  expect_tensor(kName, "log_prob", log_prob, DType::kF32, rows);
  expect_tensor(kName, "old_log_prob", old_log_prob, DType::kF32, rows);
  expect_tensor(kName, "begin", begin, DType::kI32, rows);
  expect_tensor(kName, "end", end, DType::kI32, rows);
  expect_tensor(kName, "mean", mean, DType::kF64, rows);
}

void PolicyObjective::check() const {
  expect_rank(kName, "log_prob", log_prob, 1);
  const Shape rows = log_prob.shape;
  for (const auto& [field, view] :
       {std::pair{"log_prob", &log_prob}, std::pair{"old_log_prob", &old_log_prob},
        std::pair{"advantage", &advantage}, std::pair{"importance", &importance}, std::pair{"loss", &loss},
        std::pair{"d_log_prob", &d_log_prob}}) {
    expect_tensor(kName, field, *view, DType::kF32, rows);
  }
  expect_tensor(kName, "weight", weight, DType::kF64, rows);
  expect_tensor(kName, "clipped", clipped, DType::kI32, rows);
  if (!log_ratio.empty()) expect_tensor(kName, "log_ratio", log_ratio, DType::kF64, rows);
  FP4T_CHECK(terms.low >= 0 && terms.high >= 0 && terms.kl >= 0 && terms.entropy >= 0, kName, ".terms ",
             terms.low, ", ", terms.high, ", kl ", terms.kl, ", entropy ", terms.entropy);
  FP4T_CHECK(terms.dual == 0 || terms.dual > 1, kName, ".terms.dual ", terms.dual);
  if (terms.kl > 0) expect_tensor(kName, "reference", reference, DType::kF32, rows);
  if (terms.entropy > 0) {
    expect_tensor(kName, "entropy", entropy, DType::kF32, rows);
    expect_tensor(kName, "d_entropy", d_entropy, DType::kF32, rows);
  }
}

}  // namespace fp4t
