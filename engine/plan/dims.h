// Sizes of a plan's model as this rank holds it, and how rows travel to experts. What a call needs of the
// plan whatever the arenas hold; blocks of memory: step_layout.h, scratch_layout.h, run_layout.h.
#pragma once

#include <cstdint>

#include "engine/plan/plan.h"
#include "kernels/base/dtype.h"
#include "kernels/formats/quant.h"
#include "kernels/ops/dispatch.h"

namespace fp4t {

struct ModelDims {
  int64_t layers, hidden, heads, kv_heads, head_dim;
  int64_t q_width, kv_width, qkv_width;  // heads * head_dim, ...
  int64_t vocabulary, max_positions;
  int64_t experts, top_k;
  int64_t expert_hidden, shared_hidden, mlp_hidden;  // FFN widths; shared 0: none
  bool qk_norm;
  DType act;
  int64_t expert_ranks, local_experts;  // X, L
  // Rows that this rank's experts take in one round, whichever of their ranks they come from; 0 where experts
  // are not spread. The last token may begin in row round_rows - 1; its rows stay together.
  int64_t receive_rows, round_rows;
  // Parts that a rank's experts are cut into where tokens travel (parallel.expert_chunks), at most; 1 where
  // experts are not spread.
  int64_t expert_chunks;
  bool codes_dispatch;  // in any table
  bool spreads_experts() const { return expert_ranks > 1; }
};
ModelDims dims_of(const Plan& plan);
// How rows travel to experts, by a table's format: codes whose values BF16 holds and that depend on their row
// alone, so that a token's bits are the same wherever its experts are. Not quantised: as they are.
QuantSpec dispatch_spec(Format format);
inline ExpertSplit split_of(const ModelDims& d) { return {d.experts, d.expert_ranks, d.expert_chunks}; }
// Rows of the experts in a call of T tokens.
inline int64_t expert_rows(const ModelDims& d, int64_t tokens) {
  return d.spreads_experts() ? d.receive_rows : tokens * d.top_k;
}
// Chunks of a call in which a rank brings so many tokens to experts of other ranks, in the mean:
// expert_chunks, or 1 where that is too few bytes for them and the recipe does not say otherwise.
int64_t call_chunks(const Plan& plan, const ModelDims& d, double tokens_sent);
// Rounds that the worst routing takes: every token of every rank with all its choices on one of them.
int64_t worst_rounds(const Plan& plan);

}  // namespace fp4t
