// Killed between the optimizer steps of a rollout with everything on that a step can have, a run ends with
// the bits of one that nobody touched.
#include <csignal>

#include "tests/support/full_step.h"

namespace fp4t::test {
namespace {

TEST(RlResume, killed_inside_rollouts_with_everything_on_it_ends_as_if_nothing_happened) {
  const ScratchFolder folder;
  const std::string run = folder / "run", whole = folder / "whole";
  write_full_step(folder.path());
  train(folder.path(), {"--set", "run.dir=whole"});
  const auto sum = [&](const char* name) {
    double all = 0;
    for (const double x : step_figures(whole, "rl", name)) all += x;
    return all;
  };
  EXPECT_GT(sum("resampled_groups"), 0);
  EXPECT_GT(sum("router_disagreement"), 0);
  EXPECT_EQ(sum("applied"), 36);  // 2 epochs of 3 in 6 steps
  EXPECT_GT(sum("logprob_difference_mean"), 0);
  int64_t inside = 0;
  for (const int64_t step : {0, 2, 4}) {
    Process process(folder.path(), train_args());
    EXPECT_TRUE(wait_until([&] { return is_inside_a_step(run, step); }));
    process.signal(SIGKILL);
    EXPECT_TRUE(process.wait().killed());
    std::printf("killed behind %s\n", latest_checkpoint_of(run).c_str());
    inside += is_inside_a_step(run, step) ? 1 : 0;
  }
  EXPECT_GE(inside, 2);
  const Exit last = train(folder.path());
  EXPECT_NE(last.output.find("resuming from "), std::string::npos) << last.output;
  expect_same_outcome(run, whole);
  for (int step = 1; step <= 6; ++step) {
    const std::string name = "/rollouts/stage-0-step-00000" + std::to_string(step) + ".jsonl";
    EXPECT_FALSE(read_text(whole + name).empty());
    EXPECT_TRUE(read_text(run + name) == read_text(whole + name)) << name;
  }
}

}  // namespace
}  // namespace fp4t::test
