// Weights of Hugging Face folders (config.json, *.safetensors) into a model in memory, and back by name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/params.h"
#include "engine/recipe/huggingface_config.h"

namespace fp4t {

// Fills masters and their copies from the folder's tensors; selection biases become zero. Every tensor of
// both sides must find its partner (BadDataError with file and tensor), and the plan's model must be the
// folder's (RecipeError with every differing key). The caller says weights_changed() to the model.
void import_weights(Queue& queue, const std::string& folder, const Plan& plan, ParamSet& params);
// What it would say of names, shapes and sizes, before anything is allocated; values are not read.
void check_weights(const std::string& folder, const Plan& plan);

// One tensor under the library's in-memory name, widened to FP32.
struct NamedHostTensor {
  std::string name;  // "model.layers.0.mlp.experts.gate_up_proj"
  std::vector<int64_t> dims;
  std::vector<float> values;
};

enum class Exported : uint8_t { kWeights, kGradients };

// Our parameters as the library's: q, k and v split, gate and up of dense layers split, experts stacked.
std::vector<NamedHostTensor> export_named(Queue& queue, const Plan& plan, ParamSet& params, Exported what);

}  // namespace fp4t
