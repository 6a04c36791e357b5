#include "engine/plan/modules.h"

#include "kernels/base/numeric.h"

namespace fp4t {

const char* name_of(Table t) {
  switch (t) {
    case Table::kPretrainForward:
      return "pretrain.forward";
    case Table::kPretrainBackward:
      return "pretrain.backward";
    case Table::kSampler:
      return "rl.sampler";
    case Table::kTrainerForward:
      return "rl.trainer.forward";
    case Table::kTrainerBackward:
      return "rl.trainer.backward";
  }
  return "?";
}

const char* name_of(Module m) {
  static constexpr const char* kNames[kNumModules] = {
      "attn.qkv",       "attn.out",    "mlp.gate_up", "mlp.down", "experts.gate_up", "experts.down",
      "shared.gate_up", "shared.down", "head",        "embed",    "kv_cache",        "dispatch"};
  return kNames[static_cast<size_t>(m)];
}

const char* name_of(GemmRole g) {
  return g == GemmRole::kFprop ? "fprop" : g == GemmRole::kDgrad ? "dgrad" : "wgrad";
}

const char* name_of(OperandRole o) {
  return o == OperandRole::kAct ? "act" : o == OperandRole::kWeight ? "weight" : "grad";
}

uint32_t site_id(int64_t layer, Module module, GemmRole gemm, OperandRole operand) {
  return narrow<uint32_t>(((layer * 64 + static_cast<int64_t>(module)) * 4 + static_cast<int64_t>(gemm)) * 4 +
                          static_cast<int64_t>(operand));
}

bool layer_has(const ModelSpec& model, int64_t layer, Module module) {
  switch (module) {
    case Module::kAttnQkv:
    case Module::kAttnOut:
      return true;
    case Module::kMlpGateUp:
    case Module::kMlpDown:
      return !is_moe_layer(model, layer);
    case Module::kExpertsGateUp:
    case Module::kExpertsDown:
      return is_moe_layer(model, layer);
    case Module::kSharedGateUp:
    case Module::kSharedDown:
      return is_moe_layer(model, layer) && model.moe.shared_experts > 0;
    case Module::kHead:
    case Module::kEmbed:
    case Module::kKvCache:
    case Module::kDispatch:
      return false;
  }
  return false;
}

bool model_has(const ModelSpec& model, Module module) {
  if (module == Module::kDispatch) return model_has(model, Module::kExpertsDown);
  if (!in_layers(module)) return true;
  for (int64_t l = 0; l < model.layers; ++l) {
    if (layer_has(model, l, module)) return true;
  }
  return false;
}

}  // namespace fp4t
