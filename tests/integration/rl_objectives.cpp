// Whole runs of every objective: they train, resume inside a rollout with the same bits, and correct for a
// sampler of another precision as the formulas say.
#include <cmath>
#include <filesystem>

#include "engine/store/checkpoint_read.h"
#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

const std::string kBf16 = "    - {module: \"*\", format: bf16}\n";
// Row scales: sampler and trainer agree where both have it.
const std::string kNvfp4 =
    "    - {module: head, format: bf16}\n"
    "    - {module: \"*\", operand: act, format: nvfp4, scale_rule: four_over_six, scale_scope: row}\n"
    "    - {module: \"*\", format: nvfp4, scale_rule: four_over_six}\n";

// A little pretraining, so that some answers of one digit are right and others are not.
std::string recipe(const std::string& sampler, const std::string& trainer, const std::string& objective) {
  return std::string(kTinyModel) + "precision:\n  rl.sampler:\n" + sampler + "  rl.trainer.forward:\n" +
         trainer +
         R"(stages:
  - pretrain:
      steps: 24
      batch: {tokens: 256, micro_sequences: 8, length: 32}
      data: [{kind: sums, low: 0, high: 3, wrong_fraction: 0.5, end_of_document: false}]
      optimizer: {learning_rate: 2e-2}
      eval: {tokens: 32}
      checkpoint: {keep: 40}
  - rl:
      steps: 4
      task: {kind: sums, low: 0, high: 3}
      sampling: {prompts: 8, samples: 8, max_tokens: 5}
      objective: {micro_tokens: 48, )" +
         objective + R"(}
      optimizer: {learning_rate: 5e-3}
      eval: {tokens: 32}
      checkpoint: {every_updates: 1, keep: 40}
)";
}

class RlObjectives : public ::testing::Test {
 protected:
  Exit run(const std::string& text, const std::vector<std::string>& more = {}) {
    write_text(folder_ / "recipe.yaml", text);
    return train(folder_.path(), more);
  }
  std::vector<double> figures(const std::string& name, const std::string& dir = "run") {
    return step_figures(folder_ / dir, "rl", name);
  }
  std::map<std::string, std::string> weights(const std::string& dir = "run") {
    return tensor_hashes_of(latest_checkpoint_of(folder_ / dir), "model.");
  }
  Rollout rollout_of(const std::string& checkpoint) {
    std::vector<std::string> notes;
    return CheckpointReader(folder_ / ("run/checkpoints/" + checkpoint)).state(&notes).rollout;
  }
  // The run trains, and from the checkpoint between the updates of its second step it ends with the same
  // bits.
  void expect_trains_and_resumes(const std::string& objective) {
    SCOPED_TRACE(objective);
    std::filesystem::remove_all(folder_ / "run");
    std::filesystem::remove_all(folder_ / "again");
    const std::string text = recipe(kNvfp4, kBf16, objective + ", mini_batches: 2");
    run(text);
    double updates = 0;
    for (const double n : figures("applied")) updates += n;
    EXPECT_GT(updates, 0);
    for (const double loss : figures("loss")) EXPECT_TRUE(std::isfinite(loss));
    const std::string between = folder_ / "run/checkpoints/step_1_1_1";
    ASSERT_TRUE(std::filesystem::exists(between));
    run(text, {"--set", "run.dir=again", "--set", "run.resume=" + between});
    EXPECT_EQ(weights("again"), weights());
    EXPECT_EQ(figures("loss", "again").back(), figures("loss").back());
  }

  ScratchFolder folder_;
};

