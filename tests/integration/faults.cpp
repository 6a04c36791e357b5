// What other trainers got wrong: steps without signal, values that are not finite, figures that depend on
// how a batch is cut.
#include <cmath>
#include <filesystem>
#include <numeric>

#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

std::string pretrain(const std::string& keys) {
  return R"(  - pretrain:
      steps: 8
      data: [{kind: sums, low: 0, high: 4, end_of_document: false}]
)" + keys;
}
const std::string kBatch = "      batch: {tokens: 256, micro_sequences: 2, length: 32}\n";

std::string rl(const std::string& task, const std::string& sampling, const std::string& keys = "") {
  return "  - rl:\n      steps: 21\n      task: {kind: sums, " + task +
         "}\n      sampling: {prompts: 2, samples: 4, " + sampling + "}\n" + keys;
}

class Faults : public ::testing::Test {
 protected:
  void use(const std::string& stages, const std::string& precision = "") {
    write_inputs(folder_.path(), std::string(kTinyModel) + precision + "stages:\n" + stages);
  }
  std::vector<double> figures(const std::string& stage, const std::string& name) {
    return step_figures(run_, stage, name);
  }
  std::map<std::string, std::string> model_at(const std::string& checkpoint) {
    const auto hashes = tensor_hashes_of(run_ + "/checkpoints/" + checkpoint, "model.");
    EXPECT_GT(hashes.size(), 10u);
    return hashes;
  }
  // Twenty-one RL steps that teach nothing: no update, weights as they were, one loud warning.
  void expect_no_signal(const Exit& exit) {
    EXPECT_EQ(figures("rl", "zero_variance_groups"), std::vector<double>(21, 1.0));
    EXPECT_EQ(figures("rl", "updates"), std::vector<double>(21, 0.0));
    EXPECT_EQ(figures("rl", "applied"), std::vector<double>(21, 0.0));
    for (const double loss : figures("rl", "loss")) EXPECT_EQ(loss, 0);
    const std::string warning = "20 steps in a row without any learning signal";
    const size_t at = exit.output.find(warning);
    ASSERT_NE(at, std::string::npos) << exit.output;
    EXPECT_EQ(exit.output.find(warning, at + 1), std::string::npos) << "said twice";
    EXPECT_EQ(model_at("step_0_21_0"), model_at("step_0_20_0"));
    const std::string text = run_binary(folder_.path(), {"inspect", "run"}).output;
    EXPECT_NE(text.find("updates attempted 42, applied 0"), std::string::npos) << text;
    EXPECT_NE(text.find("steps_without_signal = 21"), std::string::npos) << text;
  }

  ScratchFolder folder_;
  std::string run_ = folder_ / "run";
};

// Steps without signal -------------------------------------------------------------------------------

const std::string kTwoUpdates = "      objective: {mini_batches: 2}\n      checkpoint: {every: 1, keep: 9}\n";

TEST_F(Faults, completions_that_are_all_cut_give_no_update_and_a_warning) {
  use(rl("low: 0, high: 4", "max_tokens: 2, temperature: 0.001, end_tokens: [\"~\"]", kTwoUpdates));
  const Exit exit = train(folder_.path());
  EXPECT_EQ(figures("rl", "truncated"), std::vector<double>(21, 1.0));
  expect_no_signal(exit);
}

TEST_F(Faults, rewards_that_are_all_equal_give_no_update_and_a_warning) {
  // Three tokens cannot hold the answer and the end.
  use(rl("low: 600, high: 900", "max_tokens: 3", kTwoUpdates));
  const Exit exit = train(folder_.path());
  EXPECT_EQ(figures("rl", "reward"), std::vector<double>(21, 0.0));
  expect_no_signal(exit);
}

TEST_F(Faults, zero_advantages_that_are_kept_give_a_zero_gradient) {
  use(rl("low: 600, high: 900", "max_tokens: 3", "      objective: {drop_zero_advantage: false}\n"));
  train(folder_.path(), {"--set", "model.moe.balance={bias_rate: 0}"});
  EXPECT_EQ(figures("rl", "applied"), std::vector<double>(21, 1.0));
  EXPECT_EQ(figures("rl", "grad_norm"), std::vector<double>(21, 0.0));
}

