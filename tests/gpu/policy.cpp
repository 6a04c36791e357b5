// The policy objective on the GPU against the CPU's.
#include "kernels/ops/policy.h"

#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

const PolicyTerms kTerms[] = {
    {.low = 0.2, .high = 0.3},
    {.low = 0.2, .high = 0.3, .dual = 3, .kl = 0.1, .entropy = 0.01},
    {.form = PolicyClipForm::kCispo, .low = 1, .high = 5, .kl = 0.1, .estimator = KlEstimator::kK1},
    {.form = PolicyClipForm::kNone, .kl = 0.1, .estimator = KlEstimator::kK2},
};

TEST(GpuPolicyObjective, is_the_cpus) {
  for (const int64_t rows : {0, 1, 127, 40001}) {
    for (const PolicyTerms& terms : kTerms) {
      for (const bool by_sequence : {false, true}) {
        Mirror m;
        const TensorView weight = m.zeros(DType::kF64, {rows}), log_ratio = m.zeros(DType::kF64, {rows});
        const TensorView importance = m.fresh(DType::kF32, {rows});
        for (int64_t t = 0; t < rows; ++t) {
          weight.as<double>()[t] = t % 3 == 0 ? 0.0 : 1.0 / 700;
          log_ratio.as<double>()[t] = 0.01 * static_cast<double>(t % 90 - 45);
          importance.as<float>()[t] = static_cast<float>(t % 5) * 0.5f;
        }
        const bool bonus = terms.entropy > 0;
        const auto row_of_normals = [&] { return m.normal(DType::kF32, {rows}, 0.3f); };
        m.check(PolicyObjective{.log_prob = row_of_normals(),
                                .old_log_prob = row_of_normals(),
                                .reference = terms.kl > 0 ? row_of_normals() : TensorView{},
                                .advantage = row_of_normals(),
                                .weight = weight,
                                .importance = importance,
                                .log_ratio = by_sequence ? log_ratio : TensorView{},
                                .entropy = bonus ? row_of_normals() : TensorView{},
                                .terms = terms,
                                .loss = m.fresh(DType::kF32, {rows}),
                                .clipped = m.fresh(DType::kI32, {rows}),
                                .d_log_prob = m.fresh(DType::kF32, {rows}),
                                .d_entropy = bonus ? m.fresh(DType::kF32, {rows}) : TensorView{}});
      }
    }
  }
}

// Ranges of 1 to 700 rows with rows of no range between them.
TEST(GpuSequenceLogRatio, is_bitwise) {
  for (const int64_t rows : {0, 1, 5000}) {
    Mirror m;
    const TensorView begin = m.zeros(DType::kI32, {rows}), end = m.zeros(DType::kI32, {rows});
    for (int64_t at = rows > 1 ? 3 : 0, n = 1; at + n <= rows; at += n + 2, n = n * 2 % 701) {
      for (int64_t t = at; t < at + n; ++t) {
        begin.as<int32_t>()[t] = static_cast<int32_t>(at);
        end.as<int32_t>()[t] = static_cast<int32_t>(at + n);
      }
    }
    m.check(SequenceLogRatio{.log_prob = m.normal(DType::kF32, {rows}),
                             .old_log_prob = m.normal(DType::kF32, {rows}),
                             .begin = begin,
                             .end = end,
                             .mean = m.fresh(DType::kF64, {rows})});
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
