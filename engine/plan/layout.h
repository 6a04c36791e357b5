// What the step and scratch arenas hold (the run arena: run_layout.h), block by block: one description that
// engine/plan/memory.cpp prices and engine/model allocates. `take(block, dtype, shape) -> TensorView` is an
// arena's take, or a counter.
//
// Shape legend: T tokens of a call, R rows of the experts, T * top_k of them where they lie on this rank
// alone, D hidden, E experts. Where they are spread over ranks: X ranks, L experts on each, G guests at most
// (tokens that came to this rank's experts), S tokens sent, one a (token, rank).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/modules.h"
#include "engine/plan/plan.h"
#include "kernels/base/tensor.h"
#include "kernels/formats/quant.h"
#include "kernels/ops/capability.h"
#include "kernels/ops/quantize.h"

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
  bool codes_dispatch;  // in any table
  bool spreads_experts() const { return expert_ranks > 1; }
};
ModelDims dims_of(const Plan& plan);
// How rows travel to experts, by a table's format: codes whose values BF16 holds and that depend on their row
// alone, so that a token's bits are the same wherever its experts are. Not quantised: as they are.
QuantSpec dispatch_spec(Format format);
// Rows of the experts in a call of T tokens.
inline int64_t expert_rows(const ModelDims& d, int64_t tokens) {
  return d.spreads_experts() ? d.receive_rows : tokens * d.top_k;
}
// Rounds that the worst routing takes: every token of every rank with all its choices on one of them.
int64_t worst_rounds(const Plan& plan);

// What stays of a forward for what comes after it.
enum class Keep : uint8_t {
  kNothing,  // evaluation, decoding
  kInputs,   // the input of every block; backward runs the block again
  kAll,
};
Keep keep_for_backward(const ParallelSpec& parallel);

// GEMM sites ------------------------------------------------------------------------------------------

// One linear layer: weight [out, in], or [groups, out, in] of experts (groups 0: not experts).
struct GemmSite {
  int64_t layer;  // the head: number of layers
  Module module;
  int64_t groups;
  int64_t out, in;
  int64_t matrices() const { return groups > 0 ? groups : 1; }
};
std::vector<GemmSite> gemm_sites(const Plan& plan);
// Rows that a call of T tokens brings to a site.
int64_t site_rows(const ModelDims& dims, const GemmSite& site, int64_t tokens);

// A forward table and the backward table of the same steps (null for samplers).
struct TablePair {
  const ForwardTable* forward;
  const BackwardTable* backward;
};
std::vector<TablePair> table_pairs(const Plan& plan);

// How one operand reaches its product.
struct OperandForm {
  GemmRole gemm = GemmRole::kFprop;
  OperandRole operand = OperandRole::kAct;
  QuantSpec spec;             // `source` cleared: the next two say it
  bool from_forward = false;  // made from fprop's codes instead of the tensor
  QuantSpec forward;          // those codes; default when not from_forward
  bool operator==(const OperandForm&) const = default;
};
OperandForm operand_form(GemmRole gemm, OperandRole operand, const ForwardCell& forward,
                         const BackwardCell* backward);
// Fprop's own form of an operand that is made from fprop's codes.
OperandForm forward_form(const OperandForm& form);
// True for weights whose codes (or dequantised values) stay the same until the weights change.
bool is_cacheable(const OperandForm& form);
// The cacheable forms of a site over all stages, each once.
std::vector<OperandForm> cached_forms(const Plan& plan, const GemmSite& site);
// True when the old tensor scale enters as Quantize.input_scale or Operand.scale.
bool carries_forward_scale(const OperandForm& form);

// Whether backward codes dy for both of its products in one reading of it; the codes of the second wait for
// the first product then.
bool codes_gradient_once(const OperandForm& dgrad, const OperandForm& wgrad);

// True for an act that its producer may round row by row (kernels/ops/quantize.h, RoundedRows).
bool rounds_by_row(const OperandForm& form, const GemmSite& site);
template <class Take>
RoundedRows take_rounded(const OperandForm& form, const GemmSite& site, int64_t rows, Take&& take) {
  RoundedRows r;
  r.spec = form.spec;
  r.values = take("rounded rows", DType::kBf16, Shape{rows, site.in});
  r.scale = take("rounded rows", DType::kF32, Shape{rows});
  return r;
}

// Sizes of the codes of a quantised form; data pointers are null.
QuantView operand_layout(const OperandForm& form, const GemmSite& site, int64_t rows);
// Shape of the BF16 values that a form made from fprop's codes goes through.
Shape forward_values_shape(const OperandForm& form, const GemmSite& site, int64_t rows);
// Scratch of the largest of a site's products for a call of this many rows.
int64_t gemm_scratch_bytes(const GemmSite& site, const TablePair& tables, int64_t rows);
// The codes that each of a site's products meets in a call of this many rows.
std::vector<ProductCodes> product_codes(const GemmSite& site, const TablePair& tables, int64_t rows);

