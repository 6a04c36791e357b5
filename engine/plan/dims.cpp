#include "engine/plan/dims.h"

#include <algorithm>
#include <cmath>

#include "engine/plan/operands.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {
// Rows that one rank's experts get when all tokens of all ranks choose as many of them as they can.
int64_t most_rows(const ModelDims& d, int64_t tokens) {
  return d.expert_ranks * tokens * std::min(d.top_k, d.local_experts);
}

// Where the recipe does not say how many chunks: links reach their rate with messages of some 16 MiB, and
// more chunks than 8 hide little more.
constexpr double kChunkBytes = 16 << 20;
constexpr int64_t kMostChunks = 8;
int64_t chunks_for(const ModelDims& d, double tokens_sent) {
  const double bytes = tokens_sent * static_cast<double>(d.hidden * dtype_bytes(d.act));
  return std::clamp<int64_t>(static_cast<int64_t>(bytes / kChunkBytes), 1,
                             std::min(kMostChunks, d.local_experts));
}
}  // namespace

ModelDims dims_of(const Plan& plan) {
  const ModelSpec& m = plan.model;
  ModelDims d{};
  d.layers = m.layers;
  d.hidden = m.hidden;
  d.heads = m.heads;
  d.kv_heads = m.kv_heads;
  d.head_dim = m.head_dim;
  d.q_width = m.heads * m.head_dim;
  d.kv_width = m.kv_heads * m.head_dim;
  d.qkv_width = d.q_width + 2 * d.kv_width;
  d.vocabulary = m.vocabulary;
  d.max_positions = m.max_positions;
  d.experts = m.moe.experts;
  d.top_k = m.moe.top_k;
  d.expert_hidden = m.moe.hidden;
  d.shared_hidden = shared_width(m);
  d.mlp_hidden = m.mlp_hidden;
  d.qk_norm = m.qk_norm;
  d.act = plan.act;
  d.expert_ranks = plan.axes.expert;
  d.local_experts = m.moe.experts / plan.axes.expert;
  d.expert_chunks = 1;
  if (d.spreads_experts()) {
    const int64_t tokens = std::max(plan.max_tokens, plan.max_decode_tokens);
    const double even = static_cast<double>(tokens * d.top_k), factor = plan.parallel.receive_factor;
    const int64_t most = most_rows(d, tokens);
    d.round_rows = factor == 0 ? most : std::min(most, static_cast<int64_t>(std::ceil(factor * even)));
    d.round_rows = std::max<int64_t>(d.round_rows, 1);
    d.receive_rows = d.round_rows + std::min(d.top_k, d.local_experts) - 1;
    // To each of the other ranks at most once a choice.
    const int64_t sent = tokens * std::min(d.top_k, d.expert_ranks - 1);
    d.expert_chunks = plan.parallel.expert_chunks > 0 ? std::min(plan.parallel.expert_chunks, d.local_experts)
                                                      : chunks_for(d, static_cast<double>(sent));
  }
  for (const TablePair& tables : table_pairs(plan)) {
    d.codes_dispatch = d.codes_dispatch || dispatch_spec(tables.forward->dispatch).quantised();
  }
  return d;
}

QuantSpec dispatch_spec(Format format) {
  QuantSpec spec;
  spec.format = format;
  if (format == Format::kNvfp4) {
    spec.scale_scope = ScaleScope::kRow;
    spec.scale_round = ScaleRound::kPow2;
  }
  return spec;
}

int64_t call_chunks(const Plan& plan, const ModelDims& d, double tokens_sent) {
  if (plan.parallel.expert_chunks > 0) return d.expert_chunks;
  return 2 * chunks_for(d, tokens_sent) >= d.expert_chunks ? d.expert_chunks : 1;
}

int64_t worst_rounds(const Plan& plan) {
  const ModelDims d = dims_of(plan);
  return ceil_div(most_rows(d, std::max(plan.max_tokens, plan.max_decode_tokens)), d.round_rows);
}

}  // namespace fp4t
