// config.json of Hugging Face folders: the families qwen3, qwen3_moe, mixtral and llama, and the model keys
// that they imply. What the library would compute must be ours in full: anything else is refused by its key.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"

namespace fp4t {

enum class Family : uint8_t { kQwen3, kQwen3Moe, kMixtral, kLlama };
const char* model_type_of(Family family);    // "qwen3_moe"
const char* architecture_of(Family family);  // "Qwen3MoeForCausalLM"

// The model keys that config.json implies (layers, hidden, heads, RoPE, MoE, tying, vocabulary). Balance,
// init and `from` keep their defaults: they say how to train, not what the model computes.
// Throws MissingInputError; BadDataError for parts that we do not have, by name.
ModelSpec model_from_config(const std::string& folder);

// One key of a recipe with its value as YAML text.
struct ImpliedKey {
  std::string path, value;  // "model.rope.theta"
  bool must_agree;          // false: a recipe may say otherwise (max_positions)
};
std::vector<ImpliedKey> implied_keys(const ModelSpec& model);

// The recipe's keys of the section `tokenizer` that read the folder's own; "" where the folder has none.
struct FolderTokenizer {
  std::string kind, path;
};
FolderTokenizer tokenizer_of_folder(const std::string& folder);

}  // namespace fp4t
