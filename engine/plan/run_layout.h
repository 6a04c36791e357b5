// What the run arena holds: parameters and what ranks share of them, exchanges between ranks, state. As in
// step_layout.h, one description that engine/plan/memory.cpp prices and engine/model allocates:
// `take(block, dtype, shape) -> TensorView`.
#pragma once

#include "engine/plan/dims.h"
#include "engine/plan/plan.h"

namespace fp4t {

struct ParamBlocks {
  TensorView master, copy, gradient;
  TensorView owned_gradient;
};
inline DType master_dtype(const ParamInfo& p, const DtypesSpec& dtypes) {
  return p.role == ParamRole::kNorm || p.role == ParamRole::kRouter ? DType::kF32 : dtypes.masters;
}
// Whether products read a BF16 copy instead of the master.
inline bool has_copy(const ParamInfo& p, const Plan& plan) {
  return plan.act == DType::kBf16 && p.role != ParamRole::kNorm && p.role != ParamRole::kRouter &&
         plan.dtypes.masters != DType::kBf16;
}
// ZeRO (engine/comm/README.md). From stage 2 on, the gradients of a block go to their owners after its
// backward, and its memory to the next block; from stage 3 on, the weights of a block come from their owners
// before it, into one of two places that blocks take in turn.
inline bool scatters_gradients(const Plan& plan) {
  return plan.shards.is_sharded() && plan.parallel.zero >= 2;
}
inline bool gathers_weights(const Plan& plan) { return plan.shards.is_sharded() && plan.parallel.zero >= 3; }
inline bool has_shared_gradient(const ParamInfo& p, const Plan& plan) {
  return scatters_gradients(plan) && p.layer >= 0;
}
inline bool has_shared_copy(const ParamInfo& p, const Plan& plan) {
  return gathers_weights(plan) && p.layer >= 0 &&
         (p.role == ParamRole::kGemmWeight || p.role == ParamRole::kExpertWeight);
}
// Where blocks exchange, all ranks make the same calls; one with nothing to do makes empty ones.
inline bool calls_together(const Plan& plan, bool backward) {
  return plan.axes.expert > 1 || gathers_weights(plan) || (backward && scatters_gradients(plan));
}
// Several ranks share the masters that no product reads.
inline bool master_is_part(const ParamInfo& p, const Plan& plan) {
  return plan.shards.is_sharded() && (has_copy(p, plan) || has_shared_copy(p, plan));
}
// What a rank holds of a parameter: all, or its experts.
inline Shape held_shape(const ParamInfo& p, const Plan& plan, int64_t rank) {
  const int64_t held = plan.shards.held(p, rank).count();
  return held == p.shape.elements() ? p.shape : Shape{held / matrix_elements(p), p.shape[1], p.shape[2]};
}
// Moments, and masters that ranks share: of what this rank owns; whole on one rank.
inline Shape owned_shape(const ParamInfo& p, const Plan& plan, int64_t rank) {
  return plan.shards.is_sharded() ? Shape{plan.shards.owned(p, rank).count()} : p.shape;
}
template <class Take>
ParamBlocks take_param(const ParamInfo& p, const Plan& plan, int64_t rank, Take&& take) {
  ParamBlocks b;
  const Shape held = held_shape(p, plan, rank);
  b.master = take("masters", master_dtype(p, plan.dtypes),
                  master_is_part(p, plan) ? owned_shape(p, plan, rank) : held);
  if (has_copy(p, plan) && !has_shared_copy(p, plan)) b.copy = take("BF16 copies", DType::kBf16, held);
  if (has_shared_gradient(p, plan)) {
    b.owned_gradient = take("owned gradients", DType::kF32, owned_shape(p, plan, rank));
  } else {
    b.gradient = take("gradients", p.gradient, held);
  }
  return b;
}

// Where the parameters of one block lie one after another; the places of its copies and gradients.
struct SharedPlaces {
  std::vector<int64_t> copies, gradients;  // by parameter, from where its block's begin; -1: it has none
  int64_t copies_bytes = 0, gradients_bytes = 0;  // of the largest block
};
SharedPlaces shared_places(const Plan& plan, int64_t rank);
inline constexpr int64_t kCopyPlaces = 2;  // one in use, one on its way
// On a GPU a block's gradients are on their way while the next block makes its own.
inline constexpr int64_t kMostGradientPlaces = 2;
inline int64_t gradient_places(const Plan& plan) {
  return plan.machine.backend == Backend::kCuda ? kMostGradientPlaces : 1;
}
struct SharedBlocks {
  TensorView copies[kCopyPlaces], gradients[kMostGradientPlaces];  // U8
};
template <class Take>
SharedBlocks take_shared_blocks(const Plan& plan, const SharedPlaces& places, Take&& take) {
  SharedBlocks b;
  for (int64_t i = 0; scatters_gradients(plan) && i < gradient_places(plan); ++i) {
    b.gradients[i] = take("gradients of blocks", DType::kU8, {places.gradients_bytes});
  }
  for (TensorView& copies : b.copies) {
    if (gathers_weights(plan)) copies = take("weights of two blocks", DType::kU8, {places.copies_bytes});
  }
  return b;
}

// In which domains the members of a row add gradients up and pass weights on (parallel.domain); all of them
// in one where they are not more, or where a domain has but one.
RowDomains row_domains(const Plan& plan, const ShardRow& row);
// Elements of each piece of a row that one round of engine/model/shard_exchange.h sums.
int64_t round_elements(const Plan& plan, const ShardRow& row);
// Of all other ranks' pieces together, in the largest round.
int64_t exchange_elements(const Plan& plan);
// What the others have for this rank's piece.
template <class Take>
TensorView take_exchange(const Plan& plan, Take&& take) {
  return take("rank exchange", DType::kF32, {exchange_elements(plan)});
}
// Norm chunks of the rank that owns most of them, for the sums that ranks tell each other.
int64_t most_owned_chunks(const Plan& plan);

// Monitors: operands of a site in the order (fprop act, weight; dgrad grad, weight; wgrad grad, act).
inline constexpr int kOperandsPerSite = 6;

struct StateBlocks {
  TensorView cos, sin;       // F32 [max_positions, head_dim / 2]
  TensorView operand_stats;  // F64 [sites * 6 + 1, kNumQuantStats], the last of dispatch
  TensorView router_sums;    // F64 [2]
  TensorView load;           // I64 [MoE layers, E]
};
template <class Take>
StateBlocks take_state(const ModelDims& d, int64_t num_sites, int64_t num_moe_layers, Take&& take) {
  StateBlocks b;
  b.cos = take("rotary tables", DType::kF32, {d.max_positions, d.head_dim / 2});
  b.sin = take("rotary tables", DType::kF32, {d.max_positions, d.head_dim / 2});
  b.operand_stats = take("monitors", DType::kF64, {num_sites * kOperandsPerSite + 1, kNumQuantStats});
  b.router_sums = take("monitors", DType::kF64, {2});
  b.load = take("monitors", DType::kI64, {num_moe_layers, d.experts});
  return b;
}
int64_t num_moe_layers(const ModelSpec& model);

}  // namespace fp4t
