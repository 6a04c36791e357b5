// Names of one parameter in the library. Each of its tensors is a contiguous piece of ours: rows of
// attn.qkv, or the gate or up half of one expert.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/parameters.h"
#include "engine/recipe/huggingface_config.h"

namespace fp4t {

// How a layer's experts are stored: a tensor each, or all in one. Both occur for the same model_type, so
// the names decide. Mixtral's router is called otherwise beside stacked experts.
enum class ExpertLayout : uint8_t { kSeparate, kStacked };

struct LibraryPiece {
  std::string name;
  std::vector<int64_t> dims;
  int64_t offset;  // elements, in our tensor
  int64_t elements() const;
};

// The family that has a model's parts, by its shape: experts or none, QK-norm or none.
Family family_of(const ModelSpec& model);

// Throws BadDataError for parameters that no family has (shared experts).
std::vector<LibraryPiece> library_pieces(const ParamInfo& info, const ModelSpec& model, ExpertLayout layout);

}  // namespace fp4t
