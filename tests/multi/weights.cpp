// Weights of folders on several ranks: what ranks share begins as one process has it, and what four of them
// trained, experts apart, is exported by one.
#include <filesystem>

#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

std::string golden() { return from_environment("FP4T_TEST_SOURCE") + "/tests/golden/hf/qwen3_moe"; }

std::string recipe(const std::string& learning_rate) {
  return "run: {name: continued, dir: run, threads: 1}\nmodel: {from: " + golden() + R"(}
stages:
  - pretrain:
      steps: 2
      batch: {tokens: 128, micro_sequences: 1, length: 32}
      data: [{name: sums, kind: sums, low: 0, high: 4}]
      optimizer: {learning_rate: )" +
         learning_rate + "}\n";
}

Exit must(const std::string& folder, const std::vector<std::string>& args) {
  const Exit e = run_binary(folder, args);
  EXPECT_EQ(e.code, 0) << e.errors;
  return e;
}

TEST(RanksWeights, every_layout_begins_with_the_folders_weights) {
  ScratchFolder folder;
  write_text(folder / "recipe.yaml", recipe("0"));
  must(folder.path(), {"import", "--from", golden(), "--to", "imported"});
  const auto imported = tensor_hashes_of(folder / "imported", "model.");
  ASSERT_FALSE(imported.empty());
  const std::vector<std::vector<std::string>> layouts = {
      {"2", "parallel.zero=1"}, {"4", "parallel.expert=4"}, {"4", "parallel.zero=3"}};
  int i = 0;
  for (const auto& layout : layouts) {
    const std::string run = "run" + std::to_string(++i);
    train_on(std::stoi(layout[0]), folder.path(), run, {"--set", layout[1]});
    EXPECT_EQ(tensor_hashes_of(latest_checkpoint_of(folder / run), "model."), imported) << layout[1];
  }
}

TEST(RanksWeights, what_four_ranks_trained_is_exported_by_one) {
  ScratchFolder folder;
  write_text(folder / "recipe.yaml", recipe("1e-2"));
  train_on(4, folder.path(), "run", {"--set", "parallel.expert=4"});
  must(folder.path(), {"export", "--checkpoint", "run", "--to", "out"});
  must(folder.path(), {"import", "--from", "out", "--to", "back"});
  const auto trained = tensor_hashes_of(latest_checkpoint_of(folder / "run"), "model.");
  EXPECT_EQ(trained, tensor_hashes_of(folder / "back", "model."));
  must(folder.path(), {"import", "--from", golden(), "--to", "untrained"});
  EXPECT_NE(trained, tensor_hashes_of(folder / "untrained", "model."));

  // Logits of 16 prompts, from the run's own checkpoint and from the export's.
  std::string prompts;
  for (int p = 0; p < 16; ++p) {
    for (int t = 0; t <= p; ++t) prompts += std::to_string((p * 31 + t * 7) % 257) + " ";
    prompts += "\n";
  }
  write_text(folder / "prompts.txt", prompts);
  for (const char* checkpoint : {"run", "back"}) {
    must(folder.path(), {"logits", "--checkpoint", checkpoint, "--tokens", "prompts.txt", "--to",
                         std::string(checkpoint) + ".logits"});
  }
  const std::string logits = read_text(folder / "run.logits");
  EXPECT_GT(logits.size(), 16u * 257 * 4);
  EXPECT_EQ(logits, read_text(folder / "back.logits"));
}

}  // namespace
}  // namespace fp4t::test
