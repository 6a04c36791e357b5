// Which modules a model has, and where: the cells of the precision table that exist. Modules outside the
// layers (head, embed, kv_cache, dispatch) have one cell each and no layer.
#pragma once

#include "engine/plan/parameters.h"
#include "engine/plan/precision.h"

namespace fp4t {

inline constexpr int kNumModules = 12;

constexpr bool is_gemm_module(Module m) { return static_cast<int>(m) < kNumGemmModules; }
constexpr bool in_layers(Module m) { return static_cast<int>(m) < static_cast<int>(Module::kHead); }
constexpr bool is_forward(Table t) {
  return t == Table::kPretrainForward || t == Table::kSampler || t == Table::kTrainerForward;
}

bool layer_has(const ModelSpec& model, int64_t layer, Module module);
bool model_has(const ModelSpec& model, Module module);

}  // namespace fp4t
