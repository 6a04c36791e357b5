#include "engine/model/block.h"

#include <cmath>

#include "kernels/ops/run.h"

namespace fp4t {

namespace {
// One of the block's linear layers with the place of its kept codes; `rounded`: x, where its producer rounded
// it.
void linear_forward(const Call& call, Linear& linear, const TensorView& x, const RoundedRows& rounded,
                    const TensorView& offsets, const LayerActs& acts, const TensorView& out) {
  if (!rounded.empty()) return linear.forward_rounded(call, rounded, offsets, {}, out);
  linear.forward(call, x, offsets, acts.codes[static_cast<size_t>(linear.site().module)], out);
}

std::string layer_name(int64_t layer, const char* rest) {
  return "layers." + std::to_string(layer) + "." + rest;
}
}  // namespace

Block::Block(const Plan& plan, int64_t layer, ParamSet& params, ExpertExchange& exchange,
             BlockLinears linears, const TensorView& load)
    : model_(plan.model),
      is_moe_(is_moe_layer(plan.model, layer)),
      eps_(static_cast<float>(plan.model.norm_eps)),
      clamp_(static_cast<float>(plan.model.swiglu_clamp)),
      scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(plan.model.head_dim)))),
      attn_norm_(params.find(layer_name(layer, "attn_norm.weight"))),
      mlp_norm_(params.find(layer_name(layer, "mlp_norm.weight"))),
      load_(load),
      linears_(std::move(linears)),
      exchange_(exchange) {
  if (model_.qk_norm) {
    q_norm_ = &params.find(layer_name(layer, "attn.q_norm.weight"));
    k_norm_ = &params.find(layer_name(layer, "attn.k_norm.weight"));
  }
  if (is_moe_) {
    router_ = &params.find(layer_name(layer, "router.weight"));
    router_bias_ = params.find_buffer(layer_name(layer, "router.bias")).data;
    FP4T_CHECK(model_.moe.router == "softmax" || model_.moe.router == "sigmoid", "router ",
               model_.moe.router);
    router_kind_ = model_.moe.router == "sigmoid" ? RouterKind::kSigmoid : RouterKind::kSoftmax;
  }
}

std::vector<Linear*> Block::linears() const {
  std::vector<Linear*> list;
  for (const auto* l : {&linears_.qkv, &linears_.out, &linears_.gate_up, &linears_.down,
                        &linears_.shared_gate_up, &linears_.shared_down}) {
    if (*l) list.push_back(l->get());
  }
  return list;
}

void Block::forward(const Call& call, const TensorView& x, LayerActs& acts, const KvCacheView* cache,
                    const TensorView& out) {
  ScratchScope scope(call.scratch);
  if (call.tokens == 0) {
    if (!is_moe_ || !exchange_.spreads()) return;
    spread_forward(call, acts, take_trip_scratch(call.dims, 0, false, ArenaTake{call.scratch}));
    return exchange_.finish();
  }
  const ForwardScratch s = take_forward_scratch(call.dims, is_moe_, call.tokens, ArenaTake{call.scratch});
  // Where nothing is kept for a backward and nothing counted, whoever makes an operand may round it too.
  const bool rounding = cache && !call.counting;
  attention_forward(call, x, acts, cache, s);
  ffn_in(call, x, acts, s, rounding);
  if (!is_moe_) {
    ffn_out(call, *linears_.down, acts.gate_up, {}, acts, acts.hidden, rounding, s.projected);
    run(call.queue, Add{.a = acts.middle, .b = s.projected, .out = out});
    return;
  }
  const TripScratch t = take_trip_scratch(call.dims, call.tokens, false, ArenaTake{call.scratch});
  if (exchange_.spreads()) {
    spread_forward(call, acts, t);
  } else {
    ffn_out(call, *linears_.down, acts.gate_up, acts.offsets, acts, acts.hidden, rounding, acts.expert_rows);
  }
  if (linears_.shared_down) {
    linear_forward(call, *linears_.shared_gate_up, acts.mlp_in, {}, {}, acts, acts.shared_gate_up);
    ffn_out(call, *linears_.shared_down, acts.shared_gate_up, {}, acts, acts.shared_hidden, rounding,
            s.shared_out);
  }
  if (exchange_.spreads()) {
    exchange_.finish();
    return sum_over_ranks(call, acts, t.returned, s.shared_out, acts.middle, out);
  }
  run(call.queue, CombineExperts{.y = acts.expert_rows,
                                 .row_of = acts.row_of,
                                 .experts = acts.experts,
                                 .gates = acts.gates,
                                 .num_experts = model_.moe.experts,
                                 .shared = s.shared_out,
                                 .residual = acts.middle,
                                 .out = out});
}

