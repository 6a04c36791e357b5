// One linear layer of a model with everything around it that a Linear needs.
#pragma once

#include <memory>
#include <string>

#include "engine/model/linear.h"
#include "engine/plan/operands.h"
#include "engine/plan/run_layout.h"
#include "tests/support/model_runs.h"

namespace fp4t::test {

struct LinearBench {
  static constexpr int64_t kTokens = 70;

  LinearBench(const TestCells& cells, Module module, const ModelSpec& model = one_moe_layer())
      : plan(make_plan_by_hand(model, cells)),
        dims(dims_of(plan)),
        queue(Queue::cpu(2)),
        arena(queue, "run", int64_t{1} << 24, Poison::kNan),
        scratch(queue, "scratch", int64_t{1} << 24, Poison::kNan),
        params(arena, plan) {
    params.initialise(queue, plan);
    for (const GemmSite& s : gemm_sites(plan)) {
      if (s.module == module) site = s;
    }
    weight = &params.find("layers." + std::to_string(site.layer) + "." + name_of(module) + ".weight");
    stats = arena.take("stats", DType::kF64, {kOperandsPerSite, kNumQuantStats});
    queue.fill_bytes(stats.data, 0, stats.bytes());
    queue.fill_bytes(weight->gradient.data, 0, weight->gradient.bytes());
    linear = std::make_unique<Linear>(plan, site, *weight, arena, stats);
    all_offsets = arena.take("offsets", DType::kI32, {site.matrices() + 1});
    // Uneven groups, the second without tokens.
    for (int64_t g = 0; g <= site.matrices(); ++g) {
      all_offsets.as<int32_t>()[g] = static_cast<int32_t>(g == site.matrices() ? kTokens
                                                          : g == 0             ? 0
                                                          : g < 3              ? 17
                                                                               : 17 + 9 * (g - 2));
    }
    pass.forward = &plan.stages[0].precision.forward.spans[0].table;
    pass.backward = &plan.stages[0].precision.backward.spans[0].table;
    pass.seed = 9;
  }

  static ModelSpec one_moe_layer() {
    ModelSpec m = tiny_model();
    m.layers = 1;
    m.moe.dense_layers = 0;
    return m;
  }

  TensorView random(const char* name, const Shape& shape, uint64_t seed) {
    HostTensor host(plan.act, shape);
    fill_normal(host, seed);
    const TensorView v = arena.take(name, plan.act, shape);
    queue.copy_from_host(v.data, host.view().data, v.bytes());
    return v;
  }

  Call call() { return {queue, scratch, dims, pass, true, kTokens, {}, {}, {}, {}, {}}; }
  TensorView offsets() const { return site.groups > 0 ? all_offsets : TensorView{}; }
  // First row of a group; of a layer without experts the only group is everything.
  int64_t group_begin(int64_t g) const {
    return site.groups > 0 ? all_offsets.as<int32_t>()[g] : g == 0 ? 0 : kTokens;
  }
  int64_t group_of(int64_t token) const {
    int64_t g = 0;
    while (site.groups > 0 && all_offsets.as<int32_t>()[g + 1] <= token) ++g;
    return g;
  }
  // W[g][o][i] as products read it.
  double w(int64_t g, int64_t o, int64_t i) const {
    return gradient_element(operand_of(*weight), (g * site.out + o) * site.in + i);
  }

  Plan plan;
  ModelDims dims;
  Queue queue;
  Arena arena, scratch;
  ParamSet params;
  GemmSite site{};
  Param* weight = nullptr;
  TensorView stats, all_offsets;
  std::unique_ptr<Linear> linear;
  Pass pass;
};

}  // namespace fp4t::test
