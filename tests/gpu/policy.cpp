// The policy objective on the GPU against the CPU's.
#include "kernels/ops/policy.h"

#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

TEST(GpuPolicyObjective, is_the_cpus) {
  for (const int64_t rows : {0, 1, 127, 40001}) {
    for (const double kl : {0.0, 0.1}) {
      Mirror m;
      const TensorView weight = m.zeros(DType::kF64, {rows});
      for (int64_t t = 0; t < rows; ++t) weight.as<double>()[t] = t % 3 == 0 ? 0.0 : 1.0 / 700;
      m.check(PolicyObjective{.log_prob = m.normal(DType::kF32, {rows}, 0.3f),
                              .old_log_prob = m.normal(DType::kF32, {rows}, 0.3f),
                              .reference = kl > 0 ? m.normal(DType::kF32, {rows}, 0.3f) : TensorView{},
                              .advantage = m.normal(DType::kF32, {rows}),
                              .weight = weight,
                              .clip = {.low = 0.2, .high = 0.3, .kl = kl},
                              .loss = m.fresh(DType::kF32, {rows}),
                              .clipped = m.fresh(DType::kI32, {rows}),
                              .d_log_prob = m.fresh(DType::kF32, {rows})});
    }
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