template <class Take>
QuantView take_quant(const std::string& block, QuantView layout, Take&& take) {
  layout.codes = take(block, DType::kU8, layout.codes.shape);
  layout.block_scales = take(block, DType::kU8, layout.block_scales.shape);
  if (layout.tensor_scale.shape.rank() > 0) {
    layout.tensor_scale = take(block, DType::kF32, layout.tensor_scale.shape);
  }
  return layout;
}

// What a cached form holds: codes, or values of a form that is multiplied as BF16.
struct CachedOperand {
  QuantView codes;
  TensorView values;
};
template <class Take>
CachedOperand take_cached(const OperandForm& form, const GemmSite& site, Take&& take) {
  CachedOperand c;
  if (form.spec.quantised()) {
    c.codes = take_quant("weight codes", operand_layout(form, site, 0), take);
  } else {
    c.values = take("weight codes", DType::kBf16, forward_values_shape(form, site, 0));
  }
  return c;
}

// Step arena ------------------------------------------------------------------------------------------

// Codes of a product's act that backward has no need to make. Empty: made when needed.
struct KeptCodes {
  QuantView fprop;  // where wgrad is made from them
  QuantView wgrad;  // where fprop's reading makes them too
};

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
  // Where experts are spread: the tokens that came, what they chose (-1: of another rank), their rows here.
  // Where dispatch is coded, the experts' input are `guests`, too: decoded.
  TensorView guests, guest_gates;            // [G, D], F32 [G, k]
  TensorView guest_experts, guest_row_of;    // I32 [G, k]
  TensorView expert_offsets, guest_of;       // I32 [L + 1], [R]
  TensorView shared_gate_up, shared_hidden;  // [T, 2 Fs], [T, Fs]
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
      a.guest_gates = take("experts", DType::kF32, {guests, d.top_k});
      a.guest_experts = take("experts", DType::kI32, {guests, d.top_k});
      a.guest_row_of = take("experts", DType::kI32, {guests, d.top_k});
      a.expert_offsets = take("experts", DType::kI32, {d.local_experts + 1});
      a.guest_of = take("experts", DType::kI32, {guests});
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

// Whether backward is made from the codes of fprop's act: worth keeping them.
bool keeps_codes(const TablePair& tables, const GemmSite& site);
// Whether fprop's reading of its act makes wgrad's codes too.
bool codes_act_once(const TablePair& tables, const GemmSite& site);
GemmSite site_of(const ModelDims& dims, int64_t layer, Module module);

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

// Sequences that a cache holds; on a GPU one more than the plan's, for rows that fill up a recorded call.
int64_t cache_slots(const Plan& plan);
// Positions of a page of the key-value cache: few are wasted behind a sequence's end, and what a warp reads
// together lies in one.
inline constexpr int64_t kKvPage = 32;
// Pages that the longest sequence has; pages of the cache, on a GPU one more for rows that fill up a recorded
// call. Sequences of one prompt share the pages that it fills.
int64_t pages_per_slot(const Plan& plan);
int64_t cache_pages(const Plan& plan);
inline int64_t page_table_bytes(const Plan& plan) {
  return cache_slots(plan) * pages_per_slot(plan) * static_cast<int64_t>(sizeof(int32_t));
}

// Bytes of one layer's key-value cache in a format; its four parts follow one another, 64-byte aligned.
struct CacheLayout {
  DType dtype;
  int64_t values_bytes, scales_bytes;  // of k; v has as many
  int64_t total_bytes() const { return 2 * (values_bytes + scales_bytes); }
};
CacheLayout cache_layout(const Plan& plan, Format format);
int64_t max_cache_bytes(const Plan& plan);

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

// Scratch arena ---------------------------------------------------------------------------------------

struct ForwardScratch {
  TensorView qkv;         // [T, qkv]: before rotation, without qk_norm
  TensorView projected;   // [T, D]: output of attention, of a dense FFN
  TensorView shared_out;  // [T, D]
};
template <class Take>
ForwardScratch take_forward_scratch(const ModelDims& d, bool is_moe, int64_t tokens, Take&& take) {
  ForwardScratch s;
  if (!d.qk_norm) s.qkv = take("block forward", d.act, {tokens, d.qkv_width});
  s.projected = take("block forward", d.act, {tokens, d.hidden});
  if (is_moe && d.shared_hidden > 0) s.shared_out = take("block forward", d.act, {tokens, d.hidden});
  return s;
}

