#include "engine/recipe/presets.h"

#include <map>

#include "engine/recipe/bind.h"
#include "engine/recipe/tables.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

// fp32 is legal only when every cell has it, so the modules that default to bf16 are named too.
const char* const kFp32 = R"(
pretrain.forward:
  - {module: [embed, dispatch], format: fp32}
  - {module: "*", format: fp32}
pretrain.backward:
  - {module: "*", format: fp32}
rl.sampler:
  - {module: [embed, kv_cache, dispatch], format: fp32}
  - {module: "*", format: fp32}
rl.trainer.forward:
  - {module: [embed, dispatch], format: fp32}
  - {module: "*", format: fp32}
rl.trainer.backward:
  - {module: "*", format: fp32}
)";

const char* const kBf16 = R"(
pretrain.forward:
  - {module: "*", format: bf16}
pretrain.backward:
  - {module: "*", format: bf16}
rl.sampler:
  - {module: "*", format: bf16}
rl.trainer.forward:
  - {module: "*", format: bf16}
rl.trainer.backward:
  - {module: "*", format: bf16}
)";

const char* const kMxfp8 = R"(
pretrain.forward:
  - {module: head, format: bf16}
  - {module: "*", format: mxfp8}
pretrain.backward:
  - {module: head, format: bf16}
  - {module: "*", format: mxfp8}
rl.sampler:
  - {module: head, format: bf16}
  - {module: "*", format: mxfp8}
rl.trainer.forward:
  - {module: head, format: bf16}
  - {module: "*", format: mxfp8}
rl.trainer.backward:
  - {module: head, format: bf16}
  - {module: "*", format: mxfp8}
)";

// NUMERICS.md section 1.3: 16x16 weights, stochastic gradients, rotation in wgrad alone.
const char* const kNvidiaNvfp4 = R"(
pretrain.forward: &forward
  - {module: head, format: bf16}
  - {module: "*", operand: act, format: nvfp4}
  - {module: "*", operand: weight, format: nvfp4, block: 16x16}
pretrain.backward: &backward
  - {module: head, format: bf16}
  - {module: "*", gemm: dgrad, operand: grad, format: nvfp4, rounding: stochastic}
  - {module: "*", gemm: dgrad, operand: weight, format: nvfp4, block: 16x16}
  - {module: "*", gemm: wgrad, operand: grad, format: nvfp4, rounding: stochastic, hadamard: 16, hadamard_out: bf16}
  - {module: "*", gemm: wgrad, operand: act, format: nvfp4, hadamard: 16, hadamard_out: bf16}
rl.sampler: *forward
rl.trainer.forward: *forward
rl.trainer.backward: *backward
)";

// In the RL tables row scope asks for pow2, because the backward reuses the forward's values.
const char* const kQuartet2 = R"(
pretrain.forward:
  - {module: head, format: bf16}
  - {module: "*", format: nvfp4, scale_rule: four_over_six}
pretrain.backward: &backward
  - {module: head, format: bf16}
  - {module: "*", format: nvfp4, rounding: ms_eden, hadamard: 128, signs: fresh, source: forward}
rl.sampler: &rl_forward
  - {module: head, format: bf16}
  - {module: "*", operand: act, format: nvfp4, scale_rule: four_over_six, scale_scope: row, scale_round: pow2}
  - {module: "*", operand: weight, format: nvfp4, scale_rule: four_over_six}
rl.trainer.forward: *rl_forward
rl.trainer.backward: *backward
)";

const char* const kRlNvfp4 = R"(
pretrain.forward: &forward
  - {module: "experts.*", operand: act, format: nvfp4, scale_rule: four_over_six, scale_scope: row, scale_round: pow2}
  - {module: "experts.*", operand: weight, format: nvfp4, scale_rule: four_over_six, scale_round: pow2}
  - {module: "*", format: bf16}
pretrain.backward: &backward
  - {module: "experts.*", format: bf16, source: forward}
  - {module: "*", format: bf16}
rl.sampler: *forward
rl.trainer.forward: *forward
rl.trainer.backward: *backward
)";

const std::map<std::string, const char*>& preset_texts() {
  static const std::map<std::string, const char*> texts = {
      {"fp32", kFp32},         {"bf16", kBf16},       {"mxfp8", kMxfp8}, {"nvidia_nvfp4", kNvidiaNvfp4},
      {"quartet2", kQuartet2}, {"rl_nvfp4", kRlNvfp4}};
  return texts;
}

}  // namespace

const std::vector<std::string>& preset_names() {
  static const std::vector<std::string> names = {"fp32",         "bf16",     "mxfp8",
                                                 "nvidia_nvfp4", "quartet2", "rl_nvfp4"};
  return names;
}

void append_preset(const std::string& name, PrecisionSpec& precision) {
  Problems problems;
  const YamlPtr tree = parse_yaml(preset_texts().at(name), "preset " + name, problems);
  FP4T_CHECK(tree != nullptr, "preset ", name);
  PrecisionSpec preset = bind_precision(*tree, problems);
  problems.throw_if_any();
  for (size_t t = 0; t < kNumRecipeTables; ++t) {
    for (size_t i = 0; i < preset.tables[t].size(); ++i) {
      RuleSpec& rule = preset.tables[t][i];
      rule.from_preset = true;
      rule.path = "preset " + name + ", " + kTableNames[t] + "[" + std::to_string(i) + "]";
      rule.place = SourcePlace{};
      precision.tables[t].push_back(std::move(rule));
    }
  }
}

}  // namespace fp4t
