// Sampler and trainer: where the plan promises equal log-probabilities, every one of them is equal in every
// step, while the weights move; where it names a cell that breaks the promise, they differ.
#include <algorithm>
#include <numeric>

#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

constexpr int64_t kSteps = 5;

std::string recipe(const std::string& precision, const std::string& sampling) {
  return std::string(kTinyModel) + "precision:\n" + precision + R"(stages:
  - pretrain:
      steps: 10
      batch: {tokens: 256, micro_sequences: 8, length: 32}
      data: [{kind: sums, low: 0, high: 4, end_of_document: false}]
      optimizer: {learning_rate: 2e-2}
      eval: {tokens: 32}
  - rl:
      steps: 5
      task: {kind: sums, low: 0, high: 4}
      sampling: {prompts: 8, samples: 4, max_tokens: 5, max_batch: 12, )" +
         sampling + R"(}
      objective: {kl: 0.1, mini_batches: 2, micro_tokens: 40, drop_zero_advantage: false}
      optimizer: {learning_rate: 2e-3}
      eval: {tokens: 32}
)";
}

// The same rows for the sampler and the trainer's forward.
std::string policy(const std::string& rules, const std::string& sampler_only = "") {
  return "  rl.sampler:\n" + sampler_only + rules + "  rl.trainer.forward:\n" + rules;
}

const std::string kBf16 = "    - {module: \"*\", format: bf16}\n";
const std::string kMxfp8 = "    - {module: \"*\", format: mxfp8}\n";
const std::string kNvfp4 =
    "    - {module: head, format: bf16}\n"
    "    - {module: \"experts.*\", operand: act, format: nvfp4, scale_rule: four_over_six, scale_scope: "
    "row}\n"
    "    - {module: \"*\", format: nvfp4, scale_rule: four_over_six}\n";
const std::string kCacheMxfp8 = "    - {module: kv_cache, format: mxfp8}\n";

class RlEquality : public ::testing::Test {
 protected:
  std::string plan(const std::string& text) {
    write_inputs(folder_.path(), text);
    const Exit exit = run_binary(folder_.path(), {"plan", "--config", "recipe.yaml"});
    EXPECT_EQ(exit.code, 0) << exit.errors;
    return exit.output;
  }
  std::vector<double> figures(const std::string& name) { return step_figures(run_, "rl", name); }

  void expect_weights_moved() {
    const auto applied = figures("applied");
    ASSERT_EQ(applied.size(), static_cast<size_t>(kSteps));
    for (const double updates : applied) EXPECT_EQ(updates, 2);
    for (const double norm : figures("grad_norm")) EXPECT_GT(norm, 0);
  }

  void expect_equal(const std::string& precision, const std::string& sampling = "temperature: 1") {
    const std::string text = recipe(precision, sampling);
    EXPECT_NE(plan(text).find("rl: sampler and trainer agree bit for bit"), std::string::npos);
    train(folder_.path());
    expect_weights_moved();
    EXPECT_EQ(figures("logprob_equal_fraction"), std::vector<double>(kSteps, 1.0));
    EXPECT_EQ(figures("logprob_difference_max"), std::vector<double>(kSteps, 0.0));
    EXPECT_EQ(figures("generation_kl"), std::vector<double>(kSteps, 0.0));
    EXPECT_EQ(figures("rho_mean"), std::vector<double>(kSteps, 1.0));
    EXPECT_EQ(figures("effective_share"), std::vector<double>(kSteps, 1.0));
    EXPECT_EQ(summary_of(run_).at("logprob_equal_fraction_min"), 1.0);
  }