// For a whole backward: gradients of the residual stream and of a norm's output.
struct StreamScratch {
  TensorView dstream, dnorm;  // [T, D]
};
template <class Take>
StreamScratch take_stream_scratch(const ModelDims& d, int64_t tokens, Take&& take) {
  StreamScratch s;
  s.dstream = take("backward stream", d.act, {tokens, d.hidden});
  s.dnorm = take("backward stream", d.act, {tokens, d.hidden});
  return s;
}

struct FfnScratch {
  TensorView dhidden;                  // [rows, F]
  TensorView dgates, drouter;          // F32 [T, k], [T, E]
  TensorView drouter_in;               // F32 [T, D]
  TensorView dshared, dshared_hidden;  // [T, D], [T, Fs]
};
template <class Take>
FfnScratch take_ffn_scratch(const ModelDims& d, bool is_moe, int64_t tokens, Take&& take) {
  FfnScratch s;
  if (!is_moe) {
    s.dhidden = take("ffn backward", d.act, {tokens, d.mlp_hidden});
    return s;
  }
  s.dhidden = take("ffn backward", d.act, {expert_rows(d, tokens), d.expert_hidden});
  s.dgates = take("ffn backward", DType::kF32, {tokens, d.top_k});
  s.drouter = take("ffn backward", DType::kF32, {tokens, d.experts});
  s.drouter_in = take("ffn backward", DType::kF32, {tokens, d.hidden});
  if (d.shared_hidden > 0) {
    s.dshared = take("ffn backward", d.act, {tokens, d.hidden});
    s.dshared_hidden = take("ffn backward", d.act, {tokens, d.shared_hidden});
  }
  return s;
}

// Between a call's tokens and experts of other ranks. A round sends and returns rows one after another; what
// came back stays until all rounds are over.
struct TripScratch {
  TensorView sent_tokens;                // I32 [S]: whose rows, in the order in which they go
  TensorView sent, sent_choices;         // act [S, D], F32 [S, k]: on their way
  TensorView guest_dout, guest_dgates;   // act [G, D], F32 [G, k]: backward
  TensorView partial;                    // F32 [G, D]
  TensorView returned, returned_dgates;  // F32 [S, D], [S, k]
  TensorView place_of, rank_of;          // I32 [T, X]: a token's rows in `returned`, -1 for none
};
template <class Take>
TripScratch take_trip_scratch(const ModelDims& d, int64_t tokens, bool backward, Take&& take) {
  TripScratch s;
  if (!d.spreads_experts()) return s;
  const int64_t sent = tokens * std::min(d.top_k, d.expert_ranks), guests = d.receive_rows;
  s.sent_tokens = take("experts of other ranks", DType::kI32, {sent});
  s.sent = take("experts of other ranks", d.act, {sent, d.hidden});
  s.sent_choices = take("experts of other ranks", DType::kF32, {sent, d.top_k});
  s.partial = take("experts of other ranks", DType::kF32, {guests, d.hidden});
  s.returned = take("experts of other ranks", DType::kF32, {sent, d.hidden});
  s.place_of = take("experts of other ranks", DType::kI32, {tokens, d.expert_ranks});
  s.rank_of = take("experts of other ranks", DType::kI32, {tokens, d.expert_ranks});
  if (!backward) return s;
  s.guest_dout = take("experts of other ranks", d.act, {guests, d.hidden});
  s.guest_dgates = take("experts of other ranks", DType::kF32, {guests, d.top_k});
  s.returned_dgates = take("experts of other ranks", DType::kF32, {sent, d.top_k});
  return s;
}

// Codes of a call's rows, those on their way, and those that came; empty where dispatch is not coded.
struct DispatchScratch {
  QuantView own, sent, guests;
};
template <class Take>
DispatchScratch take_dispatch_scratch(const ModelDims& d, Format format, int64_t tokens, Take&& take) {
  DispatchScratch s;
  const QuantSpec spec = dispatch_spec(format);
  if (!spec.quantised()) return s;
  const auto codes = [&](int64_t rows) {
    return take_quant("dispatch codes", quant_layout(spec, GroupAxis::kRows, 1, rows, d.hidden), take);
  };
  s.own = codes(tokens);
  if (!d.spreads_experts()) return s;
  s.sent = codes(tokens * std::min(d.top_k, d.expert_ranks));
  s.guests = codes(d.receive_rows);
  return s;
}

struct AttentionScratch {
  TensorView dattn, dqkv;  // [T, q], [T, qkv]
};
template <class Take>
AttentionScratch take_attention_scratch(const ModelDims& d, int64_t tokens, Take&& take) {
  AttentionScratch s;
  s.dattn = take("attention backward", d.act, {tokens, d.q_width});
  s.dqkv = take("attention backward", d.act, {tokens, d.qkv_width});
  return s;
}

}  // namespace fp4t
