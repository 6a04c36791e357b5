// Stopping and continuing on several ranks: the same layout to the bit, another one from byte-identical
// state.
#include <csignal>
#include <filesystem>

#include "tests/support/layouts.h"

namespace fp4t::test {
namespace {

// Medium matrices, so that pieces end inside tensors; copies of FP32 masters, which ranks share.
const char* const kSharded = R"(run: {name: sharded, dir: run, seed: 3}
model:
  layers: 2
  hidden: 128
  heads: 4
  kv_heads: 2
  head_dim: 32
  max_positions: 32
  moe: {experts: 4, top_k: 2, hidden: 96, balance: {bias_rate: 0.01, z_loss: 0.001}}
precision: {preset: quartet2}
stages:
  - pretrain:
      steps: 5
      batch: {tokens: 256, micro_sequences: 2, length: 32}
      data: [{name: sums, kind: sums, low: 0, high: 9, end_of_document: false, held_out: {fraction: 0.2, seed: 7}}]
      optimizer: {learning_rate: 1e-2, weight_decay: 0.1}
      schedule: {kind: constant}
      eval: {tokens: 256}
)";

class Elastic : public ::testing::Test {
 protected:
  void use(const std::string& recipe) { write_inputs(folder_.path(), recipe); }
  std::string dir(const std::string& name) const { return folder_ / name; }
  Exit on(int ranks, const std::vector<std::string>& more) {
    const Exit exit = run_ranks(ranks, folder_.path(), train_args(more));
    EXPECT_EQ(exit.code, 0) << exit.errors << "\n" << exit.output;
    return exit;
  }
  std::map<std::string, std::string> tensors_of(const std::string& run) {
    return tensors_in(latest_checkpoint_of(dir(run)));
  }
  // The state of one run loaded on so many ranks and written again.
  void carry(const std::string& from, const std::string& to, int ranks, std::vector<std::string> more = {}) {
    more.insert(more.end(),
                {"--set", "run.dir=" + to, "--set", "run.branch_from=" + latest_checkpoint_of(dir(from))});
    on(ranks, more);

    EXPECT_EQ(tensors_of(from), tensors_of(to)) << "on " << ranks << " ranks";
  }

