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
