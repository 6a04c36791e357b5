#include "engine/recipe/validate.h"

namespace fp4t {

bool uses_fp32(const PrecisionSpec& precision) {
  for (const auto& table : precision.tables) {
    for (const RuleSpec& rule : table) {
      if (rule.spec.format == Format::kFp32) return true;
    }
  }
  return false;
}

void resolve_defaults(BoundRecipe& bound) {
  Recipe& r = bound.recipe;
  if (r.run.dir.empty()) r.run.dir = "runs/" + r.run.name;
  if (r.model.moe.shared_experts > 0 && r.model.moe.shared_hidden == 0) {
    r.model.moe.shared_hidden = r.model.moe.hidden;
  }
  // Under the fp32 format gradients are FP32 (DESIGN.md section 4); bf16 as written is a contradiction.
  if (uses_fp32(r.precision) && !bound.gave("dtypes.gradients")) r.dtypes.gradients = DType::kF32;
  for (StageSpec& stage : r.stages) {
    if (auto* rl = std::get_if<RlSpec>(&stage)) {
      ObjectiveSpec& o = rl->objective;
      if (o.average == "constant" && o.average_tokens == 0) o.average_tokens = rl->sampling.max_tokens;
    }
    if (auto* pretrain = std::get_if<PretrainSpec>(&stage)) {
      for (DataSourceSpec& source : pretrain->data) {
        if (source.name.empty()) source.name = source.kind;
      }
    } else {
      for (RewardSpec& reward : std::get<RlSpec>(stage).rewards) {
        if (reward.name.empty()) reward.name = reward.kind;
      }
    }
  }
}

void validate_recipe(const BoundRecipe& bound, Problems& problems) {
  Check check(bound, problems);
  validate_model(check);
  validate_precision(check);
  validate_stages(check);
  validate_held_out(check);
}

}  // namespace fp4t
