// The optimizer's update and decoding: what costs the reading of weights.
#include <algorithm>
#include <cmath>

#include "engine/plan/operands.h"
#include "engine/plan/run_layout.h"
#include "engine/plan/work.h"

namespace fp4t {

namespace {

bool is_matrix(const ParamInfo& p) {
  return p.role == ParamRole::kGemmWeight || p.role == ParamRole::kExpertWeight;
}

// Newton-Schulz in FP32, matrix by matrix of what the rank owns: G = X X^T, G G, then a combination of both
// times X; m the shorter side.
double muon_flops(const ParamInfo& p, double elements, int64_t iterations) {
  const int last = p.shape.rank() - 1;
  const double m = real(std::min(p.shape[last - 1], p.shape[last])),
               n = real(std::max(p.shape[last - 1], p.shape[last]));
  return elements / (m * n) * real(iterations) * (4 * m * m * n + 2 * m * m * m);
}

void add_sums_over_ranks(const Plan& plan, WorkList& list) {
  double held = 0;
  for (const ParamInfo& p : plan.parameters) held += real(plan.shards.held(p, 0).count());
  // As many F32 values come as are held, and are added one after another: two reads, a write.
  list.push_back({Rate::kElementwise, Format::kBf16, 0, held * 12});
}

double touched_experts(const ModelDims& d, double tokens) {
  return real(d.local_experts) *
         (1 - std::pow(1 - real(d.top_k) / real(d.experts), tokens * real(d.expert_ranks)));
}

}  // namespace

void add_update(const Plan& plan, const OptimizerSpec& spec, WorkList& list) {
  if (plan.shards.is_sharded()) add_sums_over_ranks(plan, list);
  double norm = 0, update = 0, muon = 0;
  const double share = plan.shards.is_sharded() ? real(plan.shards.largest_owned()) : 0;
  const double all = real(total_parameters(plan.parameters));
  for (const ParamInfo& p : plan.parameters) {
    // Pieces are nearly equal, so each parameter counts by the rank's share of all.
    const double owned = real(p.shape.elements()) * (share > 0 ? share / all : 1);
    const double master = real(dtype_bytes(master_dtype(p, plan.dtypes)));
    const double moment =
        real(dtype_bytes(master_dtype(p, {plan.dtypes.moments, plan.dtypes.moments, DType::kF32})));
    const double gradient = real(dtype_bytes(p.gradient));
    const bool by_muon = spec.kind == "muon" && is_matrix(p);
    norm += owned * gradient;
    update += owned * (2 * master + (by_muon ? 2 : 4) * moment + gradient + (has_copy(p, plan) ? 2 : 0));
    if (by_muon) muon += muon_flops(p, owned, spec.muon_iterations);
  }
  list.push_back(
      {Rate::kElementwise, Format::kBf16, 0, norm, real(static_cast<int64_t>(plan.parameters.size()))});
  list.push_back(
      {Rate::kAdamw, Format::kBf16, 0, update, real(static_cast<int64_t>(plan.parameters.size()))});
  if (muon > 0) list.push_back({Rate::kDense, Format::kFp32, muon, 0});
}

void add_decode(const WorkCall& call, WorkList& list) {
  const Plan& plan = call.plan;
  const ModelDims d = dims_of(plan);
  const double rows = real(call.tokens), a = real(dtype_bytes(d.act));
  const auto weights = [&](const GemmSite& site, double matrices) {
    const QuantSpec& w = call.tables.forward->cell(site.layer, site.module).weight;
    const double elements = matrices * real(site.out) * real(site.in);
    const double site_rows = rows * real(site.groups > 0 ? d.top_k : 1);
    const double per_element = w.format == Format::kNvfp4 ? 0.5625 : w.format == Format::kMxfp8 ? 1.03125 : a;
    const bool few = site.groups == 0 || site_rows * real(d.expert_ranks) <= 4 * real(d.experts);
    const Rate rate = w.format != Format::kNvfp4 ? Rate::kFewRows
                      : few                      ? Rate::kFewCodedRows
                                                 : Rate::kSomeCodedRows;
    list.push_back(
        {rate, Format::kBf16, 2 * site_rows * real(site.out) * real(site.in), elements * per_element});
  };
  const double cached = call.tables.forward->kv_cache == Format::kMxfp8 ? 1.03125 : a;
  for (int64_t l = 0; l < d.layers; ++l) {
    for (int m = 0; m < kNumGemmModules; ++m) {
      const auto module = static_cast<Module>(m);
      if (!layer_has(plan.model, l, module)) continue;
      const GemmSite site = site_of(d, l, module);
      weights(site, site.groups > 0 ? touched_experts(d, rows) : 1);
    }
    list.push_back(
        {Rate::kCachedAttention, Format::kBf16, 0, rows * real(call.length * 2 * d.kv_width) * cached});
    // Norms, rotary embedding, append, SwiGLU; router, choice, combination.
    const double small = is_moe_layer(plan.model, l) ? 9 : 5;
    list.push_back({Rate::kElementwise, Format::kBf16, 0, rows * real(d.hidden) * a * small, small});
  }
  weights(site_of(d, d.layers, Module::kHead), 1);
  list.push_back(
      {Rate::kLoss, Format::kBf16, 0, rows * real(d.vocabulary) * 8, 3});  // last norm, logits, draw
}

double seconds_of(const OpWork& op, const MachineSpec& machine) {
  double computing = 0, moving = 0;
  const bool product = op.rate <= Rate::kRouter;
  if (op.flops > 0) {
    const double share = product ? machine.share(op.rate) : machine.share(Rate::kDense);
    const bool cool = op.of_codes || op.rate == Rate::kRouter;
    const double kept = cool ? 1 : machine.sustained.value;
    computing = op.flops / (machine.peak(op.format) * share * kept);
  }
  if (op.bytes > 0) moving = op.bytes / (machine.memory_bytes_s() * (product ? 1 : machine.share(op.rate)));
  return std::max(computing, moving);
}

}  // namespace fp4t