  void expect_different(const std::string& precision, const std::string& cell) {
    const std::string text = plan(recipe(precision, "temperature: 1"));
    const size_t at = text.find("rl: sampler and trainer will not agree bit for bit: ");
    ASSERT_NE(at, std::string::npos) << text;
    EXPECT_NE(text.substr(at, text.find('\n', at) - at).find(cell), std::string::npos)
        << text.substr(at, 200);
    train(folder_.path());
    expect_weights_moved();
    for (const double fraction : figures("logprob_equal_fraction")) EXPECT_LT(fraction, 1);
    EXPECT_LT(summary_of(run_).at("logprob_equal_fraction_min"), 1.0);
  }

  ScratchFolder folder_;
  std::string run_ = folder_ / "run";
};

TEST_F(RlEquality, bf16_is_exact) { expect_equal(policy(kBf16)); }

TEST_F(RlEquality, mxfp8_is_exact) { expect_equal(policy(kMxfp8)); }

TEST_F(RlEquality, nvfp4_with_row_scales_is_exact) { expect_equal(policy(kNvfp4)); }

TEST_F(RlEquality, an_mxfp8_cache_is_exact) { expect_equal(policy(kNvfp4, kCacheMxfp8)); }

TEST_F(RlEquality, temperature_and_top_p_are_replayed_exactly) {
  expect_equal(policy(kMxfp8), "temperature: 0.7, top_p: 0.9");
}

TEST_F(RlEquality, another_format_in_the_trainer_is_named_and_shows) {
  expect_different("  rl.sampler:\n" + kMxfp8 + "  rl.trainer.forward:\n" + kBf16, "layers.0 attn.qkv act");
}

TEST_F(RlEquality, a_scale_over_the_whole_batch_is_named_and_shows) {
  const std::string tensor_scope =
      "    - {module: experts.down, operand: act, format: nvfp4, scale_scope: tensor}\n"
      "    - {module: experts.down, format: nvfp4}\n" +
      kBf16;
  expect_different(policy(tensor_scope), "layers.0 experts.down is not row-invariant: act has one scale");
}

// With a learning rate of 0 nothing moves: the difference of a mismatched plan must not grow, neither by
// stale copies nor by a stale cache.
TEST_F(RlEquality, without_learning_the_difference_stays_what_it_was) {
  const std::string text =
      recipe("  rl.sampler:\n" + kNvfp4 + "  rl.trainer.forward:\n" + kBf16, "temperature: 1");
  write_inputs(folder_.path(), text);
  train(folder_.path(),
        {"--set", "stages.1.rl.optimizer.learning_rate=0", "--set", "stages.1.rl.steps=24", "--set",
         "stages.1.rl.sampling.samples=16", "--set", "model.moe.balance.bias_rate=0"});
  const auto difference = figures("logprob_difference_mean");
  ASSERT_EQ(difference.size(), 24u);
  const double early = std::accumulate(difference.begin(), difference.begin() + 12, 0.0) / 12;
  const double late = std::accumulate(difference.begin() + 12, difference.end(), 0.0) / 12;
  std::printf("mean difference %g in the first steps, %g in the last\n", early, late);
  EXPECT_GT(early, 0);
  EXPECT_NEAR(late / early, 1, 0.1);
  const auto [least, most] = std::minmax_element(difference.begin(), difference.end());
  EXPECT_LT(*most, 2 * *least);
}

TEST_F(RlEquality, without_learning_equal_stays_equal_and_the_weights_stay) {
  write_inputs(folder_.path(), recipe(policy(kNvfp4), "temperature: 1"));
  train(folder_.path(), {"--set", "stages.1.rl.optimizer.learning_rate=0", "--set",
                         "model.moe.balance.bias_rate=0", "--set", "stages.1.rl.checkpoint.every=1"});
  EXPECT_EQ(figures("logprob_equal_fraction"), std::vector<double>(kSteps, 1.0));
  const auto before = tensor_hashes_of(run_ + "/checkpoints/step_1_4_0", "model.");
  EXPECT_GT(before.size(), 10u);
  EXPECT_EQ(tensor_hashes_of(run_ + "/checkpoints/step_1_5_0", "model."), before);
}

}  // namespace
}  // namespace fp4t::test