void Block::attention_forward(const Call& call, const TensorView& x, LayerActs& acts,
                              const KvCacheView* cache, const ForwardScratch& s) {
  const ModelDims& d = call.dims;
  const TensorView projected = d.qk_norm ? acts.projected_qkv : s.qkv;
  {
    ScratchScope scope(call.scratch);
    RoundedRows rounded;
    if (cache && !call.counting) rounded = linears_.qkv->rounded(call, scope, call.tokens);
    run(call.queue, NormForward{.x = x,
                                .residual = {},
                                .weight = attn_norm_.master,
                                .eps = eps_,
                                .sum = {},
                                .out = acts.attn_in,
                                .rstd = acts.attn_rstd,
                                .rounded = rounded});
    linear_forward(call, *linears_.qkv, acts.attn_in, rounded, {}, acts, projected);
  }
  run(call.queue, QkNormRopeForward{.qkv = projected,
                                    .heads = d.heads,
                                    .kv_heads = d.kv_heads,
                                    .head_dim = d.head_dim,
                                    .positions = call.positions,
                                    .cos = call.cos,
                                    .sin = call.sin,
                                    .q_weight = q_norm_ ? q_norm_->master : TensorView{},
                                    .k_weight = k_norm_ ? k_norm_->master : TensorView{},
                                    .eps = eps_,
                                    .out = acts.qkv,
                                    .rstd = acts.qk_rstd});
  if (cache) {
    run(call.queue, KvAppend{.qkv = acts.qkv,
                             .heads = d.heads,
                             .kv_heads = d.kv_heads,
                             .head_dim = d.head_dim,
                             .slots = call.groups,
                             .positions = call.positions,
                             .cache = *cache});
    run(call.queue, AttentionCached{.qkv = acts.qkv,
                                    .heads = d.heads,
                                    .kv_heads = d.kv_heads,
                                    .head_dim = d.head_dim,
                                    .slots = call.groups,
                                    .positions = call.positions,
                                    .cache = *cache,
                                    .scale = scale_,
                                    .out = acts.attn});
  } else {
    if (call.pass.forward->kv_cache == Format::kMxfp8) {
      run(call.queue, KvRound{.qkv = acts.qkv,
                              .heads = d.heads,
                              .kv_heads = d.kv_heads,
                              .head_dim = d.head_dim,
                              .format = Format::kMxfp8});
    }
    run(call.queue, AttentionForward{.qkv = acts.qkv,
                                     .heads = d.heads,
                                     .kv_heads = d.kv_heads,
                                     .head_dim = d.head_dim,
                                     .doc_begin = call.groups,
                                     .scale = scale_,
                                     .out = acts.attn,
                                     .lse = acts.lse});
  }
  linear_forward(call, *linears_.out, acts.attn, {}, {}, acts, s.projected);
}

void Block::route(const Call& call, LayerActs& acts) {
  run(call.queue, RouterLogits{.x = acts.mlp_in, .weight = router_->master, .logits = acts.router_logits});
  run(call.queue, Route{.logits = acts.router_logits,
                        .bias = router_bias_,
                        .kind = router_kind_,
                        .top_k = model_.moe.top_k,
                        .normalise = model_.moe.normalise,
                        .gate_scale = static_cast<float>(model_.moe.gate_scale),
                        .scores = acts.scores,
                        .experts = acts.experts,
                        .gates = acts.gates,
                        .offsets = acts.offsets,
                        .row_of = acts.row_of,
                        .token_of = acts.token_of,
                        .replay = acts.replay,
                        .differs = acts.replay_differs});
  if (!call.counting || call.router_sums.empty()) return;
  run(call.queue, RouterStats{.logits = acts.router_logits,
                              .scores = acts.scores,
                              .offsets = acts.offsets,
                              .kind = router_kind_,
                              .top_k = model_.moe.top_k,
                              .sums = call.router_sums,
                              .load = load_});
}

bool Block::codes_dispatch(const Call& call) const {
  return is_moe_ && dispatch_spec(call.pass.forward->dispatch).quantised();
}

TensorView Block::expert_input(const Call& call, const LayerActs& acts) const {
  return codes_dispatch(call) ? acts.guests : acts.mlp_in;
}

void Block::ffn_in(const Call& call, const TensorView& x, LayerActs& acts, const ForwardScratch& s,
                   bool rounding) {
  ScratchScope scope(call.scratch);
  const bool spread = is_moe_ && exchange_.spreads();
  RoundedRows rounded;
  if (rounding && !spread && !codes_dispatch(call)) {
    rounded = linears_.gate_up->rounded(call, scope, call.tokens);
  }
  run(call.queue, NormForward{.x = x,
                              .residual = s.projected,
                              .weight = mlp_norm_.master,
                              .eps = eps_,
                              .sum = acts.middle,
                              .out = acts.mlp_in,
                              .rstd = acts.mlp_rstd,
                              .rounded = rounded});
  if (!is_moe_) return linear_forward(call, *linears_.gate_up, acts.mlp_in, rounded, {}, acts, acts.gate_up);
  route(call, acts);
  if (spread) return;
  if (codes_dispatch(call)) {
    const Format format = call.pass.forward->dispatch;
    const DispatchScratch q = take_dispatch_scratch(call.dims, format, call.tokens, ArenaTake{call.scratch});
    encode(call, acts.mlp_in, q.own);
    decode(call, q.own, acts.guests);
  }
  if (rounded.empty()) {
    run(call.queue, PermuteRows{.x = expert_input(call, acts),
                                .token_of = acts.token_of,
                                .out = acts.expert_rows,
                                .row_of = acts.row_of});
    linear_forward(call, *linears_.gate_up, acts.expert_rows, {}, acts.offsets, acts, acts.gate_up);
  } else {  // a token's row is rounded alike for all its experts
    linears_.gate_up->forward_rounded(call, rounded, acts.offsets, acts.token_of, acts.gate_up);
  }
}

void Block::ffn_out(const Call& call, Linear& down, const TensorView& gate_up, const TensorView& offsets,
                    const LayerActs& acts, const TensorView& hidden, bool rounding, const TensorView& out) {
  ScratchScope scope(call.scratch);
  RoundedRows rounded;
  if (rounding) rounded = down.rounded(call, scope, hidden.dim(0));
  run(call.queue, SwigluForward{.gate_up = gate_up, .clamp = clamp_, .out = hidden, .rounded = rounded});
  linear_forward(call, down, hidden, rounded, offsets, acts, out);
}

}  // namespace fp4t
