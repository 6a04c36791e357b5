#include "engine/plan/run_layout.h"

#include <algorithm>

#include "kernels/base/arena.h"
#include "kernels/base/numeric.h"

namespace fp4t {

int64_t round_elements(const Plan& plan, const ShardRow& row) {
  // Links between GPUs reach their rate with messages of tens of megabytes.
  const int64_t all_others = int64_t{plan.machine.backend == Backend::kCuda ? 64 : 16} << 20;
  return std::min(row.largest_piece(),
                  std::max(kNormChunk, all_others / std::max<int64_t>(row.members() - 1, 1)));
}

int64_t exchange_elements(const Plan& plan) {
  if (!plan.shards.is_sharded()) return 0;
  const auto of = [&](const ShardRow& row) { return (row.members() - 1) * round_elements(plan, row); };
  const int64_t everywhere = of(plan.shards.everywhere());
  return plan.shards.spreads_experts() ? std::max(everywhere, of(plan.shards.experts(0))) : everywhere;
}

SharedPlaces shared_places(const Plan& plan, int64_t rank) {
  SharedPlaces s;
  int64_t layer = -1, copies = 0, gradients = 0;
  for (const ParamInfo& p : plan.parameters) {
    if (p.layer != layer) {
      layer = p.layer;
      copies = gradients = 0;
    }
    const int64_t elements = plan.shards.held(p, rank).count();
    const auto place = [&](bool has, DType dtype, int64_t& next, int64_t& most) {
      if (!has) return int64_t{-1};
      const int64_t at = next;
      next += Arena::block_bytes(elements * dtype_bytes(dtype));
      most = std::max(most, next);
      return at;
    };
    s.copies.push_back(place(has_shared_copy(p, plan), plan.act, copies, s.copies_bytes));
    s.gradients.push_back(place(has_shared_gradient(p, plan), p.gradient, gradients, s.gradients_bytes));
  }
  return s;
}

int64_t norm_chunks(const Plan& plan) {
  int64_t n = 0;
  for (const ParamInfo& p : plan.parameters) {
    const int64_t matrix = matrix_elements(p);
    n += p.shape.elements() / matrix * ceil_div(matrix, kNormChunk);
  }
  return n;
}

int64_t num_moe_layers(const ModelSpec& model) {
  int64_t n = 0;
  for (int64_t l = 0; l < model.layers; ++l) n += is_moe_layer(model, l) ? 1 : 0;
  return n;
}

}  // namespace fp4t
