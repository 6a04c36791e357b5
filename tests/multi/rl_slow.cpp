// Reinforcement learning on several ranks: what was sampled depends on no layout, and a stop anywhere costs
// nothing.
#include <cmath>
#include <csignal>
#include <filesystem>
#include <map>

#include "tests/support/full_step.h"
#include "tests/support/layouts.h"
#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

const std::string kRl = spread_rl("fp32", 3);

class RlRanks : public ::testing::Test {
 protected:
  std::string dir(const std::string& name) const { return folder_ / name; }
  static std::vector<std::string> expert(int n) { return {"--set", "parallel.expert=" + std::to_string(n)}; }
  Exit on(int ranks, const std::string& name, const std::vector<std::string>& more = {}) {
    return train_on(ranks, folder_.path(), name, more);
  }
  // Runs kTinyRecipe on four ranks, kills one when `moment` has come, starts again on as many.
  template <class Moment>
  void kill_at(const Moment& moment) {
    write_inputs(folder_.path(), kTinyRecipe);
    on(4, "whole");
    Process job(folder_.path(), ranks_command(4, train_args()));
    ASSERT_TRUE(wait_until(moment));
    const auto ranks = job.children();
    ASSERT_EQ(ranks.size(), 4u);
    ::kill(ranks[1], SIGKILL);
    EXPECT_EQ(job.wait().code, 137);
    const Exit again = on(4, "run");
    EXPECT_NE(again.output.find("resuming from "), std::string::npos);
    expect_same_outcome(dir("run"), dir("whole"));
  }

  ScratchFolder folder_;
};

TEST_F(RlRanks, rollouts_and_accuracy_depend_on_no_layout) {
  write_inputs(folder_.path(), kRl);
  // Eight: two ranks without a prompt.
  const std::pair<int, int> layouts[] = {{1, 1}, {2, 1}, {4, 1}, {8, 1}, {2, 2}, {4, 2}, {8, 4}};
  const auto name_of = [](int ranks, int experts) {
    return "on" + std::to_string(ranks) + "e" + std::to_string(experts);
  };
  for (const auto& [ranks, experts] : layouts) on(ranks, name_of(ranks, experts), expert(experts));
  const auto first = metrics_of(dir("on1e1"), "step", "rl");
  const auto start = metrics_of(dir("on1e1"), "eval", "rl");
  ASSERT_EQ(first.size(), 3u);
  for (const auto& [ranks, experts] : layouts) {
    const std::string run = dir(name_of(ranks, experts));
    const auto steps = metrics_of(run, "step", "rl");
    ASSERT_EQ(steps.size(), 3u);
    for (const char* name :
         {"reward", "reward_std", "zero_variance_groups", "unverifiable", "completion_tokens", "truncated",
          "length_finished_mean", "length_truncated_mean", "logprob_equal_fraction", "logprob_difference_max",
          "generation_kl", "updates"}) {
      EXPECT_EQ(steps[0].at(name), first[0].at(name)) << name << " on " << ranks << ", expert " << experts;
    }
    EXPECT_EQ(steps[0].at("logprob_equal_fraction"), 1.0);
    for (const char* name : {"loss", "grad_norm", "entropy"}) {
      const auto x = steps[0].at(name).get<double>(), y = first[0].at(name).get<double>();
      EXPECT_NEAR(x, y, 1e-4 * std::abs(y) + 1e-7) << name << " on " << ranks;
    }
    EXPECT_EQ(metrics_of(run, "eval", "rl")[0], start[0]) << "on " << ranks;
  }
  EXPECT_GT(first[0].at("grad_norm").get<double>(), 0);
}

// Problems asked in the place of others are shared out anew, and completions stay whole on a rank.
TEST_F(RlRanks, resampled_groups_and_ratios_of_completions_depend_on_no_layout) {
  write_inputs(folder_.path(), kRl);
  for (const char* kind : {"dapo", "gspo"}) {
    std::vector<nlohmann::json> first;
    for (const auto& [ranks, experts] : {std::pair{1, 1}, {2, 1}, {4, 2}}) {
      const std::string name = std::string(kind) + std::to_string(ranks);
      auto more = expert(experts);
      more.insert(more.end(), {"--set",
                               std::string("stages.0.rl.objective={kind: ") + kind +
                                   ", resample: 2, entropy: 0.01, mini_batches: 2, micro_tokens: 64, "
                                   "drop_zero_advantage: false}",
                               "--set", "stages.0.rl.steps=1"});
      on(ranks, name, more);
      const auto steps = metrics_of(dir(name), "step", "rl");
      if (first.empty()) first = steps;
      for (const char* figure : {"reward", "zero_variance_groups", "resampled_groups", "completion_tokens",
                                 "logprob_difference_max", "updates"}) {
        EXPECT_EQ(steps[0].at(figure), first[0].at(figure)) << figure << " of " << name;
      }
      EXPECT_GT(steps[0].at("resampled_groups").get<double>(), 0);
      for (const char* figure : {"loss", "grad_norm", "entropy"}) {
        const auto x = steps[0].at(figure).get<double>(), y = first[0].at(figure).get<double>();
        EXPECT_NEAR(x, y, 1e-4 * std::abs(y) + 1e-7) << figure << " of " << name;
      }
    }
    EXPECT_GT(first[0].at("grad_norm").get<double>(), 0);
  }
}

