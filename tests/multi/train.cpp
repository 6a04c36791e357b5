// Whole runs on several ranks under a real mpirun: equal bits where they are promised, one decision, one
// message, exit codes.
#include <cmath>
#include <csignal>
#include <filesystem>
#include <regex>

#include "tests/support/layouts.h"

namespace fp4t::test {
namespace {

// Four micro-batches a step.
std::string pretrain(const std::string& keys = "") { return spread_pretraining(2, keys); }

class Ranks : public ::testing::Test {
 protected:
  void use(const std::string& stages, const std::string& model = kTinyModel) {
    write_inputs(folder_.path(), model + stages);
  }
  Exit train_on(int ranks, const std::string& dir, const std::vector<std::string>& more = {}) {
    return test::train_on(ranks, folder_.path(), dir, more);
  }
  std::string dir(const std::string& name) const { return folder_ / name; }

  ScratchFolder folder_;
};

int count_of(const std::string& text, const std::string& what) {
  int n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

TEST_F(Ranks, four_ranks_of_one_micro_batch_have_the_bits_of_one_rank_of_four) {
  // One step, unclipped: from then on, the embedding's last bits reach everything.
  const std::vector<std::string> step = {"--set", "stages.0.pretrain.steps=1", "--set",
                                         "stages.0.pretrain.optimizer.clip_norm=0"};
  for (const std::string dtypes : {"fp32", "bf16"}) {
    use("dtypes: {masters: " + dtypes + ", moments: " + dtypes + "}\n" + pretrain());
    std::vector<std::string> one = step;
    one.insert(one.end(), {"--set", "run.dir=one" + dtypes});
    train(folder_.path(), one);
    const Exit exit = train_on(4, "four" + dtypes, step);
    EXPECT_EQ(count_of(exit.output, "pretrain step=1/1"), 1) << "rank 0 speaks for all\n" << exit.output;
    const std::string a = dir("one" + dtypes), b = dir("four" + dtypes);
    EXPECT_EQ(without_embedding(a), without_embedding(b));
    // Losses, monitors and expert load are the same sums, and so is the evaluation before.
    auto before = metrics_of(a), after = metrics_of(b);
    ASSERT_EQ(before.size(), after.size());
    ASSERT_GE(before.size(), 4u);
    for (size_t i = 0; i + 1 < before.size(); ++i) {
      const bool is_step = before[i].at("kind") == "step";
      if (is_step) {
        EXPECT_NEAR(before[i].at("grad_norm").get<double>(), after[i].at("grad_norm").get<double>(), 1e-6);
        before[i].erase("grad_norm");
        after[i].erase("grad_norm");
      }
      EXPECT_EQ(before[i], after[i]);
    }
  }
}

TEST_F(Ranks, uneven_parts_train_the_same_samples) {
  // Without quantised operands the cut into micro-batches changes the order of sums alone.
  use(pretrain());
  const std::vector<std::string> reference = {"--set", "precision={preset: fp32}",
                                              "--set", "model.moe.balance.aux_loss=0",
                                              "--set", "stages.0.pretrain.optimizer.learning_rate=1e-3"};

  std::vector<std::string> one = reference;
  one.insert(one.end(), {"--set", "run.dir=one"});
  train(folder_.path(), one);
  train_on(3, "three", reference);
  const auto a = step_figures(dir("one"), "pretrain", "loss"),
             b = step_figures(dir("three"), "pretrain", "loss");
  const auto n = step_figures(dir("one"), "pretrain", "grad_norm");
  const auto m = step_figures(dir("three"), "pretrain", "grad_norm");
  ASSERT_EQ(a.size(), 7u);
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_NEAR(a[i], b[i], 2e-4 * std::abs(a[i])) << "step " << i;
    EXPECT_NEAR(n[i], m[i], 2e-3 * std::abs(n[i])) << "step " << i;
  }
  EXPECT_EQ(step_figures(dir("one"), "pretrain", "trained_tokens"),
            step_figures(dir("three"), "pretrain", "trained_tokens"));
}

// Every expert group of four ranks sees the same tokens; a small receive factor takes several rounds.
TEST_F(Ranks, a_row_invariant_forward_has_the_same_bits_however_experts_are_spread) {
  use(pretrain());
  std::vector<nlohmann::json> first;
  for (const auto& [expert, factor] : {std::pair{1, "2"}, {2, "2"}, {4, "2"}, {4, "0.4"}}) {
    const std::string name = "e" + std::to_string(expert) + "f" + factor;
    train_on(4, name,
             {"--set", "precision={preset: mxfp8}", "--set", "stages.0.pretrain.steps=1", "--set",
              "parallel.expert=" + std::to_string(expert), "--set",
              std::string("parallel.receive_factor=") + factor});
    const auto evals = metrics_of(dir(name), "eval"), steps = metrics_of(dir(name), "step");
    ASSERT_GE(evals.size(), 1u);
    ASSERT_EQ(steps.size(), 1u);
    const std::vector<nlohmann::json> lines = {evals[0], steps[0]};
    if (first.empty()) first = lines;
    EXPECT_EQ(lines[0], first[0]) << name;
    for (const char* figure :
         {"loss", "router_z", "router_aux", "expert_load.0", "expert_load.1", "trained_tokens"}) {
      EXPECT_EQ(lines[1].at(figure), first[1].at(figure)) << name << ", " << figure;
    }
    EXPECT_NEAR(lines[1].at("grad_norm").get<double>(), first[1].at("grad_norm").get<double>(), 2e-3) << name;
  }
}

// One micro-batch a rank: what goes to its owner block by block is the same sum.
TEST_F(Ranks, gradients_and_weights_in_pieces_change_no_bit) {
  use(pretrain());
  int turn = 0;
  for (const std::string layout :
       {"parallel={}", "parallel={recompute: block}", "parallel={expert: 2}", "parallel={domain: 2}"}) {
    const std::string tag = std::to_string(turn++);
    std::map<std::string, std::string> whole;
    for (const int zero : {1, 2, 3}) {
      const std::string name = "zero" + std::to_string(zero) + "-" + tag;
      train_on(4, name,
               {"--set", layout, "--set", "parallel.zero=" + std::to_string(zero), "--set",
                "stages.0.pretrain.steps=3", "--set", "stages.0.pretrain.eval.every=2"});
      const auto tensors = tensors_in(latest_checkpoint_of(dir(name)));
      if (zero == 1) whole = tensors;
      EXPECT_EQ(tensors, whole) << layout << ", zero " << zero;
    }
  }
}

TEST_F(Ranks, a_stop_between_steps_with_experts_spread_costs_no_bit) {
  use(pretrain("      checkpoint: {every: 3, keep: 9}\n"));
  const std::vector<std::string> spread = {"--set", "parallel.expert=2"};
  train_on(4, "whole", spread);
  std::vector<std::string> branch = spread;
  branch.insert(branch.end(), {"--set", "run.branch_from=" + dir("whole") + "/checkpoints/step_0_3_0"});
  train_on(4, "again", branch);
  EXPECT_EQ(tensors_in(latest_checkpoint_of(dir("whole"))), tensors_in(latest_checkpoint_of(dir("again"))));
}

// What stands still in evaluations, checkpoints and their messages is no part of a step's time.
TEST_F(Ranks, no_step_stands_still_for_longer_than_it_takes) {
  use(pretrain("      checkpoint: {every: 2, keep: 2}\n") + R"(  - rl:
      steps: 3
      task: {kind: sums, low: 0, high: 4, held_out: {fraction: 0.2, seed: 7}}
      sampling: {prompts: 6, samples: 4, max_tokens: 4, max_batch: 8, end_tokens: ["\n", "<eod>"]}
      objective: {mini_batches: 2, micro_tokens: 64, drop_zero_advantage: false}
      optimizer: {learning_rate: 1e-3}
      eval: {every: 1, tokens: 2048, task: {kind: sums, low: 0, high: 4, held_out: {fraction: 0.2, seed: 7}}, max_tokens: 4}
      checkpoint: {every: 1, every_updates: 1, keep: 2}
)");
  const Exit exit = train_on(
      4, "run",
      {"--set", "precision={preset: bf16}", "--set", "parallel={expert: 2, zero: 2, expert_chunks: 2}",
       "--set", "stages.0.pretrain.eval={every: 1, tokens: 8192}"});
  const std::regex step("(pretrain|rl) step=[0-9]+/[0-9]+ .* exposed=([0-9.]+)% eta=");
  std::map<std::string, int> steps;
  double most = 0;
  for (std::sregex_iterator it(exit.output.begin(), exit.output.end(), step), end; it != end; ++it) {
    ++steps[(*it)[1]];
    const double exposed = std::stod((*it)[2]);
    EXPECT_LE(exposed, 100) << it->str();
    most = std::max(most, exposed);
  }
  EXPECT_EQ(steps["pretrain"], 7) << exit.output;
  EXPECT_EQ(steps["rl"], 3) << exit.output;
  EXPECT_GT(most, 0);
  EXPECT_GT(summary_of(dir("run")).at("exposed_seconds").get<double>(), 0);
}

TEST_F(Ranks, all_ranks_skip_the_same_updates_and_stop_with_one_message) {
  use(pretrain("      max_skips: 2\n      checkpoint: {every: 1, keep: 9}\n"));
  const Exit exit = run_ranks(4, folder_.path(),
                              train_args({"--set", "stages.0.pretrain.eval.every=0", "--set",
                                          "stages.0.pretrain.optimizer={learning_rate: 1000, "
                                          "weight_decay: 1000, clip_norm: 0}"}));
  EXPECT_EQ(exit.code, 71) << exit.errors << exit.output;
  EXPECT_EQ(count_of(exit.errors, "more than 2 updates skipped in a row"), 1) << exit.errors;
  const auto applied = step_figures(dir("run"), "pretrain", "applied");
  ASSERT_GE(applied.size(), 3u);
  EXPECT_EQ(applied.back(), 0);
  const auto name = [](size_t step) { return "/run/checkpoints/step_0_" + std::to_string(step) + "_0"; };
  EXPECT_EQ(tensors_in(folder_.path() + name(applied.size() - 1)),
            tensors_in(folder_.path() + name(applied.size())))
      << "weights moved";
}

TEST_F(Ranks, a_recipe_error_is_said_once) {
  use(pretrain());
  const Exit exit = run_ranks(4, folder_.path(), train_args({"--set", "model.heads=-1"}));
  EXPECT_EQ(exit.code, 2);
  EXPECT_EQ(count_of(exit.errors, "found -1"), 1) << exit.errors;
}

TEST_F(Ranks, what_no_rank_can_work_on_is_refused) {
  use(pretrain());
  const Exit few =
      run_ranks(4, folder_.path(), train_args({"--set", "stages.0.pretrain.batch={tokens: 96, length: 32}"}));
  EXPECT_EQ(few.code, 2);
  EXPECT_NE(few.errors.find("3 sequences a step leave some of the 4 ranks without any"), std::string::npos)
      << few.errors;
  const Exit data = run_ranks(4, folder_.path(), train_args({"--set", "parallel.data=2"}));
  EXPECT_EQ(data.code, 2);
  EXPECT_NE(data.errors.find("parallel.data: 2 x parallel.expert 1 needs 2 ranks, and this run has 4"),
            std::string::npos)
      << data.errors;
  EXPECT_EQ(run_ranks(4, folder_.path(),
                      train_args({"--set", "parallel.data=4", "--set", "stages.0.pretrain.steps=1"}))
                .code,
            0);
}

TEST_F(Ranks, a_rank_that_fails_alone_ends_the_others_with_its_exit_code) {
  use(pretrain());
  Command command = ranks_command(3, train_args({"--set", "stages.0.pretrain.steps=100000"}));
  const Command wrong = ranks_command(1, {"--config", "nowhere.yaml"});
  command.words.push_back(":");
  // mpirun's own options are the same for all: of the second program only -np and what follows.
  for (size_t i = 8; i < wrong.words.size(); ++i) command.words.push_back(wrong.words[i]);
  const Exit exit = Process(folder_.path(), command).wait();
  EXPECT_EQ(exit.code, 66) << exit.errors;
  EXPECT_NE(exit.errors.find("fp4train: rank 3: "), std::string::npos) << exit.errors;
}

TEST_F(Ranks, a_rank_that_hangs_ends_the_run_within_the_time_out) {
  use(pretrain());
  Process job(folder_.path(), ranks_command(3, train_args({"--set", "stages.0.pretrain.steps=100000", "--set",
                                                           "run.watchdog_seconds=2"})));
  ASSERT_TRUE(wait_until([&] { return count_steps(dir("run"), "pretrain") > 0; }));
  const auto ranks = job.children();
  ASSERT_EQ(ranks.size(), 3u);
  ::kill(ranks[1], SIGSTOP);
  const Exit exit = job.wait();
  EXPECT_EQ(exit.code, 72) << exit.errors;
  EXPECT_NE(exit.errors.find("s for another rank (run.watchdog_seconds is 2)"), std::string::npos)
      << exit.errors;
}

TEST_F(Ranks, a_second_job_on_the_folder_is_refused) {
  use(pretrain());
  Process first(folder_.path(), ranks_command(2, train_args({"--set", "stages.0.pretrain.steps=100000"})));
  ASSERT_TRUE(wait_until([&] { return count_steps(dir("run"), "pretrain") > 0; }));
  const Exit second = run_ranks(2, folder_.path(), train_args());
  EXPECT_EQ(second.code, 2);
  EXPECT_EQ(count_of(second.errors, "is in use by process"), 1) << second.errors;
  EXPECT_TRUE(first.running());
}

}  // namespace
}  // namespace fp4t::test
