// What the step arena holds, block by block: one description that engine/plan/memory.cpp prices and
// engine/model allocates. `take(block, dtype, shape) -> TensorView` is an arena's take, or a counter. The
// other arenas: scratch_layout.h, run_layout.h; the key-value cache: cache_layout.h.
//
// Shape legend: T tokens of a call, R rows of the experts, T * top_k of them where they lie on this rank
// alone, D hidden, E experts. Where they are spread over ranks: X ranks, L experts on each, G guests at most
// (tokens that came to this rank's experts), S tokens sent, one a (token, rank).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "engine/plan/dims.h"
#include "engine/plan/modules.h"
#include "engine/plan/operands.h"
#include "engine/plan/plan.h"
#include "kernels/base/tensor.h"

namespace fp4t {

// What stays of a forward for what comes after it.
enum class Keep : uint8_t {
  kNothing,  // evaluation, decoding
  kInputs,   // the input of every block; backward runs the block again
  kAll,
};
Keep keep_for_backward(const ParallelSpec& parallel);

// What one block keeps for its backward.
struct LayerActs {
  TensorView attn_in, attn_rstd;      // [T, D], [T]: the first norm
  TensorView projected_qkv, qk_rstd;  // [T, qkv], [T, heads + kv_heads]: only with qk_norm
  TensorView qkv;                     // [T, qkv]: rotated, rounded as the cache
  TensorView attn, lse;               // [T, q], [T, heads]
  TensorView middle;                  // [T, D]: residual stream between attention and FFN
  TensorView mlp_in, mlp_rstd;        // [T, D], [T]: the second norm
  // MoE blocks
  TensorView router_logits, scores;   // F32 [T, E]
  TensorView experts, gates, row_of;  // [T, k]
  TensorView replay, replay_differs;  // [T, k], [T]: experts that were given, empty: none
  TensorView offsets, token_of;       // [E + 1], [R]
  // [R, D]: the experts' input, then their output; in backward the gradient of the output, the input again,
  // its gradient.
  TensorView expert_rows;
  // Where experts are spread: where this rank's tokens go, and in which order (DispatchTokens); the tokens
  // that came, in the order in which they did; what they chose (-1: of another rank) and their rows here, in
  // the order in which their sums leave; of each row the token and the choice, as an index of guest_gates.
  // Offsets are those of each chunk of experts, from 0. Where dispatch is coded, the experts' input are
  // `guests`, too: decoded.
  TensorView rank_of, place_of, asked, sent;          // I32 [T, m], [T, m], [T m], [T m], m = min(k, X)
  TensorView guests, guest_gates;                     // [G, D], F32 [G, k]
  TensorView guest_experts, guest_row_of;             // I32 [G, k]
  TensorView expert_offsets, guest_of, guest_choice;  // I32 [L + chunks], [R], [R]
  TensorView shared_gate_up, shared_hidden;           // [T, 2 Fs], [T, Fs]
  // rows of the FFN: R in MoE blocks, T in dense ones
  TensorView gate_up, hidden;                    // [rows, 2F], [rows, F]
  std::array<KeptCodes, kNumGemmModules> codes;  // by module
};

// Layers whose blocks a layer may take as its own; null: it has its own.
struct ActLenders {
  const LayerActs* attn_in = nullptr;
  const LayerActs* hidden = nullptr;
};

template <class Take>
LayerActs take_layer_acts(const ModelDims& d, bool is_moe, int64_t tokens, const ActLenders& lenders,
                          Take&& take) {
  const int64_t choices = tokens * d.top_k;
  LayerActs a;
  a.attn_in = lenders.attn_in ? lenders.attn_in->attn_in : take("norms", d.act, {tokens, d.hidden});
  a.attn_rstd = take("norms", DType::kF32, {tokens});
  if (d.qk_norm) {
    a.projected_qkv = take("attention", d.act, {tokens, d.qkv_width});
    a.qk_rstd = take("attention", DType::kF32, {tokens, d.heads + d.kv_heads});
  }
  a.qkv = take("attention", d.act, {tokens, d.qkv_width});
  a.attn = take("attention", d.act, {tokens, d.q_width});
  a.lse = take("attention", DType::kF32, {tokens, d.heads});
  a.middle = take("residual stream", d.act, {tokens, d.hidden});
  a.mlp_in = take("norms", d.act, {tokens, d.hidden});
  a.mlp_rstd = take("norms", DType::kF32, {tokens});
  if (is_moe) {
    a.router_logits = take("router", DType::kF32, {tokens, d.experts});
    a.scores = take("router", DType::kF32, {tokens, d.experts});
    a.experts = take("router", DType::kI32, {tokens, d.top_k});
    a.gates = take("router", DType::kF32, {tokens, d.top_k});
    a.row_of = take("router", DType::kI32, {tokens, d.top_k});
    a.offsets = take("router", DType::kI32, {d.experts + 1});
    a.token_of = take("router", DType::kI32, {choices});
    a.expert_rows = take("experts", d.act, {expert_rows(d, tokens), d.hidden});
    const int64_t guests = d.spreads_experts() ? d.receive_rows : tokens;
    if (d.spreads_experts() || d.codes_dispatch) a.guests = take("experts", d.act, {guests, d.hidden});
    if (d.spreads_experts()) {
      const int64_t most = split_of(d).visits_of_token(d.top_k);
      a.rank_of = take("experts", DType::kI32, {tokens, most});
      a.place_of = take("experts", DType::kI32, {tokens, most});
      a.asked = take("experts", DType::kI32, {tokens * most});
      a.sent = take("experts", DType::kI32, {tokens * most});
      a.guest_gates = take("experts", DType::kF32, {guests, d.top_k});
      a.guest_experts = take("experts", DType::kI32, {guests, d.top_k});
      a.guest_row_of = take("experts", DType::kI32, {guests, d.top_k});
      a.expert_offsets = take("experts", DType::kI32, {d.local_experts + d.expert_chunks});
      a.guest_of = take("experts", DType::kI32, {guests});
      a.guest_choice = take("experts", DType::kI32, {guests});
    }
    if (d.shared_hidden > 0) {
      a.shared_gate_up = take("shared experts", d.act, {tokens, 2 * d.shared_hidden});
      a.shared_hidden = take("shared experts", d.act, {tokens, d.shared_hidden});
    }
  }
  const int64_t rows = is_moe ? expert_rows(d, tokens) : tokens;
  const int64_t width = is_moe ? d.expert_hidden : d.mlp_hidden;
  a.gate_up = take(is_moe ? "experts" : "mlp", d.act, {rows, 2 * width});
  a.hidden = lenders.hidden ? lenders.hidden->hidden : take(is_moe ? "experts" : "mlp", d.act, {rows, width});
  return a;
}

template <class Take>
void take_act_codes(const Plan& plan, const ModelDims& d, const TablePair& tables, int64_t layer,
                    int64_t tokens, LayerActs& acts, Take&& take) {
  for (int m = 0; m < kNumGemmModules; ++m) {
    const GemmSite site = site_of(d, layer, static_cast<Module>(m));
    if (!layer_has(plan.model, layer, site.module) || !tables.backward) continue;
    KeptCodes& kept = acts.codes[static_cast<size_t>(m)];
    const ForwardCell& forward = tables.forward->cell(layer, site.module);
    const auto codes = [&](GemmRole gemm) {
      const OperandForm form =
          operand_form(gemm, OperandRole::kAct, forward, &tables.backward->cell(layer, site.module));
      return take_quant("act codes", operand_layout(form, site, site_rows(d, site, tokens)), take);
    };
    if (keeps_codes(tables, site)) kept.fprop = codes(GemmRole::kFprop);
    if (codes_act_once(tables, site)) kept.wgrad = codes(GemmRole::kWgrad);
  }
}

// Activations of a packed batch. With Keep::kAll every block has its own LayerActs, but for inputs of
// products that backward reads the codes of; otherwise all share one of each kind. `stream[l]` is the input
// of block l; without any keeping two blocks alternate.
struct BatchActs {
  std::vector<TensorView> stream;  // layers + 1 views
  std::vector<LayerActs> layers;
  TensorView final_in, final_rstd;  // the last norm
};

template <class Take>
BatchActs take_batch_acts(const Plan& plan, const ModelDims& d, const TablePair& tables, int64_t tokens,
                          Keep keep, Take&& take) {
  BatchActs a;
  for (int64_t l = 0; l <= d.layers; ++l) {
    const bool reuse = keep == Keep::kNothing && l >= 2;
    a.stream.push_back(reuse ? a.stream[static_cast<size_t>(l - 2)]
                             : take("residual stream", d.act, {tokens, d.hidden}));
  }
  int64_t first_of_kind[2] = {-1, -1};
  const LayerActs *of_attn_in = nullptr, *of_hidden[2] = {nullptr, nullptr};
  a.layers.reserve(static_cast<size_t>(d.layers));  // their addresses stay
  for (int64_t l = 0; l < d.layers; ++l) {
    const bool is_moe = is_moe_layer(plan.model, l);
    int64_t& first = first_of_kind[is_moe ? 1 : 0];
    if (keep != Keep::kAll && first >= 0) {
      a.layers.push_back(a.layers[static_cast<size_t>(first)]);
      continue;
    }
    const auto is_spent = [&](Module module) {
      return keep == Keep::kAll && codes_act_once(tables, site_of(d, l, module));
    };
    const bool attn_in = is_spent(Module::kAttnQkv),
               hidden = is_spent(is_moe ? Module::kExpertsDown : Module::kMlpDown);
    const LayerActs*& lender = of_hidden[is_moe ? 1 : 0];
    a.layers.push_back(take_layer_acts(d, is_moe, tokens,
                                       {attn_in ? of_attn_in : nullptr, hidden ? lender : nullptr}, take));
    if (attn_in && !of_attn_in) of_attn_in = &a.layers.back();
    if (hidden && !lender) lender = &a.layers.back();
    if (first < 0) first = l;
    if (keep == Keep::kAll) take_act_codes(plan, d, tables, l, tokens, a.layers.back(), take);
  }
  a.final_in = take("norms", d.act, {tokens, d.hidden});
  a.final_rstd = take("norms", DType::kF32, {tokens});
  return a;
}

// Below every phase: integers of the batch and per-token values of the loss.
struct TokenBlocks {
  TensorView tokens, positions, targets, groups;  // I32; groups: doc_begin, or slots when decoding
  TensorView logit_rows;                          // I32
  TensorView log_prob, lse, entropy, d_log_prob, d_lse;
  // Of the policy objective: F32, F64, I32.
  TensorView old_log_prob, reference, advantage, importance, loss, d_entropy;
  TensorView weight, log_ratio;
  TensorView clipped, sequence_begin, sequence_end;
  TensorView sample_ids;  // I64, of drawn tokens
  // Only where a stage records the sampler's routing: I32 [MoE layers * rows, k] of recorded or given
  // experts, and [MoE layers * rows], whether the own choice differs. A call's layers follow one another
  // without gaps.
  TensorView router, router_differs;
  // I32 [6 rows], [2 rows]: a recorded decode call's inputs and outputs, each one copy.
  TensorView decode_inputs, decode_outputs;
};
int64_t token_block_rows(const Plan& plan);
// MoE layers whose routing a stage of the plan records; 0 when none does.
int64_t recorded_routers(const Plan& plan);

template <class Take>
TokenBlocks take_token_blocks(const Plan& plan, Take&& take) {
  const int64_t rows = token_block_rows(plan), routers = recorded_routers(plan);
  TokenBlocks b;
  for (TensorView* v : {&b.tokens, &b.positions, &b.targets, &b.groups, &b.logit_rows}) {
    *v = take("token buffers", DType::kI32, {rows});
  }
  for (TensorView* v : {&b.log_prob, &b.lse, &b.entropy, &b.d_log_prob, &b.d_lse, &b.old_log_prob,
                        &b.reference, &b.advantage, &b.importance, &b.loss, &b.d_entropy}) {
    *v = take("token buffers", DType::kF32, {rows});
  }
  for (TensorView* v : {&b.weight, &b.log_ratio}) *v = take("token buffers", DType::kF64, {rows});
  for (TensorView* v : {&b.clipped, &b.sequence_begin, &b.sequence_end}) {
    *v = take("token buffers", DType::kI32, {rows});
  }
  b.sample_ids = take("token buffers", DType::kI64, {rows});
  b.decode_inputs = take("token buffers", DType::kI32, {6 * rows});
  b.decode_outputs = take("token buffers", DType::kI32, {2 * rows});
  if (routers > 0) {
    b.router = take("recorded routing", DType::kI32, {routers * rows, plan.model.moe.top_k});
    b.router_differs = take("recorded routing", DType::kI32, {routers * rows});
  }
  return b;
}

// Whether the gradients of a whole micro-batch's logits must be there at once (never in FP32): the operands
// of the head's backward products that are made from codes have the micro-batch as their scale domain.
bool head_gradient_is_whole(const Plan& plan);

// A chunk of tokens.
struct LogitBlocks {
  TensorView logits;   // F32 [chunk, V]
  TensorView dlogits;  // act [chunk, V], or of the whole micro-batch; FP32 takes the place of the logits
};
template <class Take>
LogitBlocks take_logits(const Plan& plan, const ModelDims& d, Take&& take) {
  const int64_t chunk = std::min(plan.head_chunk, plan.max_tokens);
  const bool whole = head_gradient_is_whole(plan);
  LogitBlocks b;
  b.logits = take("logits", DType::kF32, {chunk, d.vocabulary});
  b.dlogits = !whole && d.act == DType::kF32
                  ? b.logits
                  : take("logits", d.act, {whole ? plan.max_tokens : chunk, d.vocabulary});
  return b;
}

// Logit rows that a decode call may ask for.
inline int64_t max_logit_rows(const Plan& plan) { return plan.max_cache_slots; }

struct DecodeHead {
  TensorView gathered, final_in, final_rstd, logits;
};
template <class Take>
DecodeHead take_decode_head(const ModelDims& d, int64_t rows, Take&& take) {
  DecodeHead h;
  h.gathered = take("decode logits", d.act, {rows, d.hidden});
  h.final_in = take("decode logits", d.act, {rows, d.hidden});
  h.final_rstd = take("decode logits", DType::kF32, {rows});
  h.logits = take("decode logits", DType::kF32, {rows, d.vocabulary});
  return h;
}

}  // namespace fp4t
