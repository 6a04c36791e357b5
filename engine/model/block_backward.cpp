#include "engine/model/block.h"
#include "kernels/ops/run.h"

namespace fp4t {

namespace {
// One of the block's linear layers with the codes that its forward kept.
void linear_backward(const Call& call, Linear& linear, const TensorView& x, const LayerActs& acts,
                     const TensorView& dy, const TensorView& offsets, const TensorView& dx) {
  linear.backward(call, x, acts.codes[static_cast<size_t>(linear.site().module)], dy, offsets, dx);
}
}  // namespace

void Block::backward(const Call& call, const TensorView& x, LayerActs& acts, const StreamScratch& s,
                     const std::function<void()>& meanwhile) {
  if (meanwhile && !(is_moe_ && exchange_.spreads())) meanwhile();
  if (call.tokens == 0) {
    if (!is_moe_ || !exchange_.spreads()) return;
    ScratchScope scope(call.scratch);
    const FfnScratch f = take_ffn_scratch(call.dims, true, 0, ArenaTake{call.scratch});
    spread_backward(call, acts, s.dstream, f, take_trip_scratch(call.dims, 0, true, ArenaTake{call.scratch}),
                    meanwhile);
    return exchange_.finish();
  }
  if (is_moe_) {
    moe_backward(call, acts, s, meanwhile);
  } else {
    dense_backward(call, acts, s);
  }
  // The residual stream passes both norms by; its gradient is updated in place.
  run(call.queue, NormBackward{.x = acts.middle,
                               .weight = mlp_norm_.master,
                               .rstd = acts.mlp_rstd,
                               .dout = s.dnorm,
                               .dresidual = s.dstream,
                               .dx = s.dstream,
                               .dweight = mlp_norm_.gradient});
  attention_backward(call, x, acts, s);
}

// The gradient takes the place of gate and up, which nothing reads after it.
void Block::swiglu_backward(const Call& call, const TensorView& gate_up, const TensorView& dout) const {
  run(call.queue, SwigluBackward{.gate_up = gate_up, .clamp = clamp_, .dout = dout, .dgate_up = gate_up});
}

void Block::dense_backward(const Call& call, LayerActs& acts, const StreamScratch& s) {
  ScratchScope scope(call.scratch);
  const FfnScratch f = take_ffn_scratch(call.dims, false, call.tokens, ArenaTake{call.scratch});
  linear_backward(call, *linears_.down, acts.hidden, acts, s.dstream, {}, f.dhidden);
  swiglu_backward(call, acts.gate_up, f.dhidden);
  linear_backward(call, *linears_.gate_up, acts.mlp_in, acts, acts.gate_up, {}, s.dnorm);
}

// d total / d logits of gates, balance loss and z-loss. Both losses are sums over tokens in RouterStats,
// so coefficient * token_weight makes them means over the trained tokens of the step, whatever the split
// into micro-batches; only the expert fractions inside `aux` are those of the micro-batch.
void Block::router_backward(const Call& call, const LayerActs& acts, const FfnScratch& f) {
  const BalanceSpec& balance = model_.moe.balance;
  run(call.queue,
      RouteBackward{.logits = acts.router_logits,
                    .scores = acts.scores,
                    .experts = acts.experts,
                    .offsets = acts.offsets,
                    .dgates = f.dgates,
                    .kind = router_kind_,
                    .normalise = model_.moe.normalise,
                    .gate_scale = static_cast<float>(model_.moe.gate_scale),
                    .aux_coefficient = static_cast<float>(balance.aux_loss * call.pass.token_weight),
                    .z_coefficient = static_cast<float>(balance.z_loss * call.pass.token_weight),
                    .dlogits = f.drouter});
  run(call.queue, RouterLogitsBackward{.x = acts.mlp_in,
                                       .weight = router_->master,
                                       .dlogits = f.drouter,
                                       .dx = f.drouter_in,
                                       .dweight = router_->gradient});
}

void Block::local_experts_backward(const Call& call, LayerActs& acts, const TensorView& dout,
                                   const FfnScratch& f) {
  run(call.queue, CombineExpertsBackward{.dout = dout,
                                         .y = acts.expert_rows,
                                         .row_of = acts.row_of,
                                         .gates = acts.gates,
                                         .dy = acts.expert_rows,
                                         .dgates = f.dgates});
  linear_backward(call, *linears_.down, acts.hidden, acts, acts.expert_rows, acts.offsets, f.dhidden);
  swiglu_backward(call, acts.gate_up, f.dhidden);
  if (acts.codes[static_cast<size_t>(Module::kExpertsGateUp)].wgrad.empty()) {
    run(call.queue, PermuteRows{.x = expert_input(call, acts),
                                .token_of = acts.token_of,
                                .out = acts.expert_rows,
                                .row_of = acts.row_of});
  }
  linear_backward(call, *linears_.gate_up, acts.expert_rows, acts, acts.gate_up, acts.offsets,
                  acts.expert_rows);
}

void Block::moe_backward(const Call& call, LayerActs& acts, const StreamScratch& s,
                         const std::function<void()>& meanwhile) {
  ScratchScope scope(call.scratch);
  const FfnScratch f = take_ffn_scratch(call.dims, true, call.tokens, ArenaTake{call.scratch});
  const TripScratch t = take_trip_scratch(call.dims, call.tokens, true, ArenaTake{call.scratch});
  if (exchange_.spreads()) {
    spread_backward(call, acts, s.dstream, f, t, meanwhile);
  } else {
    local_experts_backward(call, acts, s.dstream, f);
  }
  if (linears_.shared_down) {
    linear_backward(call, *linears_.shared_down, acts.shared_hidden, acts, s.dstream, {}, f.dshared_hidden);
    swiglu_backward(call, acts.shared_gate_up, f.dshared_hidden);
    linear_backward(call, *linears_.shared_gate_up, acts.mlp_in, acts, acts.shared_gate_up, {}, f.dshared);
  }
  if (exchange_.spreads()) {
    exchange_.finish();
    // Of every gate one rank has the gradient, the others 0.
    sum_over_ranks(call, acts, t.returned_dgates, {}, {}, f.dgates);
  }
  router_backward(call, acts, f);
  if (exchange_.spreads()) return sum_over_ranks(call, acts, t.returned, f.dshared, f.drouter_in, s.dnorm);
  // Experts, shared expert and router meet before the norm: one sum in FP32, rounded once.
  run(call.queue, CombineExperts{.y = acts.expert_rows,
                                 .row_of = acts.row_of,
                                 .experts = acts.experts,
                                 .gates = {},
                                 .num_experts = model_.moe.experts,
                                 .shared = f.dshared,
                                 .residual = f.drouter_in,
                                 .out = s.dnorm});
}

void Block::attention_backward(const Call& call, const TensorView& x, LayerActs& acts,
                               const StreamScratch& s) {
  const ModelDims& d = call.dims;
  {
    ScratchScope scope(call.scratch);
    const AttentionScratch a = take_attention_scratch(d, call.tokens, ArenaTake{call.scratch});
    linear_backward(call, *linears_.out, acts.attn, acts, s.dstream, {}, a.dattn);
    run(call.queue, AttentionBackward{.qkv = acts.qkv,
                                      .heads = d.heads,
                                      .kv_heads = d.kv_heads,
                                      .head_dim = d.head_dim,
                                      .doc_begin = call.groups,
                                      .scale = scale_,
                                      .out = acts.attn,
                                      .lse = acts.lse,
                                      .dout = a.dattn,
                                      .dqkv = a.dqkv});
    const bool normed = d.qk_norm;
    // Without weights the backward needs shapes alone; the rotated rows stand in for its input.
    run(call.queue, QkNormRopeBackward{.qkv = normed ? acts.projected_qkv : acts.qkv,
                                       .heads = d.heads,
                                       .kv_heads = d.kv_heads,
                                       .head_dim = d.head_dim,
                                       .positions = call.positions,
                                       .cos = call.cos,
                                       .sin = call.sin,
                                       .q_weight = normed ? q_norm_->master : TensorView{},
                                       .k_weight = normed ? k_norm_->master : TensorView{},
                                       .rstd = acts.qk_rstd,
                                       .dout = a.dqkv,
                                       .dqkv = a.dqkv,
                                       .dq_weight = normed ? q_norm_->gradient : TensorView{},
                                       .dk_weight = normed ? k_norm_->gradient : TensorView{}});
    linear_backward(call, *linears_.qkv, acts.attn_in, acts, a.dqkv, {}, s.dnorm);
  }
  run(call.queue, NormBackward{.x = x,
                               .weight = attn_norm_.master,
                               .rstd = acts.attn_rstd,
                               .dout = s.dnorm,
                               .dresidual = s.dstream,
                               .dx = s.dstream,
                               .dweight = attn_norm_.gradient});
}

}  // namespace fp4t
