// `fp4train evaluate`: what a checkpoint is worth on files, as one JSON object (engine/stage/README.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/stage/benchmarks.h"

namespace fp4t {

struct EvaluateRequest {
  std::string checkpoint;
  std::string tokenizer;  // where the vocabulary's file is now; "": where the recipe says
  std::string table;      // pretrain.forward, rl.sampler or rl.trainer.forward; "": the first, of a run
                          // without pretraining the last
  std::string choices, prompts;  // files; "": not asked for
  TextFile text;
  int64_t context = 0;  // 0: model.max_positions
  int64_t stride = 0;   // 0: half the context
  ChoiceLayout layout;
  bool details = false;  // also what each question came out as
  std::vector<std::string> stop;
  int64_t max_tokens = 128;
  int64_t batch_tokens = 4096;
};

// Throws RecipeError, BadDataError and MissingInputError before anything is computed.
std::string evaluate_checkpoint(const EvaluateRequest& request);

}  // namespace fp4t