  ScratchFolder folder_;
};

TEST_F(Elastic, state_is_byte_identical_on_any_number_of_ranks) {
  for (const std::string dtypes : {"", "dtypes: {masters: bf16, moments: bf16}\n"}) {
    use(kSharded + dtypes);
    const std::string tag = dtypes.empty() ? "32" : "16";
    on(4, {"--set", "run.dir=a" + tag});
    carry("a" + tag, "b" + tag, 2);
    carry("b" + tag, "c" + tag, 1);
    carry("c" + tag, "d" + tag, 3);
    carry("d" + tag, "e" + tag, 4);
    // From there on four ranks go on as the ones that never stopped, and so does any other number.
    const std::vector<std::string> longer = {"--set", "stages.0.pretrain.steps=9", "--accept-changes"};
    std::vector<std::string> first = longer, last = longer;
    first.insert(first.end(), {"--set", "run.dir=a" + tag});
    last.insert(last.end(), {"--set", "run.dir=e" + tag, "--set",
                             "run.branch_from=" + latest_checkpoint_of(dir("d" + tag))});
    on(4, first);
    on(4, last);
    EXPECT_EQ(tensors_of("a" + tag), tensors_of("e" + tag));
  }
}

TEST_F(Elastic, state_is_byte_identical_however_experts_are_spread) {
  for (const std::string dtypes : {"", "dtypes: {masters: bf16, moments: bf16}\n"}) {
    use(kSharded + dtypes);
    const auto expert = [](int n) {
      return std::vector<std::string>{"--set", "parallel.expert=" + std::to_string(n)};
    };
    const std::string tag = dtypes.empty() ? "32" : "16";
    on(4, {"--set", "run.dir=a" + tag, "--set", "parallel.expert=2"});
    carry("a" + tag, "b" + tag, 2, expert(1));
    carry("b" + tag, "c" + tag, 8, expert(4));
    carry("c" + tag, "d" + tag, 1);
    auto pieces = expert(4);
    pieces.insert(pieces.end(), {"--set", "parallel.zero=3"});
    carry("d" + tag, "e" + tag, 4, pieces);
    carry("e" + tag, "f" + tag, 4, expert(2));
    // Carried around, four ranks go on as the ones that never stopped.
    const std::vector<std::string> longer = {"--set", "stages.0.pretrain.steps=9", "--accept-changes",
                                             "--set", "parallel.expert=2"};
    std::vector<std::string> first = longer, last = longer;
    first.insert(first.end(), {"--set", "run.dir=a" + tag});
    last.insert(last.end(), {"--set", "run.dir=f" + tag, "--set",
                             "run.branch_from=" + latest_checkpoint_of(dir("e" + tag))});
    on(4, first);
    on(4, last);
    EXPECT_EQ(tensors_of("a" + tag), tensors_of("f" + tag));
  }
}

TEST_F(Elastic, muon_keeps_whole_matrices_and_reshards) {
  use(kSharded);
  const std::vector<std::string> muon = {
      "--set", "stages.0.pretrain.optimizer={kind: muon, learning_rate: 1e-2, clip_norm: 0}", "--set",
      "stages.0.pretrain.steps=1"};
  std::vector<std::string> one = muon, four = muon;
  one.insert(one.end(), {"--set", "run.dir=one"});
  four.insert(four.end(), {"--set", "run.dir=four"});
  train(folder_.path(), one);
  on(4, four);
  // One micro-batch a rank: the bits of one rank with four, but for the embedding (tests/multi/train.cpp).
  auto a = tensors_of("one"), b = tensors_of("four");
  for (const char* name : {"model.embed.weight", "optimizer.m.embed.weight", "optimizer.v.embed.weight"}) {
    EXPECT_EQ(a.erase(name), 1u);
    EXPECT_EQ(b.erase(name), 1u);
  }
  EXPECT_EQ(a, b);
  carry("four", "three", 3, muon);
  std::vector<std::string> experts = muon;
  experts.insert(experts.end(), {"--set", "parallel.expert=2"});
  carry("three", "spread", 4, experts);
}

TEST_F(Elastic, a_killed_rank_ends_the_job_and_the_same_layout_goes_on_to_the_bit) {
  use(std::string(kSharded) + "      checkpoint: {every: 2}\n");
  const std::vector<std::string> longer = {"--set", "stages.0.pretrain.steps=12"};
  std::vector<std::string> whole = longer;
  whole.insert(whole.end(), {"--set", "run.dir=whole"});
  on(4, whole);
  {
    Process job(folder_.path(), ranks_command(4, train_args(longer)));
    ASSERT_TRUE(wait_until([&] { return count_steps(dir("run"), "pretrain") >= 5; }));
    const auto ranks = job.children();
    ASSERT_EQ(ranks.size(), 4u);
    ::kill(ranks[2], SIGKILL);
    EXPECT_EQ(job.wait().code, 137);
  }
  EXPECT_FALSE(latest_checkpoint_of(dir("run")).empty());
  const Exit again = on(4, longer);
  EXPECT_NE(again.output.find("resuming from "), std::string::npos);
  expect_same_outcome(dir("run"), dir("whole"));
}

TEST_F(Elastic, a_signal_to_one_rank_saves_once_and_ends_all) {
  use(kSharded);
  const std::vector<std::string> longer = {"--set", "stages.0.pretrain.steps=12"};
  std::vector<std::string> whole = longer;
  whole.insert(whole.end(), {"--set", "run.dir=whole"});
  on(4, whole);
  Process job(folder_.path(), ranks_command(4, train_args(longer)));
  ASSERT_TRUE(wait_until([&] { return count_steps(dir("run"), "pretrain") >= 3; }));
  const auto ranks = job.children();
  ASSERT_EQ(ranks.size(), 4u);
  ::kill(ranks[3], SIGUSR1);
  const Exit exit = job.wait();
  EXPECT_EQ(exit.code, 75) << exit.errors;
  EXPECT_NE(exit.errors.find("stopped by signal 10"), std::string::npos) << exit.errors;
  EXPECT_EQ(checkpoints_of(dir("run")).size(), 1u);
  on(4, longer);
  expect_same_outcome(dir("run"), dir("whole"));
}

TEST_F(Elastic, a_run_of_four_goes_on_on_two_and_on_one_with_the_same_samples) {
  use(std::string(kSharded) + "      checkpoint: {every: 3}\n");
  for (const int ranks : {4, 2, 1}) {
    const std::string steps = std::to_string(ranks == 4 ? 3 : ranks == 2 ? 6 : 9);
    on(ranks, {"--set", "stages.0.pretrain.steps=" + steps, "--accept-changes"});
  }
  on(1, {"--set", "stages.0.pretrain.steps=9", "--set", "run.dir=one"});
  EXPECT_EQ(step_figures(dir("run"), "pretrain", "trained_tokens"),
            step_figures(dir("one"), "pretrain", "trained_tokens"));
  const auto a = step_figures(dir("run"), "pretrain", "loss"),
             b = step_figures(dir("one"), "pretrain", "loss");
  ASSERT_EQ(a.size(), 9u);
  ASSERT_EQ(b.size(), 9u);
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 0.02 * b[i]) << "step " << i;
}

}  // namespace
}  // namespace fp4t::test
