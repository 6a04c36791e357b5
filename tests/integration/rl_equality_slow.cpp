// Two hundred steps at a learning rate of 0: what sampler and trainer differ by stays what it was.
#include <algorithm>
#include <numeric>

#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

const char* const kStage = R"(stages:
  - rl:
      steps: 200
      task: {kind: sums, low: 0, high: 4}
      sampling: {prompts: 8, samples: 8, max_tokens: 5, max_batch: 16}
      objective: {mini_batches: 2, micro_tokens: 64, drop_zero_advantage: false}
      optimizer: {learning_rate: 0}
      eval: {tokens: 32}
)";
const char* const kTables = R"(precision:
  rl.sampler:
    - {module: head, format: bf16}
    - {module: "experts.*", operand: act, format: nvfp4, scale_rule: four_over_six, scale_scope: row}
    - {module: "*", format: nvfp4, scale_rule: four_over_six}
  rl.trainer.forward:
    - {module: "*", format: bf16}
)";

TEST(RlEquality, a_difference_neither_grows_nor_shrinks_without_learning) {
  const ScratchFolder folder;
  write_inputs(folder.path(), std::string(kTinyModel) + kTables + kStage);
  train(folder.path(), {"--set", "model.moe.balance.bias_rate=0"});
  const auto difference = step_figures(folder / "run", "rl", "logprob_difference_mean");
  const auto kl = step_figures(folder / "run", "rl", "generation_kl");
  ASSERT_EQ(difference.size(), 200u);
  const auto mean = [&](size_t begin, size_t end) {
    return std::accumulate(difference.begin() + static_cast<int64_t>(begin),
                           difference.begin() + static_cast<int64_t>(end), 0.0) /
           static_cast<double>(end - begin);
  };
  std::printf("mean difference %g in the first half, %g in the second\n", mean(0, 100), mean(100, 200));
  EXPECT_GT(*std::min_element(difference.begin(), difference.end()), 0);
  EXPECT_GT(*std::min_element(kl.begin(), kl.end()), 0);
  EXPECT_NEAR(mean(100, 200) / mean(0, 100), 1, 0.05);
  const auto [least, most] = std::minmax_element(difference.begin(), difference.end());
  EXPECT_LT(*most, 2 * *least);
}

}  // namespace
}  // namespace fp4t::test
