// Fixture of tests that stop a run and start it again.
#pragma once

#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <random>
#include <string>

#include "tests/support/runs.h"

namespace fp4t::test {

// An uninterrupted run of kTinyRecipe, made once, that a test's own run is compared with.
class Interrupted : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    reference_ = new ScratchFolder;
    write_inputs(reference_->path(), kTinyRecipe);
    train(reference_->path());
  }
  static void TearDownTestSuite() {
    delete reference_;
    reference_ = nullptr;
  }

  void SetUp() override {
    seed_ = std::random_device{}();
    random_.seed(seed_);
    std::printf("random seed %u\n", seed_);
    write_inputs(folder_.path(), kTinyRecipe);
  }

  double draw(double limit) { return std::uniform_real_distribution<double>(0, limit)(random_); }
  int64_t draw_step(int64_t steps) { return std::uniform_int_distribution<int64_t>(0, steps - 1)(random_); }

  // Lets a run come to `steps` finished steps of a stage and a random moment further.
  void wait_for_step(const std::string& stage, int64_t steps) {
    const std::string begun = stage == "rl" ? "stage 2 of 2" : "stage 1 of 2";
    ASSERT_TRUE(wait_until([&] {
      return steps > 0 ? count_steps(run_, stage) >= steps
                       : read_text(run_ + "/log.txt").find(begun) != std::string::npos;
    }));
    sleep_seconds(draw(0.05));
  }

  void expect_equal_to_uninterrupted() { expect_same_outcome(run_, *reference_ / "run"); }

  // Starts a run, kills it at a random instant of a stage, starts it again and compares. `steps` may leave
  // out the last steps of a run, which may be over before the signal comes.
  void kill_in(const std::string& stage, int64_t steps) {
    Process first(folder_.path(), train_args());
    const int64_t step = draw_step(steps);
    wait_for_step(stage, step);
    first.signal(SIGKILL);
    EXPECT_TRUE(first.wait().killed());
    const std::string latest = latest_checkpoint_of(run_);
    std::printf("killed in %s after %ld steps; newest checkpoint '%s'\n", stage.c_str(),
                static_cast<long>(step), latest.c_str());
    const Exit second = train(folder_.path());
    EXPECT_EQ(second.output.find("resuming from ") != std::string::npos, !latest.empty());
    expect_equal_to_uninterrupted();
  }

  // Kills a run when its newest checkpoint has a wanted name, starts it again and compares.
  Exit kill_behind(const std::function<bool(const std::string&)>& wanted) {
    Process first(folder_.path(), train_args());
    EXPECT_TRUE(wait_until([&] {
      const std::string latest = latest_checkpoint_of(run_);
      return !latest.empty() && wanted(std::filesystem::path(latest).filename().string());
    }));
    first.signal(SIGKILL);
    EXPECT_TRUE(first.wait().killed());
    EXPECT_TRUE(wanted(std::filesystem::path(latest_checkpoint_of(run_)).filename().string()))
        << "missed the moment";
    const Exit second = train(folder_.path());
    expect_equal_to_uninterrupted();
    return second;
  }

  inline static ScratchFolder* reference_ = nullptr;
  ScratchFolder folder_;
  std::string run_ = folder_ / "run";
  unsigned seed_ = 0;
  std::mt19937 random_;
};

}  // namespace fp4t::test
