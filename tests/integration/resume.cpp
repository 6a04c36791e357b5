// Stop or kill a run anywhere; the same command again ends where the uninterrupted run ended, byte for byte.
#include <gtest/gtest.h>

#include "tests/support/interrupted.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

using Resume = Interrupted;

TEST_F(Resume, killed_in_pretraining_it_ends_as_if_nothing_happened) { kill_in("pretrain", 16); }

TEST_F(Resume, killed_in_rl_it_ends_as_if_nothing_happened) { kill_in("rl", 11); }

TEST_F(Resume, killed_between_two_updates_of_a_rollout_it_goes_on_with_that_rollout) {
  // step_<stage>_<step>_<update>: the update is not zero inside a rollout.
  const Exit second = kill_behind([](const std::string& name) {
    return name.rfind("step_1_", 0) == 0 && name.substr(name.size() - 2) != "_0";
  });
  EXPECT_NE(second.output.find(", update "), std::string::npos) << second.output;
}

TEST_F(Resume, monitors_do_not_remember_an_evaluation_that_a_resumed_run_has_not_made) {
  kill_behind([](const std::string& name) { return name == "step_0_10_0"; });
  fs::remove_all(run_);
  kill_behind([](const std::string& name) { return name == "step_1_10_0"; });
}

TEST_F(Resume, every_stop_signal_saves_exits_75_and_the_same_command_goes_on) {
  const struct {
    int number;
    const char* stage;
    int64_t steps;
  } stops[] = {{SIGTERM, "pretrain", 2}, {SIGINT, "pretrain", 7}, {SIGUSR1, "rl", 2}, {SIGUSR2, "rl", 8}};
  for (const auto& stop : stops) {
    Process process(folder_.path(), train_args());
    wait_for_step(stop.stage, stop.steps);
    process.signal(stop.number);
    const Exit exit = process.wait();
    EXPECT_EQ(exit.code, 75) << exit.errors << exit.output;
    const std::string expected =
        "fp4train: stopped by signal " + std::to_string(stop.number) + "; saved run/checkpoints/step_";
    EXPECT_EQ(exit.errors.rfind(expected, 0), 0u) << exit.errors;
    const Exit inspect = run_binary(folder_.path(), {"inspect", "run", "--verify"});
    EXPECT_EQ(inspect.code, 0) << inspect.errors;
    for (const auto& entry : fs::directory_iterator(run_ + "/checkpoints")) {
      EXPECT_EQ(entry.path().string().find(".tmp."), std::string::npos) << "left behind: " << entry.path();
    }
  }
  train(folder_.path());
  expect_equal_to_uninterrupted();
}

TEST_F(Resume, a_stop_signal_that_comes_while_a_run_is_starting_is_not_lost) {
  for (int start = 0; start < 2; ++start) {  // a new run, then one that verifies a checkpoint first
    std::filesystem::remove(run_ + "/lock");
    Process process(folder_.path(), train_args());
    ASSERT_TRUE(wait_until([&] { return std::filesystem::exists(run_ + "/lock"); }));
    process.signal(SIGTERM);
    const Exit exit = process.wait();
    EXPECT_EQ(exit.code, 75) << exit.errors << exit.output;
    EXPECT_EQ(count_steps(run_, "pretrain"), 0);
  }
  train(folder_.path());
  expect_equal_to_uninterrupted();
}

TEST_F(Resume, a_stop_inside_an_evaluation_cuts_it_off_and_it_is_made_again) {
  std::vector<std::string> often;  // completions enough that the signal falls among them
  for (const char* key :
       {"stages.0.pretrain.eval.prompts=[]", "stages.0.pretrain.eval.task_samples=300",
        "stages.0.pretrain.eval.max_tokens=16", "stages.0.pretrain.eval.every=5",
        "stages.0.pretrain.eval.task={kind: sums, low: 0, high: 4, held_out: {fraction: 0.2, seed: 7}}"}) {
    often.insert(often.end(), {"--set", key});
  }
  std::vector<std::string> elsewhere = often;
  elsewhere.insert(elsewhere.end(), {"--set", "run.dir=elsewhere"});
  train(folder_.path(), elsewhere);
  for (const int64_t step : {0, 5, 16}) {  // at the start, in between, at the end of pretraining
    Process process(folder_.path(), train_args(often));
    ASSERT_TRUE(wait_until([&] {
      return step > 0 ? count_steps(run_, "pretrain") == step
                      : read_text(run_ + "/log.txt").find("stage 1 of 2") != std::string::npos;
    }));
    sleep_seconds(0.01);
    process.signal(SIGTERM);
    const Exit exit = process.wait();
    EXPECT_EQ(exit.code, 75) << exit.errors << exit.output;
    EXPECT_EQ(fs::path(latest_checkpoint_of(run_)).filename(), "step_0_" + std::to_string(step) + "_0");
    for (const auto& line : metrics_of(run_, "eval")) EXPECT_NE(line.at("step"), step) << "not cut off";
  }
  train(folder_.path(), often);
  expect_same_outcome(run_, folder_ / "elsewhere");
}

TEST_F(Resume, two_runs_from_scratch_are_equal_with_other_threads_and_another_folder) {
  train(folder_.path(), {"--set", "run.threads=1", "--set", "run.dir=elsewhere"});
  expect_same_outcome(folder_ / "elsewhere", *reference_ / "run");
}

TEST_F(Resume, recomputing_activations_changes_no_figure_and_no_tensor) {
  train(folder_.path(), {"--set", "parallel.recompute=none"});
  EXPECT_EQ(read_text(run_ + "/metrics.jsonl"), read_text(*reference_ / "run/metrics.jsonl"));
  EXPECT_EQ(summary_of(run_).at("content_hash"), summary_of(*reference_ / "run").at("content_hash"));
}

TEST_F(Resume, a_finished_run_is_left_alone) {
  const auto contents = [] {
    auto files = all_bytes_of(*reference_ / "run");
    files.erase(*reference_ / "run/log.txt");
    files.erase(*reference_ / "run/lock");
    return files;
  };
  const auto before = contents();
  const Exit again = train(reference_->path());
  EXPECT_NE(again.output.find("already done"), std::string::npos) << again.output;
  const auto after = contents();
  EXPECT_EQ(before.size(), after.size());
  for (const auto& [path, bytes] : before) {
    ASSERT_EQ(after.count(path), 1u) << path;
    EXPECT_TRUE(after.at(path) == bytes) << path << " changed";
  }
}

}  // namespace
}  // namespace fp4t::test