TEST_F(Faults, completions_of_an_end_token_alone_are_one_token_long) {
  // With every letter and digit an end token, many completions end with their first token.
  std::string ends;
  for (const char c : std::string("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")) {
    ends += std::string(ends.empty() ? "" : ", ") + "\"" + c + "\"";
  }
  use(rl("low: 0, high: 4", "max_tokens: 4, end_tokens: [" + ends + "]",
         "      objective: {drop_zero_advantage: false, average: sequence, kl: 0.1}\n"));
  train(folder_.path());
  int64_t steps_with_one = 0;
  for (const auto& line : metrics_of(run_, "step", "rl")) {
    steps_with_one += line.at("length_finished_min").get<double>() == 1 ? 1 : 0;
    for (const char* name : {"loss", "grad_norm", "entropy", "generation_kl"}) {
      EXPECT_TRUE(line.at(name).is_number()) << name << " in " << line;
    }
    EXPECT_EQ(line.at("applied"), 1.0);
  }
  EXPECT_GT(steps_with_one, 0);
}

// Values that are not finite -------------------------------------------------------------------------

// The largest learning rate and weight decay that a recipe may have multiply the weights by -999999 an
// update: the third takes them so far that no product is finite any more.
const std::string kExplosion =
    "      optimizer: {learning_rate: 1000, weight_decay: 1000, clip_norm: 0}\n"
    "      schedule: {kind: constant}\n"
    "      checkpoint: {every: 1, keep: 9}\n";

TEST_F(Faults, skipped_updates_change_no_weight_and_too_many_stop_the_run) {
  use(pretrain(kBatch + kExplosion + "      max_skips: 2\n"));
  for (int again = 0; again < 2; ++again) {
    const Exit exit = run_binary(folder_.path(), train_args());
    EXPECT_EQ(exit.code, 71) << exit.errors << exit.output;
    EXPECT_NE(exit.errors.find("pretrain step 6: "), std::string::npos) << exit.errors;
    EXPECT_NE(exit.errors.find("more than 2 updates skipped in a row"), std::string::npos) << exit.errors;
    const bool said = exit.output.find("the update was skipped") != std::string::npos;
    EXPECT_TRUE(said || again == 1) << exit.output;
    EXPECT_EQ(figures("pretrain", "applied"), (std::vector<double>{1, 1, 1, 0, 0}));
    EXPECT_GT(figures("pretrain", "nonfinite").back(), 0);
    EXPECT_EQ(model_at("step_0_4_0"), model_at("step_0_3_0"));
    EXPECT_EQ(model_at("step_0_5_0"), model_at("step_0_3_0"));
    const std::string text = run_binary(folder_.path(), {"inspect", "run"}).output;
    EXPECT_NE(text.find("updates attempted 5, applied 3"), std::string::npos) << text;
    EXPECT_NE(text.find("skipped_updates = 2"), std::string::npos) << text;
  }
}

TEST_F(Faults, the_stop_policy_stops_before_the_weights_change) {
  use(pretrain(kBatch + kExplosion + "      on_nonfinite: stop\n"));
  const Exit exit = run_binary(folder_.path(), train_args());
  EXPECT_EQ(exit.code, 71) << exit.errors;
  EXPECT_NE(exit.errors.find("pretrain step 4: "), std::string::npos) << exit.errors;
  EXPECT_NE(exit.errors.find("weights are unchanged"), std::string::npos) << exit.errors;
  EXPECT_EQ(figures("pretrain", "applied"), (std::vector<double>{1, 1, 1}));
}

TEST_F(Faults, a_quantised_run_notices_values_that_are_not_finite_too) {
  use(pretrain(kBatch + kExplosion + "      on_nonfinite: stop\n"), "precision: {preset: nvidia_nvfp4}\n");
  const Exit exit = run_binary(folder_.path(), train_args());
  EXPECT_EQ(exit.code, 71) << exit.errors;
}

std::string exploding_rl(const std::string& mini_batches) {
  return rl("low: 0, high: 4", "max_tokens: 3",
            "      objective: {drop_zero_advantage: false, kl: 0.5, mini_batches: " + mini_batches +
                "}\n      optimizer: {learning_rate: 1000, weight_decay: 1000, clip_norm: 0}\n"
                "      schedule: {kind: constant}\n      max_skips: 1\n");
}

