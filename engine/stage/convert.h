// Weights between Hugging Face folders and checkpoints: `fp4train import`, `export` and `logits`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/store/export_folder.h"

namespace fp4t {

struct ImportRequest {
  std::string from, to;
  bool replace = false;
  bool no_tokenizer = false;  // texts are numbers of tokens; else the folder's, where it has one
};

// Writes the folder's weights as a checkpoint at step 0 of a recipe that names the model and one step on
// random data; masters in FP32. Returns a line that says what was written. Throws RecipeError when `to` is
// there and is not to be replaced; BadDataError with file and tensor, or what of config.json or of the
// tokenizer's file cannot be taken.
std::string import_checkpoint(const ImportRequest& request);

struct ExportRequest {
  std::string checkpoint;
  std::string to;
  ExportOptions options;
  std::string table;      // whose codes a layout of codes holds; "": rl.sampler
  std::string preset;     // of these tables; "": the checkpoint's own
  std::string calibrate;  // a text for the scales of activations; "": the recipe's data
};

// Writes a checkpoint's weights as a folder, on one rank, however many trained. Where options.source has the
// file of the recipe's tokenizer, it must be that tokenizer. Returns lines that say what was written. Throws
// RecipeError for what has no effect in the layout.
std::string export_checkpoint(const ExportRequest& request);

// Logits of token sequences in FP32 throughout (preset fp32), each by itself: `tokens` is a file with the
// numbers of one sequence a line, `to` a safetensors file with `logits.<line>` F32 [tokens, vocabulary],
// lines from 0.
void write_logits(const std::string& checkpoint, const std::string& tokens, const std::string& to);

}  // namespace fp4t