// The same weights, sampled and scored by 1, 2 and 4 ranks' experts for 50 steps: with a learning rate and a
// bias rate of 0, and with rows whose bits depend on no neighbour, every log-probability is the sampler's and
// the other layouts'.
TEST_F(RlRanks, without_learning_log_probabilities_are_equal_over_expert_parallel_degrees) {
  std::string text = kRl;
  text.replace(text.find("precision: {preset: fp32}"), 25, R"(precision:
  rl.sampler: &rows
    - {module: head, format: bf16}
    - {module: "experts.*", operand: act, format: nvfp4, scale_rule: four_over_six, scale_scope: row}
    - {module: "*", format: nvfp4, scale_rule: four_over_six}
  rl.trainer.forward: *rows)");
  write_inputs(folder_.path(), text);
  std::map<std::string, std::string> first;
  for (const int n : {1, 2, 4}) {
    const std::string name = "e" + std::to_string(n);
    auto more = expert(n);
    more.insert(more.end(), {"--set", "stages.0.rl.optimizer.learning_rate=0", "--set",
                             "stages.0.rl.steps=50", "--set", "model.moe.balance.bias_rate=0", "--set",
                             "stages.0.rl.checkpoint={every_updates: 1, keep: 200}", "--set",
                             "stages.0.rl.objective.router_replay=sampler"});
    on(n, name, more);
    EXPECT_EQ(step_figures(dir(name), "rl", "logprob_equal_fraction"), std::vector<double>(50, 1.0)) << n;
    EXPECT_EQ(step_figures(dir(name), "rl", "logprob_difference_max"), std::vector<double>(50, 0.0)) << n;
    EXPECT_EQ(step_figures(dir(name), "rl", "router_disagreement"), std::vector<double>(50, 0.0)) << n;
    std::map<std::string, std::string> all;
    for (int step = 0; step < 50; ++step) {
      const std::string at = dir(name) + "/checkpoints/step_0_" + std::to_string(step) + "_1";
      const auto hashes = tensor_hashes_of(at, "rollout.");
      EXPECT_GE(hashes.size(), 15u);
      for (const auto& [tensor, hash] : hashes) all[tensor + " " + std::to_string(step)] = hash;
    }
    if (first.empty()) first = all;
    EXPECT_EQ(all, first) << n;
  }
}

TEST_F(RlRanks, a_kill_between_two_updates_changes_nothing) {
  kill_at([&] {
    const std::string latest = latest_checkpoint_of(dir("run"));
    return latest.find("step_1_") != std::string::npos && latest.back() != '0';
  });
}

TEST_F(RlRanks, a_kill_inside_a_step_with_everything_on_changes_nothing) {
  write_full_step(folder_.path());
  on(2, "whole", expert(2));
  {
    Process job(folder_.path(), ranks_command(2, train_args(expert(2))));
    ASSERT_TRUE(wait_until([&] { return is_inside_a_step(dir("run"), 1); }));
    const auto ranks = job.children();
    ASSERT_EQ(ranks.size(), 2u);
    ::kill(ranks[1], SIGKILL);
    EXPECT_EQ(job.wait().code, 137);
  }
  const Exit again = on(2, "run", expert(2));
  EXPECT_NE(again.output.find("resuming from "), std::string::npos);
  expect_same_outcome(dir("run"), dir("whole"));
}

TEST_F(RlRanks, a_rollout_in_progress_goes_on_on_another_number_of_ranks) {
  write_inputs(folder_.path(), kTinyRecipe);
  {
    Process job(folder_.path(), ranks_command(4, train_args()));
    ASSERT_TRUE(wait_until([&] {
      const std::string latest = latest_checkpoint_of(dir("run"));
      return latest.find("step_1_") != std::string::npos && latest.back() != '0';
    }));
    const auto ranks = job.children();
    ASSERT_EQ(ranks.size(), 4u);
    ::kill(ranks[3], SIGKILL);
    EXPECT_EQ(job.wait().code, 137);
  }

  const Exit again = on(2, "run");
  EXPECT_NE(again.output.find(", update "), std::string::npos) << again.output;
  EXPECT_EQ(count_steps(dir("run"), "rl"), 13);
  EXPECT_GE(summary_of(dir("run")).at("logprob_equal_fraction_min").get<double>(), 0.0);
}

TEST_F(RlRanks, a_signal_to_one_rank_while_sampling_stops_all) {
  write_inputs(folder_.path(), kTinyRecipe);
  for (const int n : {1, 2, 3}) {
    const std::string run = "run" + std::to_string(n), whole = "whole" + std::to_string(n);
    std::vector<std::string> layout =
        n < 3 ? expert(n) : std::vector<std::string>{"--set", "parallel.zero=3"};
    layout.insert(layout.end(), {"--set", "stages.0.pretrain.steps=5", "--set", "stages.1.rl.steps=6"});
    on(2, whole, layout);
    std::vector<std::string> args = layout;
    args.insert(args.end(), {"--set", "run.dir=" + run});
    Process job(folder_.path(), ranks_command(2, train_args(args)));
    ASSERT_TRUE(wait_until([&] { return count_steps(dir(run), "rl") >= 2; }, 300));
    const auto ranks = job.children();
    ASSERT_EQ(ranks.size(), 2u);
    ::kill(ranks[1], SIGTERM);
    // What is left is a call or a few, and a checkpoint: whoever still works after this hangs.
    ASSERT_TRUE(wait_until([&] { return !job.running(); }, 300)) << "layout " << n << " after the signal:\n"
                                                                 << read_text(dir(run) + "/log.txt");
    EXPECT_EQ(job.wait().code, 75);
    on(2, run, layout);
    expect_same_outcome(dir(run), dir(whole));
  }
}

}  // namespace
}  // namespace fp4t::test