TEST_F(RlObjectives, every_kind_trains_and_resumes_inside_a_rollout) {
  for (const char* kind : {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"}) {
    expect_trains_and_resumes(std::string("kind: ") + kind);
  }
  expect_trains_and_resumes(
      "clip_dual: 1.5, kl: 0.05, kl_in: reward, kl_estimator: k1, entropy: 0.01, average: constant, "
      "mismatch: {importance: raw, token_low: 0.5, token_high: 2, sequence_low: 0.5, sequence_high: 2, veto: "
      "1e-3}, "
      "router_replay: sampler, epochs: 2");
}

TEST_F(RlObjectives, kinds_differ_and_say_what_they_mean) {
  std::set<std::string> outcomes;
  for (const char* kind : {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"}) {
    std::filesystem::remove_all(folder_ / "run");
    run(recipe(kBf16, kBf16, std::string("mini_batches: 4, kind: ") + kind));
    std::string all;
    for (const auto& [name, hash] : weights()) all += hash;
    EXPECT_TRUE(outcomes.insert(all).second) << kind << " trained as another kind did";
  }
  write_text(folder_ / "recipe.yaml", recipe(kBf16, kBf16, "kind: dapo"));
  const Exit printed = run_binary(folder_.path(), {"print-config", "--config", "recipe.yaml"});
  for (const char* line :
       {"kind: dapo", "clip_high: 0.28", "resample: 3", "overlong_tokens: 1", "average: token"}) {
    EXPECT_NE(printed.output.find(line), std::string::npos) << line << "\n" << printed.output;
  }
}

TEST_F(RlObjectives, dynamic_sampling_asks_new_problems_where_rewards_are_equal) {
  run(recipe(kBf16, kBf16, "kind: dapo, overlong_tokens: 0"));
  const auto with = figures("zero_variance_groups"), asked = figures("resampled_groups");
  std::filesystem::remove_all(folder_ / "run");
  run(recipe(kBf16, kBf16, "kind: dapo, overlong_tokens: 0, resample: 0"));
  const auto without = figures("zero_variance_groups");
  ASSERT_GT(without[0], 0);
  EXPECT_LT(with[0], without[0]);
  // At least the groups that were equal at first were asked again, and not more than three times.
  EXPECT_GE(asked[0], without[0] * 8);
  EXPECT_LE(asked[0], without[0] * 8 * 3);
}

TEST_F(RlObjectives, an_entropy_bonus_keeps_the_entropy_higher) {
  run(recipe(kBf16, kBf16, "kind: grpo"), {"--set", "stages.1.rl.steps=8"});
  const auto without = figures("entropy");
  std::filesystem::remove_all(folder_ / "run");
  run(recipe(kBf16, kBf16, "entropy: 0.5"), {"--set", "stages.1.rl.steps=8"});
  const auto with = figures("entropy");
  EXPECT_EQ(with[0], without[0]);
  EXPECT_GT(with.back(), without.back());
}

// The figures are those of the rollout's own log-probabilities, and the correction changes what is learnt.
TEST_F(RlObjectives, a_sampler_in_nvfp4_is_measured_and_corrected) {
  const std::string text =
      recipe(kNvfp4, kBf16, "drop_zero_advantage: false, mini_batches: 2, mismatch: {cap: 1.05}");
  run(text);
  const auto weighted = weights();
  const Rollout r = rollout_of("step_1_0_1");
  double n = 0, rho = 0, square = 0, kl = 0, above = 0, equal = 0, largest = 0;
  for (size_t i = 0; i < r.completions.size(); ++i) {
    for (size_t t = 0; t < r.completions[i].size(); ++t) {
      const double d = double{r.old_log_probs[i][t]} - double{r.log_probs[i][t]};
      const double ratio = std::exp(d);
      n += 1;
      rho += ratio;
      square += ratio * ratio;
      kl += ratio - 1 - d;
      above += ratio > 1.05;
      equal += r.old_log_probs[i][t] == r.log_probs[i][t];
      largest = std::max(largest, std::abs(d));
    }
  }
  EXPECT_GT(largest, 1e-3);
  EXPECT_GT(above, 0);
  EXPECT_NEAR(figures("rho_mean")[0], rho / n, 1e-9);
  EXPECT_NEAR(figures("rho_chi_square")[0], square / n - 1, 1e-9);
  EXPECT_NEAR(figures("effective_share")[0], rho * rho / n / square, 1e-9);
  EXPECT_NEAR(figures("generation_kl")[0], kl / n, 1e-9);
  EXPECT_NEAR(figures("rho_truncated")[0], above / n, 1e-9);
  EXPECT_NEAR(figures("logprob_equal_fraction")[0], equal / n, 1e-9);
  EXPECT_NEAR(figures("logprob_difference_max")[0], largest, 1e-9);
  std::filesystem::remove_all(folder_ / "run");
  run(text, {"--set", "stages.1.rl.objective.mismatch={importance: off}"});
  EXPECT_NE(weights(), weighted);
}

TEST_F(RlObjectives, with_equal_bits_the_correction_is_the_identity) {
  run(recipe(kNvfp4, kNvfp4, "kind: grpo"));
  EXPECT_EQ(figures("rho_mean"), std::vector<double>(4, 1.0));
  EXPECT_EQ(figures("rho_chi_square"), std::vector<double>(4, 0.0));
  EXPECT_EQ(figures("effective_share"), std::vector<double>(4, 1.0));
  const auto corrected = weights();
  std::filesystem::remove_all(folder_ / "run");
  run(recipe(kNvfp4, kNvfp4, "mismatch: {importance: off}"));
  EXPECT_EQ(weights(), corrected);
}

// With equal bits the routers' own choice is the recorded one until the weights move: with one update a
// rollout, replaying it changes nothing at all.
TEST_F(RlObjectives, routing_is_replayed) {
  run(recipe(kNvfp4, kNvfp4, "kind: grpo"));
  const auto own = weights();
  std::filesystem::remove_all(folder_ / "run");
  run(recipe(kNvfp4, kNvfp4, "router_replay: sampler"));
  EXPECT_EQ(weights(), own);
  EXPECT_EQ(figures("router_disagreement"), std::vector<double>(4, 0.0));
  std::filesystem::remove_all(folder_ / "run");
  run(recipe(kNvfp4, kBf16, "mini_batches: 2, router_replay: sampler"));
  const Rollout r = rollout_of("step_1_0_1");
  for (size_t i = 0; i < r.completions.size(); ++i) {  // a byte a choice: two layers of two
    EXPECT_EQ(r.router[i].size(), (r.prompts[i / 8].size() + r.completions[i].size() - 1) * 4);
  }
  const auto disagreement = figures("router_disagreement"), replayed = figures("logprob_difference_mean");
  for (const double share : disagreement) EXPECT_GT(share, 0);
  const auto by_layer = metrics_of(folder_ / "run", "step", "rl")[0].at("router_disagreement_by_layer");
  EXPECT_EQ(by_layer.size(), 2u);
  std::filesystem::remove_all(folder_ / "run");
  run(recipe(kNvfp4, kBf16, "kind: grpo"));
  EXPECT_NE(figures("logprob_difference_mean")[0], replayed[0]);
  EXPECT_EQ(metrics_of(folder_ / "run", "step", "rl")[0].count("router_disagreement"), 0u);
}

// Measured alone, it changes nothing. The first layer's rows see the same inputs as where it is replayed.
TEST_F(RlObjectives, routing_is_measured_without_being_replayed) {
  const auto first_layer = [&] {
    return metrics_of(folder_ / "run", "step", "rl")[0].at("router_disagreement_by_layer")[0].get<double>();
  };
  run(recipe(kNvfp4, kBf16, "mini_batches: 2, router_replay: sampler"));
  const double replayed = first_layer();
  std::filesystem::remove_all(folder_ / "run");
  run(recipe(kNvfp4, kBf16, "mini_batches: 2"));
  const auto without = weights();
  std::filesystem::remove_all(folder_ / "run");
  run(recipe(kNvfp4, kBf16, "mini_batches: 2, router_replay: measure"));
  EXPECT_EQ(weights(), without);
  EXPECT_EQ(first_layer(), replayed);
  for (const double share : figures("router_disagreement")) EXPECT_GT(share, 0);
  EXPECT_TRUE(rollout_of("step_1_0_1").router.empty());
  std::filesystem::remove_all(folder_ / "run");
  run(recipe(kNvfp4, kNvfp4, "router_replay: measure"));
  EXPECT_EQ(figures("router_disagreement"), std::vector<double>(4, 0.0));
}

// Every completion is cut, and cut ones are masked: nothing is left to divide by.
TEST_F(RlObjectives, a_rollout_without_anything_to_train_on_is_counted_and_does_nothing) {
  const std::vector<std::string> cut = {
      "--set", "stages.1.rl.sampling={prompts: 4, samples: 2, max_tokens: 1, end_tokens: <eod>}",
      "--set", "stages.1.rl.checkpoint.every=1",
      "--set", "model.moe.balance.bias_rate=0"};
  run(recipe(kBf16, kBf16, "mask_truncated: true, drop_zero_advantage: false"), cut);
  EXPECT_EQ(figures("truncated"), std::vector<double>(4, 1.0));
  EXPECT_EQ(figures("loss"), std::vector<double>(4, 0.0));
  EXPECT_EQ(figures("applied"), std::vector<double>(4, 0.0));
  EXPECT_EQ(tensor_hashes_of(folder_ / "run/checkpoints/step_1_1_0", "model."), weights());
}

TEST_F(RlObjectives, lengths_are_those_of_all_completions_whatever_is_trained_on) {
  const char* const names[] = {"length_finished_min", "length_finished_mean", "length_finished_max",
                               "length_truncated_mean", "truncated"};
  std::vector<double> lengths[2];
  for (const bool masks : {false, true}) {
    std::filesystem::remove_all(folder_ / "run");
    run(recipe(kBf16, kBf16, masks ? "mask_truncated: true" : "mask_truncated: false"));
    for (const char* name : names) lengths[masks].push_back(figures(name)[0]);
  }
  EXPECT_EQ(lengths[0], lengths[1]);
  EXPECT_GT(lengths[0].back(), 0);
  EXPECT_LT(lengths[0].back(), 1);
}

// Where any byte ends a completion, answers are empty.
TEST_F(RlObjectives, empty_answers_are_trained_on) {
  std::string ends = "[\"<eod>\"";
  for (char c = ' '; c <= '~'; ++c) ends += c == '"' || c == '\\' ? "" : std::string(", \"") + c + "\"";
  run(recipe(kBf16, kBf16, "drop_zero_advantage: false, mini_batches: 2, average: sequence"),
      {"--set", "stages.1.rl.sampling.end_tokens=" + ends + "]"});
  for (const double least : figures("length_finished_min")) EXPECT_EQ(least, 1);
  for (const double loss : figures("loss")) EXPECT_TRUE(std::isfinite(loss));
  for (const double applied : figures("applied")) EXPECT_EQ(applied, 2);
}

TEST_F(RlObjectives, a_run_without_a_learning_signal_warns_and_stops_when_asked) {
  const std::vector<std::string> cut = {"--set",
                                        "stages.1.rl.sampling={prompts: 2, samples: 2, max_tokens: 1}",
                                        "--set", "stages.1.rl.steps=30"};
  const Exit warned = run(recipe(kBf16, kBf16, "kind: grpo"), cut);
  EXPECT_NE(
      warned.output.find("20 steps in a row without any learning signal: every group has equal rewards"),
      std::string::npos)
      << warned.output;
  std::filesystem::remove_all(folder_ / "run");
  std::vector<std::string> args = train_args(cut);
  args.insert(args.end(), {"--set", "stages.1.rl.stop_without_signal=22"});
  const Exit stopped = run_binary(folder_.path(), args);
  EXPECT_EQ(stopped.code, 71);
  EXPECT_NE(stopped.errors.find("stopped after 22 steps in a row without any learning signal"),
            std::string::npos)
      << stopped.errors;
  EXPECT_EQ(count_steps(folder_ / "run", "rl"), 22);
}

// The sampler's format differs from the trainer's by more than the mask lets pass.
TEST_F(RlObjectives, a_mask_that_leaves_nothing_is_no_learning_signal) {
  write_text(folder_ / "recipe.yaml",
             recipe(kNvfp4, kBf16, "mismatch: {sequence_low: 1, sequence_high: 1.0000001}"));
  const Exit stopped = run_binary(folder_.path(), train_args({"--set", "stages.1.rl.steps=30", "--set",
                                                              "stages.1.rl.stop_without_signal=20"}));
  EXPECT_EQ(stopped.code, 71);
  EXPECT_NE((stopped.output + stopped.errors).find("objective.mismatch masks every token"), std::string::npos)
      << stopped.output;
  EXPECT_EQ(figures("rho_left_out"), std::vector<double>(20, 1.0));
}

// A second stage begins with fresh moments, or goes on with the first one's.
TEST_F(RlObjectives, moments_are_kept_between_stages_when_asked) {
  const std::string one = recipe(kBf16, kBf16, "mini_batches: 2");
  const std::string stage = one.substr(one.find("  - rl:"));
  const std::string text = one + "  - rl:\n      name: second" + stage.substr(stage.find('\n'));
  run(text);
  const auto fresh = weights();
  const auto start = tensor_hashes_of(folder_ / "run/checkpoints/step_2_0_1", "optimizer.m.");
  std::filesystem::remove_all(folder_ / "run");
  run(text, {"--set", "stages.2.rl.optimizer.state=keep"});
  EXPECT_NE(weights(), fresh);
  EXPECT_NE(tensor_hashes_of(folder_ / "run/checkpoints/step_2_0_1", "optimizer.m."), start);
}

// One digit is rewarded, at a high learning rate: soon nothing else is drawn.
TEST_F(RlObjectives, a_policy_that_no_longer_explores_is_warned_of) {
  const Exit exit = run(recipe(kBf16, kBf16, "kind: rloo, drop_zero_advantage: false"),
                        {"--set", "stages.1.rl.rewards=[{kind: format, pattern: \"1\"}]", "--set",
                         "stages.1.rl.optimizer.learning_rate=0.03", "--set",
                         "stages.1.rl.sampling={prompts: 4, samples: 16, max_tokens: 1, end_tokens: <eod>}",
                         "--set", "stages.1.rl.steps=60", "--set", "stages.1.rl.checkpoint={every: 0}"});
  EXPECT_NE(exit.output.find("entropy collapse: 20 steps in a row below "), std::string::npos) << exit.output;
  const auto entropy = figures("entropy");
  EXPECT_LT(entropy.back(), entropy.front() / 100);
}

}  // namespace
}  // namespace fp4t::test
