// The model of a checkpoint, for commands that train nothing: the recipe inside it, its tokenizer, its
// weights, on one rank however many trained.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/model/transformer.h"
#include "engine/plan/plan.h"
#include "engine/store/checkpoint.h"
#include "engine/tokens/tokenizer.h"

namespace fp4t {

// The recipe inside a checkpoint, for one process that reads its weights.
Recipe recipe_of_checkpoint(const CheckpointInfo& info, std::vector<std::string> overrides);

// The table in force at a checkpoint's step: rl.sampler, pretrain.forward (in an RL stage as it stood at the
// end of the pretraining before it) or rl.trainer.forward. Throws RecipeError for a table that no stage so
// far has.
const ForwardTable& table_in_force(const Plan& plan, const RunState& state, const std::string& name);

// Fills a model's weights and biases from a checkpoint of it.
void load_weights(Queue& queue, const std::string& checkpoint, Transformer& model);

// What is known before anything is allocated; whoever computes sizes the plan first.
struct CheckpointModel {
  // A checkpoint, or a run folder: its latest. `tokenizer_path`: where the vocabulary's file is now; "":
  // where the recipe says. Throws MissingInputError, BadDataError, RecipeError.
  explicit CheckpointModel(const std::string& checkpoint, const std::string& tokenizer_path = {});

  std::string path;
  CheckpointInfo info;
  Machine machine;
  Plan plan;
  std::unique_ptr<Tokenizer> tokenizer;

  // Of the table in force of that name and keys as the run had them; a stream of samples begins anew.
  Pass pass(const std::string& table) const;
};

// The weights in a model that is as large as the plan says.
struct LoadedModel {
  explicit LoadedModel(const CheckpointModel& source);
  Queue queue;
  std::unique_ptr<Communicator> comm;
  Transformer model;
};

}  // namespace fp4t
