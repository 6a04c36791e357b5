// Every parameter once: name, shape, role, where it lives. Weights of a linear layer are [out, in];
// experts [E, out, in]. q, k and v are one matrix, gate and up are one matrix (gate rows first).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/precision.h"
#include "engine/recipe/recipe.h"
#include "kernels/base/tensor.h"

namespace fp4t {

enum class ParamRole : uint8_t {
  kEmbedding,     // [V, D]
  kGemmWeight,    // [out, in]
  kExpertWeight,  // [E, out, in]
  kNorm,          // [n], used in FP32
  kRouter,        // [E, D], used in FP32
};

// Axis table of DESIGN.md section 6: over which ranks a parameter is split or replicated.
enum class Placement : uint8_t { kReplicated, kSplitByExpert };

struct ParamInfo {
  std::string name;  // "layers.3.experts.gate_up.weight", "embed.weight", "norm.weight", "head.weight"
  Shape shape;
  ParamRole role = ParamRole::kGemmWeight;
  Module module = {};  // of kGemmWeight and kExpertWeight
  int64_t layer = -1;  // -1: none
  Placement placement = Placement::kReplicated;
  bool weight_decay = false;     // matrices
  bool residual_out = false;     // attn.out and *.down: init scaled by depth
  DType gradient = DType::kF32;  // of the gradient buffer; the plan widens it where micro-batches accumulate
  uint32_t tensor_id = 0;        // index in the list: keys its random bits
};

// Non-trained state that belongs to the weights: "layers.3.router.bias" F32 [E].
struct BufferInfo {
  std::string name;
  Shape shape;
  DType dtype = DType::kF32;
};

std::vector<ParamInfo> parameter_list(const ModelSpec& model, const DtypesSpec& dtypes);
std::vector<BufferInfo> buffer_list(const ModelSpec& model);
int64_t total_parameters(const std::vector<ParamInfo>& list);
// Parameters that a token passes through: top_k of the experts, the embedding look-up left out.
int64_t active_parameters(const std::vector<ParamInfo>& list, const ModelSpec& model);

bool is_moe_layer(const ModelSpec& model, int64_t layer);
// FFN width of the shared experts together.
int64_t shared_width(const ModelSpec& model);

}  // namespace fp4t
