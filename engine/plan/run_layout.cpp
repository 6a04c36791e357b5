#include "engine/plan/run_layout.h"

#include <algorithm>

#include "kernels/base/arena.h"
#include "kernels/base/numeric.h"

namespace fp4t {

RowDomains row_domains(const Plan& plan, const ShardRow& row) {
  const int64_t ranks = plan.axes.ranks(), domain = plan.parallel.domain;
  const RowDomains one = {row.members(), 1};
  if (domain == 0 || domain >= ranks) return one;
  // Of ranks that share experts, one in `expert` has the same ones.
  const int64_t size = row.members() == ranks ? domain : domain / plan.axes.expert;
  return size > 1 && row.members() > size ? RowDomains{size, row.members() / size} : one;
}

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

namespace {
int64_t owned_chunks(const Plan& plan, const ShardRow& row, int64_t member) {
  int64_t n = 0;
  for (size_t s = 0; s < row.segments(); ++s) {
    row.for_parts(row.piece(s, member), [&](size_t p, const Span& elements) {
      const SumSquaresChunks chunks{{}, 0, matrix_elements(plan.parameters[p]), {}};
      n += chunks.chunk_at(elements.end) - chunks.chunk_at(elements.begin);
    });
  }
  return n;
}
}  // namespace

int64_t most_owned_chunks(const Plan& plan) {
  int64_t most = 0;
  for (int64_t rank = 0; rank < plan.axes.ranks(); ++rank) {
    int64_t n = owned_chunks(plan, plan.shards.everywhere(), rank);
    if (plan.shards.spreads_experts()) {
      n += owned_chunks(plan, plan.shards.experts(plan.axes.expert_index(rank)), plan.axes.data_index(rank));
    }
    most = std::max(most, n);
  }
  return most;
}

int64_t num_moe_layers(const ModelSpec& model) {
  int64_t n = 0;
  for (int64_t l = 0; l < model.layers; ++l) n += is_moe_layer(model, l) ? 1 : 0;
  return n;
}

}  // namespace fp4t
