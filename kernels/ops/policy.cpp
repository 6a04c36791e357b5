#include "kernels/ops/policy.h"

#include "kernels/ops/expect.h"

namespace fp4t {

void PolicyObjective::check() const {
  expect_rank(kName, "log_prob", log_prob, 1);
  const Shape rows = log_prob.shape;
  for (const auto& [field, view] :
       {std::pair{"log_prob", &log_prob}, std::pair{"old_log_prob", &old_log_prob},
        std::pair{"advantage", &advantage}, std::pair{"loss", &loss}, std::pair{"d_log_prob", &d_log_prob}}) {
    expect_tensor(kName, field, *view, DType::kF32, rows);
  }
  expect_tensor(kName, "weight", weight, DType::kF64, rows);
  expect_tensor(kName, "clipped", clipped, DType::kI32, rows);
  FP4T_CHECK(clip.low >= 0 && clip.high >= 0 && clip.kl >= 0, kName, ".clip ", clip.low, ", ", clip.high,
             ", kl ", clip.kl);
  if (clip.kl > 0) expect_tensor(kName, "reference", reference, DType::kF32, rows);
}

}  // namespace fp4t
