// A run folder from the outside: what may change when a run goes on, branches, locks, launchers.
#include <csignal>
#include <filesystem>
#include <map>
#include <string>

#include "tests/support/cli.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

using CliRuns = Cli;

TEST_F(CliRuns, a_change_of_identity_is_refused_even_when_changes_are_accepted) {
  copy_done();
  for (const auto& more : {std::vector<std::string>{"--set", "run.seed=99"},
                           {"--set", "run.seed=99", "--accept-changes"},
                           {"--set", "model.moe.experts=8", "--accept-changes"}}) {
    const Exit exit = go_on(more);
    EXPECT_ANSWER(exit, 2, more[1].substr(0, more[1].find('=')));
  }
  EXPECT_ANSWER(go_on({"--set", "run.seed=99"}), 2, "run.seed: 3 -> 99");
}

TEST_F(CliRuns, a_change_of_course_is_refused_unless_accepted_and_then_stands_in_the_lineage) {
  copy_done();
  const std::vector<std::string> longer = {"--set", "stages.1.rl.steps=4", "--set",
                                           "stages.1.rl.optimizer.learning_rate=0.5"};
  const Exit refused = go_on(longer);
  EXPECT_ANSWER(refused, 2, "stages[1].rl.steps: 2 -> 4");
  EXPECT_ANSWER(refused, 2, "stages[1].rl.optimizer.learning_rate: 0.001 -> 0.5");
  EXPECT_ANSWER(refused, 2, "--accept-changes");
  EXPECT_EQ(count_steps(run_, "rl"), 2);
  std::vector<std::string> accepted = longer;
  accepted.push_back("--accept-changes");
  train(folder_.path(), accepted);
  EXPECT_EQ(count_steps(run_, "rl"), 4);
  const std::string text = run({"inspect", "run"}).output;
  EXPECT_NE(text.find("stage 1 step 2: stages[1].rl.steps: 2 -> 4"), std::string::npos) << text;
  // Once accepted it is the run's recipe.
  EXPECT_ANSWER(go_on(longer), 0, "already done");
}

TEST_F(CliRuns, changes_of_output_and_layout_are_free) {
  copy_done();
  EXPECT_ANSWER(go_on({"--set", "run.name=other", "--set", "run.dir=run", "--set", "run.threads=1", "--set",
                       "stages.0.pretrain.batch.micro_sequences=1", "--set", "parallel.recompute=block",
                       "--set", "stages.1.rl.eval.every=1", "--set", "stages.1.rl.checkpoint.keep=5"}),
                0, "already done");
}

TEST_F(CliRuns, data_that_changed_under_a_run_is_noticed) {
  Process process(folder_.path(), train_args({"--set", "stages.0.pretrain.steps=400"}));
  ASSERT_TRUE(wait_until([&] { return !latest_checkpoint_of(run_).empty(); }));
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait().code, 75);
  write_text(folder_ / "text/words.txt", read_text(folder_ / "text/words.txt") + "one more\n");
  const std::vector<std::string> same = {"--set", "stages.0.pretrain.steps=400"};
  EXPECT_ANSWER(go_on(same), 65, "the data of stage 'pretrain' is not what the checkpoint was made with");
  const int64_t step = count_steps(run_, "pretrain");
  const std::vector<std::string> accepted = {"--set", "stages.0.pretrain.steps=" + std::to_string(step + 1),
                                             "--accept-changes"};
  train(folder_.path(), accepted);
  const std::string text = run({"inspect", "run"}).output;
  EXPECT_NE(text.find("data of stage 'pretrain'"), std::string::npos) << text;
}

TEST_F(CliRuns, a_branch_starts_a_run_folder_of_its_own_from_weights_and_counters) {
  copy_done();
  const auto before = all_bytes_of(run_);
  const std::vector<std::string> branch = {"--set", "run.dir=branch",
                                           "--set", "run.branch_from=run/checkpoints/step_1_0_0",
                                           "--set", "stages.1.rl.optimizer.learning_rate=0.01"};
  ASSERT_TRUE(fs::exists(run_ + "/checkpoints/step_1_0_0"));
  const Exit exit = train(folder_.path(), branch);
  EXPECT_NE(exit.output.find("branching from run/checkpoints/step_1_0_0: stage 1, step 0"),
            std::string::npos);
  EXPECT_EQ(all_bytes_of(run_), before) << "the origin changed";
  EXPECT_EQ(count_steps(folder_ / "branch", "pretrain"), 0);
  EXPECT_EQ(count_steps(folder_ / "branch", "rl"), 2);
  const std::string text = run({"inspect", "branch"}).output;
  EXPECT_NE(text.find("branched from a checkpoint of content "), std::string::npos) << text;
  EXPECT_NE(text.find("stages[1].rl.optimizer.learning_rate: 0.001 -> 0.01"), std::string::npos) << text;
  EXPECT_ANSWER(go_on(branch), 0, "already done");
  // In a folder that has a course of its own, branching would drop it.
  EXPECT_ANSWER(go_on({"--set", "run.branch_from=branch"}), 2, "run.branch_from");
}

