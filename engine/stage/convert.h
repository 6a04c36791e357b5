// Weights between Hugging Face folders and checkpoints: `fp4train import`, `export` and `logits`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/transformer.h"
#include "engine/recipe/recipe.h"
#include "engine/store/checkpoint.h"
#include "engine/store/export_folder.h"

namespace fp4t {

// Writes the folder's weights as a checkpoint at step 0 of a recipe that names the model and one step on
// random data; masters in FP32. Returns a line that says what was written. Throws RecipeError when `to` is
// there and is not to be replaced; BadDataError with file and tensor.
std::string import_checkpoint(const std::string& from, const std::string& to, bool replace);

struct ExportRequest {
  std::string checkpoint;
  std::string to;
  ExportOptions options;
  std::string table = "rl.sampler";  // whose codes a low-precision layout holds
  std::string preset;                // of these tables; "": the checkpoint's own
  std::string calibrate;             // a text for the scales of activations; "": the recipe's data
};

// Writes a checkpoint's weights as a folder, on one rank, however many trained. Returns lines that say what
// was written.
std::string export_checkpoint(const ExportRequest& request);

// Logits of token sequences in FP32 throughout (preset fp32), each by itself: `tokens` is a file with the
// numbers of one sequence a line, `to` a safetensors file with `logits.<line>` F32 [tokens, vocabulary],
// lines from 0.
void write_logits(const std::string& checkpoint, const std::string& tokens, const std::string& to);

// Fills a model's weights and biases from a checkpoint of it.
void load_weights(Queue& queue, const std::string& checkpoint, Transformer& model);

// The recipe inside a checkpoint, for one process that reads its weights.
Recipe recipe_of_checkpoint(const CheckpointInfo& info, std::vector<std::string> overrides);

}  // namespace fp4t
