#include "engine/plan/step_layout.h"

#include <algorithm>

namespace fp4t {

Keep keep_for_backward(const ParallelSpec& parallel) {
  return parallel.recompute == "block" ? Keep::kInputs : Keep::kAll;
}

bool head_gradient_is_whole(const Plan& plan) {
  const auto plain = [&](const TablePair& tables, GemmRole gemm, OperandRole operand) {
    const GemmSite site = site_of(dims_of(plan), plan.model.layers, Module::kHead);
    const OperandForm form = operand_form(gemm, operand, tables.forward->cell(site.layer, site.module),
                                          &tables.backward->cell(site.layer, site.module));
    return !form.spec.quantised() && !form.from_forward;
  };
  for (const TablePair& tables : table_pairs(plan)) {
    if (!tables.backward) continue;
    for (const GemmRole gemm : {GemmRole::kDgrad, GemmRole::kWgrad}) {
      const OperandRole other = gemm == GemmRole::kDgrad ? OperandRole::kWeight : OperandRole::kAct;
      if (!plain(tables, gemm, OperandRole::kGrad) || !plain(tables, gemm, other)) return true;
    }
  }
  return false;
}

int64_t token_block_rows(const Plan& plan) {
  return std::max<int64_t>({plan.max_tokens, plan.max_decode_tokens, plan.max_cache_slots, 1});
}

int64_t recorded_routers(const Plan& plan) {
  const bool any = std::any_of(plan.stages.begin(), plan.stages.end(), [](const StagePlan& s) {
    return s.is_rl && std::get<RlSpec>(s.spec).objective.router_replay != "off";
  });
  int64_t layers = 0;
  for (int64_t l = 0; any && l < plan.model.layers; ++l) layers += is_moe_layer(plan.model, l);
  return layers;
}

}  // namespace fp4t