TEST_F(Faults, rl_stops_on_updates_that_are_not_finite_as_well) {
  use(exploding_rl("8"));
  const Exit exit = run_binary(folder_.path(), train_args());
  EXPECT_EQ(exit.code, 71) << exit.errors << exit.output;
  EXPECT_NE(exit.errors.find("rl step 1: "), std::string::npos) << exit.errors;
  EXPECT_NE(exit.errors.find("more than 1 updates skipped in a row"), std::string::npos) << exit.errors;
}

TEST_F(Faults, nothing_is_sampled_from_logits_that_are_not_finite) {
  use(exploding_rl("3"));
  const Exit exit = run_binary(folder_.path(), train_args());
  EXPECT_EQ(exit.code, 71) << exit.errors << exit.output;
  EXPECT_NE(exit.errors.find("NaN or infinite logits"), std::string::npos) << exit.errors;
}

// How a batch is cut ---------------------------------------------------------------------------------

class Split : public Faults {
 protected:
  // Eight steps of eight sequences; every cut's figures of the same name.
  std::vector<std::vector<double>> cuts(const std::string& name, const std::string& precision) {
    std::vector<std::vector<double>> all;
    for (const char* sequences : {"8", "4", "1"}) {
      const std::string dir = std::string("run_") + sequences + name;
      use(pretrain(kBatch + "      optimizer: {learning_rate: 3e-3}\n"), precision);
      train(folder_.path(), {"--set", "run.dir=" + dir, "--set", "model.moe.balance.aux_loss=0", "--set",
                             std::string("stages.0.pretrain.batch.micro_sequences=") + sequences});
      all.push_back(step_figures(folder_ / dir, "pretrain", name));
    }
    return all;
  }
  static void expect_near(const std::vector<std::vector<double>>& all, double relative) {
    for (const auto& figures : all) {
      ASSERT_EQ(figures.size(), 8u);
      for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(figures[i], all[0][i], relative * all[0][i]) << "step " << i;
    }
  }
};

TEST_F(Split, one_two_or_eight_micro_batches_learn_the_same) {
  expect_near(cuts("loss", "precision: {preset: fp32}\ndtypes: {gradients: fp32}\n"), 1e-5);
}

TEST_F(Split, the_gradient_is_the_whole_batch_s) {
  expect_near(cuts("grad_norm", "precision: {preset: fp32}\ndtypes: {gradients: fp32}\n"), 1e-4);
}

TEST_F(Split, in_bf16_they_differ_by_rounding_alone) { expect_near(cuts("loss", ""), 5e-3); }

TEST_F(Split, expert_load_counts_every_token_top_k_times) {
  for (const char* sequences : {"8", "1"}) {
    for (const char* recompute : {"none", "block"}) {
      const std::string dir = std::string("run_") + sequences + recompute;
      use(pretrain(kBatch + "      eval: {every: 1, tokens: 64}\n"));
      train(folder_.path(), {"--set", "run.dir=" + dir, "--set",
                             std::string("stages.0.pretrain.batch.micro_sequences=") + sequences, "--set",
                             std::string("parallel.recompute=") + recompute});
      for (const auto& line : metrics_of(folder_ / dir, "step", "pretrain")) {
        for (const char* layer : {"expert_load.0", "expert_load.1"}) {
          const auto load = line.at(layer).get<std::vector<double>>();
          EXPECT_EQ(std::accumulate(load.begin(), load.end(), 0.0), 256 * 2) << dir << " " << layer;
        }
      }
    }
  }
}

TEST_F(Split, measuring_more_often_changes_no_weight_and_no_bias) {
  const std::string stages =
      pretrain(kBatch + "      optimizer: {learning_rate: 1e-2}\n") +
      rl("low: 0, high: 4", "max_tokens: 3", "      objective: {drop_zero_advantage: false, kl: 0.1}\n");
  use(stages);
  const std::vector<std::string> short_run = {"--set", "stages.1.rl.steps=3"};
  train(folder_.path(), short_run);
  const auto seldom = model_at("step_1_3_0");
  std::filesystem::remove_all(run_);
  std::vector<std::string> often = short_run;
  for (const char* key : {"stages.0.pretrain.eval.every=1", "stages.1.rl.eval.every=1",
                          "stages.0.pretrain.eval.prompts=[\"1+\"]", "stages.1.rl.eval.prompts=[\"1+\"]"}) {
    often.insert(often.end(), {"--set", key});
  }
  train(folder_.path(), often);
  EXPECT_EQ(model_at("step_1_3_0"), seldom);
}

}  // namespace
}  // namespace fp4t::test
