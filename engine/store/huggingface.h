// Weights of Hugging Face folders (config.json, *.safetensors): families qwen3_moe and llama.
#pragma once

#include <string>

#include "engine/model/params.h"
#include "engine/recipe/recipe.h"

namespace fp4t {

// The model keys that config.json implies (layers, hidden, heads, RoPE, MoE, tying, vocabulary).
// Throws BadDataError for parts that we do not have, by name.
ModelSpec model_from_config(const std::string& folder);

// Fills masters from the folder's tensors. Every tensor of both sides must find its partner.
void import_weights(Queue& queue, const std::string& folder, const Plan& plan, ParamSet& params);

// Our gradient or weight name -> the library's in-memory name ("model.layers.0.mlp.experts.gate_up_proj"),
// with fused q/k/v split: see huggingface.cpp.
}  // namespace fp4t
