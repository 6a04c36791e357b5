// One small job in many layouts: its recipe, and what two layouts must have in common.
#pragma once

#include <map>
#include <string>

#include "tests/support/runs.h"

namespace fp4t::test {

// Eight sequences a step, every one of them with random bits of its own; `micro_sequences` a micro-batch.
inline std::string spread_pretraining(int micro_sequences, const std::string& keys = "") {
  return kTinyTables + std::string(R"(stages:
  - pretrain:
      steps: 7
      batch: {tokens: 256, micro_sequences: )") +
         std::to_string(micro_sequences) + R"(, length: 32}
      data:
        - {name: words, kind: text, paths: text, separator: "%", weight: 0.3, held_out: {fraction: 0.1, seed: 7}}
        - {name: sums, kind: sums, low: 0, high: 4, end_of_document: false, weight: 0.7,
           held_out: {fraction: 0.2, seed: 7}}
      optimizer: {learning_rate: 2e-2, weight_decay: 0.1}
      schedule: {kind: constant}
      eval: {every: 4, tokens: 256, prompts: ["1+2="], max_tokens: 4}
)" + keys;
}

// Reinforcement learning without pretraining, so that every layout begins with the same weights. Answers have
// one digit: some are right.
inline std::string spread_rl(const std::string& preset, int steps) {
  return tiny_model("name: rl, dir: run, seed: 5", "  max_positions: 32\n  init: {std: 0.3}\n",
                    ", balance: {bias_rate: 0.01, z_loss: 0.001}") +
         "precision: {preset: " + preset + R"(}
stages:
  - rl:
      steps: )" +
         std::to_string(steps) + R"(
      task: {kind: sums, low: 0, high: 4, held_out: {fraction: 0.2, seed: 7}}
      sampling: {prompts: 6, samples: 4, max_tokens: 4, max_batch: 8, end_tokens: ["\n", "<eod>"]}
      objective: {kl: 0.02, mini_batches: 2, micro_tokens: 64, drop_zero_advantage: false}
      optimizer: {learning_rate: 1e-3}
      eval: {task: {kind: sums, low: 0, high: 4, held_out: {fraction: 0.2, seed: 7}}, max_tokens: 4}
)";
}

// Hashes of all tensors of a checkpoint.
inline std::map<std::string, std::string> tensors_in(const std::string& checkpoint) {
  auto hashes = tensor_hashes_of(checkpoint, "model.");
  const auto moments = tensor_hashes_of(checkpoint, "optimizer.");
  hashes.insert(moments.begin(), moments.end());
  EXPECT_GT(hashes.size(), 30u);
  return hashes;
}

// Of the last checkpoint, without the embedding's: its gradient is added token by token over all
// micro-batches, on several ranks micro-batch by micro-batch.
inline std::map<std::string, std::string> without_embedding(const std::string& run_dir) {
  auto hashes = tensors_in(latest_checkpoint_of(run_dir));
  for (const char* name : {"model.", "optimizer.m.", "optimizer.v."}) {
    EXPECT_EQ(hashes.erase(std::string(name) + "embed.weight"), 1u);
  }
  return hashes;
}

}  // namespace fp4t::test