TEST_F(CliRuns, resume_never_and_resume_from_a_path_do_what_they_say) {
  copy_done();
  EXPECT_ANSWER(go_on({"--set", "run.resume=never"}), 2, "run.resume: never, but run holds checkpoints");
  const std::string reference = read_text(run_ + "/metrics.jsonl");
  // A run folder's own course is continued, whatever checkpoint its first start was from.
  const Exit again = go_on({"--set", "run.resume=run/checkpoints/step_1_0_0"});
  EXPECT_ANSWER(again, 0, "run.resume: run/checkpoints/step_1_0_0 is passed over");
  EXPECT_ANSWER(again, 0, "already done");
  EXPECT_EQ(read_text(run_ + "/metrics.jsonl"), reference);
  const std::vector<std::string> elsewhere = {"--set", "run.dir=fresh", "--set",
                                              "run.resume=run/checkpoints/step_1_0_0"};
  EXPECT_ANSWER(go_on(elsewhere), 0, "resuming from run/checkpoints/step_1_0_0");
  EXPECT_EQ(count_steps(folder_ / "fresh", "pretrain"), 0);
  EXPECT_EQ(count_steps(folder_ / "fresh", "rl"), 2);
  expect_same_outcome(run_, *done_ / "run");
}

TEST_F(CliRuns, a_second_process_on_a_run_folder_is_refused_naming_the_first) {
  Process first(folder_.path(), train_args({"--set", "stages.0.pretrain.steps=100000"}));
  ASSERT_TRUE(wait_until([&] { return !latest_checkpoint_of(run_).empty(); }));
  EXPECT_ANSWER(go_on({"--set", "stages.0.pretrain.steps=100000"}), 2,
                "run folder 'run' is in use by process " + std::to_string(first.pid()));
  EXPECT_TRUE(first.running());
  first.signal(SIGKILL);
  // The next one starts while the first is still being torn down.
  Process next(folder_.path(), train_args({"--set", "stages.0.pretrain.steps=100000"}));
  EXPECT_TRUE(wait_until([&] {
    return read_text(run_ + "/log.txt").find("resuming from ") != std::string::npos;
  })) << "a killed process holds no lock";
  next.signal(SIGTERM);
  EXPECT_EQ(next.wait().code, 75);
}

TEST_F(CliRuns, a_launcher_that_starts_several_copies_is_refused) {
  // MPI keeps what it allocates, which is no finding of the address sanitizer.
  const std::map<std::string, std::string> launched = {{"OMPI_COMM_WORLD_SIZE", "2"},
                                                       {"ASAN_OPTIONS", "detect_leaks=0"}};
  EXPECT_ANSWER(run_binary(folder_.path(), train_args(), launched), 2, "OMPI_COMM_WORLD_SIZE");
  EXPECT_FALSE(fs::exists(run_));
  EXPECT_EQ(run_binary(folder_.path(), {"validate", "--config", "recipe.yaml"}, launched).code, 0);
}

TEST_F(CliRuns, a_longer_run_does_not_move_a_switch_given_in_percent) {
  const std::string precision = R"(precision:
  pretrain.forward:
    - {module: "*", steps: 0-50%, format: mxfp8}
    - {module: "*", format: bf16}
)";
  const std::string stages = kStages.substr(0, kStages.find("  - rl:"));
  write_text(folder_ / "recipe.yaml", std::string(kTinyModel) + precision + stages);
  train(folder_.path());
  EXPECT_NE(read_text(run_ + "/plan.txt").find("pretrain.forward, steps 0 to 2"), std::string::npos)
      << read_text(run_ + "/plan.txt");
  train(folder_.path(), {"--set", "stages.0.pretrain.steps=8", "--accept-changes"});
  EXPECT_EQ(count_steps(run_, "pretrain"), 8);
  const std::string plan = read_text(run_ + "/plan.txt");
  EXPECT_NE(plan.find("pretrain.forward, steps 0 to 2"), std::string::npos) << plan;
  EXPECT_EQ(plan.find("pretrain.forward, steps 0 to 4"), std::string::npos) << plan;
}

}  // namespace
}  // namespace fp4t::test
