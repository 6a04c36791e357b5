// A layer's experts where they are spread over ranks: every rank serves the tokens that come to its experts,
// its own among them, whether it has tokens itself or not. Forward: rows go out, FP32 partial sums come back.
// Backward mirrors it: gradients of the sums go out, gradients of the rows come back, and of the gates.
#include "engine/model/block.h"
#include "kernels/ops/run.h"

namespace fp4t {

namespace {

// A call on behalf of all ranks whose tokens are here.
Pass pass_of(const Call& call, uint32_t sample_id) {
  Pass pass = call.pass;
  pass.sample_id = sample_id;
  return pass;
}

Call call_of(const Call& call, const Pass& pass, bool counting) {
  return {call.queue,     call.scratch, call.dims,        pass,     counting, call.tokens,
          call.positions, call.groups,  call.router_sums, call.cos, call.sin, call.dispatch_stats};
}

QuantView first_rows(QuantView codes, int64_t count) {
  codes.rows = codes.padded_rows = count;
  codes.codes = codes.codes.rows(0, count);
  codes.block_scales = codes.block_scales.rows(0, count);
  if (!codes.tensor_scale.empty()) codes.tensor_scale = codes.tensor_scale.rows(0, count);
  return codes;
}

const KeptCodes& codes_of(const LayerActs& acts, const Linear& linear) {
  return acts.codes[static_cast<size_t>(linear.site().module)];
}

}  // namespace

// A code depends on its row alone, so any rank's are those of one rank.
void Block::encode(const Call& call, const TensorView& x, const QuantView& codes) const {
  Quantize op{};
  op.x = x;
  op.orientation = Orientation::kRow;
  if (call.counting) op.stats = call.dispatch_stats;
  op.out = codes;
  run(call.queue, op);
}

void Block::decode(const Call& call, const QuantView& codes, const TensorView& out) const {
  const bool by_row = codes.spec.scale_scope == ScaleScope::kRow;
  run(call.queue, Dequantize{.x = codes,
                             .offsets = {},
                             .scale = by_row ? DecodeScale::kRow : DecodeScale::kBlock,
                             .out = out,
                             .inexact = {}});
}

void Block::bring_codes(const Trip::Round& round, const TripScratch& t, const DispatchScratch& q) {
  exchange_.bring(round, q.own.codes, t.sent_tokens, q.sent.codes, q.guests.codes);
  exchange_.bring(round, q.own.block_scales, t.sent_tokens, q.sent.block_scales, q.guests.block_scales);
  if (q.own.tensor_scale.empty()) return;
  const auto column = [](const TensorView& v) { return v.reshape({v.elements(), 1}); };
  exchange_.bring(round, column(q.own.tensor_scale), t.sent_tokens, column(q.sent.tensor_scale),
                  column(q.guests.tensor_scale));
}

// Brings the round's tokens here and finds their rows.
Block::Guests Block::receive(const Call& call, const Trip::Round& round, LayerActs& acts,
                             const TripScratch& t, const DispatchScratch& q) {
  const bool coded = q.own.spec.quantised();
  if (coded) {
    bring_codes(round, t, q);
  } else {
    exchange_.bring(round, acts.mlp_in, t.sent_tokens, t.sent, acts.guests);
  }
  exchange_.bring(round, acts.gates, t.sent_tokens, t.sent_choices, acts.guest_gates);
  const int64_t count = round.num_guests();
  if (coded && count > 0) decode(call, first_rows(q.guests, count), acts.guests.rows(0, count));
  const TripSizes sizes = {count, call.dims.top_k, call.dims.experts, call.dims.expert_ranks};
  const std::vector<int32_t> chosen = exchange_.bring_choices(begun_, round);
  const GuestRows placed = place_guests(sizes, chosen.data(), exchange_.group_rank());
  const auto upload = [&](const std::vector<int32_t>& list, const TensorView& to) {
    FP4T_CHECK(static_cast<int64_t>(list.size()) <= to.elements(), list.size(), " entries, room for ",
               to.elements());
    call.queue.upload(to.data, list.data(), static_cast<int64_t>(list.size()) * 4);
  };
  upload(placed.experts, acts.guest_experts);
  upload(placed.row_of, acts.guest_row_of);
  upload(placed.offsets, acts.expert_offsets);
  upload(placed.guest_of, acts.guest_of);
  return {count, static_cast<int64_t>(placed.guest_of.size())};
}

void Block::permute_guests(const Call& call, const Guests& guests, const LayerActs& acts) {
  run(call.queue, PermuteRows{.x = acts.guests.rows(0, guests.count),
                              .token_of = acts.guest_of.rows(0, guests.rows),
                              .out = acts.expert_rows.rows(0, guests.rows)});
}

// Outputs of this rank's experts. The products take rows up to the last expert's end.
void Block::serve(const Call& call, const Guests& guests, LayerActs& acts) {
  permute_guests(call, guests, acts);
  linears_.gate_up->forward(call, acts.expert_rows, acts.expert_offsets, codes_of(acts, *linears_.gate_up),
                            acts.gate_up);
  run(call.queue, SwigluForward{.gate_up = acts.gate_up.rows(0, guests.rows),
                                .clamp = clamp_,
                                .out = acts.hidden.rows(0, guests.rows)});
  linears_.down->forward(call, acts.hidden, acts.expert_offsets, codes_of(acts, *linears_.down),
                         acts.expert_rows);
}

// What this rank's experts add to the guests' sums.
void Block::sum_here(const Call& call, const Guests& guests, const LayerActs& acts, const TensorView& gates,
                     const TensorView& out) {
  run(call.queue, CombineExperts{.y = acts.expert_rows,
                                 .row_of = acts.guest_row_of.rows(0, guests.count),
                                 .experts = acts.guest_experts.rows(0, guests.count),
                                 .gates = gates.empty() ? gates : gates.rows(0, guests.count),
                                 .num_experts = model_.moe.experts,
                                 .shared = {},
                                 .residual = {},
                                 .out = out.rows(0, guests.count),
                                 .partial = true});
}

// The root of the tree: sums over ranks of what came back, and the addends.
void Block::sum_over_ranks(const Call& call, const TripScratch& t, const TensorView& returned,
                           const TensorView& shared, const TensorView& residual, const TensorView& out) {
  run(call.queue, CombineExperts{.y = returned,
                                 .row_of = t.place_of,
                                 .experts = t.rank_of,
                                 .gates = {},
                                 .num_experts = call.dims.expert_ranks,
                                 .shared = shared,
                                 .residual = residual,
                                 .out = out,
                                 .partial = true});
}

void Block::upload_places(const Call& call, const TripScratch& t) {
  const Trip& trip = begun_.trip;
  call.queue.upload(t.place_of.data, trip.place_of.data(), t.place_of.bytes());
  call.queue.upload(t.rank_of.data, trip.rank_of.data(), t.rank_of.bytes());
}

void Block::upload_sent(const Call& call, const TripScratch& t) {
  const std::vector<int32_t>& sent = begun_.trip.sent;
  call.queue.upload(t.sent_tokens.data, sent.data(), static_cast<int64_t>(sent.size() * sizeof(int32_t)));
}

void Block::spread_forward(const Call& call, LayerActs& acts, const TripScratch& t) {
  begun_ = exchange_.begin(acts.experts, call.pass.sample_id);
  upload_sent(call, t);
  const Pass pass = pass_of(call, begun_.sample_id);
  const Call serving = call_of(call, pass, call.counting);
  const DispatchScratch q =
      take_dispatch_scratch(call.dims, pass.forward->dispatch, call.tokens, ArenaTake{call.scratch});
  if (q.own.rows > 0) encode(call, acts.mlp_in, q.own);
  for (const Trip::Round& round : begun_.trip.rounds) {
    last_guests_ = receive(call, round, acts, t, q);
    if (last_guests_.count > 0) {
      serve(serving, last_guests_, acts);
      sum_here(call, last_guests_, acts, acts.guest_gates, t.partial);
    }
    exchange_.bring_back(round, t.partial, t.returned);
  }
  upload_places(call, t);
}

void Block::serve_backward(const Call& call, const Guests& guests, LayerActs& acts, const FfnScratch& f,
                           const TripScratch& t) {
  run(call.queue, CombineExpertsBackward{.dout = t.guest_dout.rows(0, guests.count),
                                         .y = acts.expert_rows,
                                         .row_of = acts.guest_row_of.rows(0, guests.count),
                                         .gates = acts.guest_gates.rows(0, guests.count),
                                         .dy = acts.expert_rows,
                                         .dgates = t.guest_dgates.rows(0, guests.count),
                                         .partial = true});
  linears_.down->backward(call, acts.hidden, codes_of(acts, *linears_.down), acts.expert_rows,
                          acts.expert_offsets, f.dhidden);
  swiglu_backward(call, acts.gate_up.rows(0, guests.rows), f.dhidden.rows(0, guests.rows));
  if (codes_of(acts, *linears_.gate_up).wgrad.empty()) permute_guests(call, guests, acts);
  linears_.gate_up->backward(call, acts.expert_rows, codes_of(acts, *linears_.gate_up), acts.gate_up,
                             acts.expert_offsets, acts.expert_rows);
  sum_here(call, guests, acts, {}, t.partial);
}

void Block::spread_backward(const Call& call, LayerActs& acts, const TensorView& dout, const FfnScratch& f,
                            const TripScratch& t) {
  const Pass pass = pass_of(call, begun_.sample_id);
  const Call serving = call_of(call, pass, call.counting), again = call_of(call, pass, false);
  const Trip& trip = begun_.trip;
  const bool several = trip.rounds.size() > 1;  // of which the forward has kept the last alone
  const DispatchScratch q =
      take_dispatch_scratch(call.dims, pass.forward->dispatch, call.tokens, ArenaTake{call.scratch});
  if (several && q.own.rows > 0) encode(again, acts.mlp_in, q.own);
  upload_sent(call, t);
  for (const Trip::Round& round : trip.rounds) {
    if (several) {
      last_guests_ = receive(call, round, acts, t, q);
      if (last_guests_.count > 0) serve(again, last_guests_, acts);
    }
    exchange_.bring(round, dout, t.sent_tokens, t.sent, t.guest_dout);
    if (last_guests_.count > 0) serve_backward(serving, last_guests_, acts, f, t);
    exchange_.bring_back(round, t.partial, t.returned);
    exchange_.bring_back(round, t.guest_dgates, t.returned_dgates);
  }
  if (call.tokens == 0) return;
  upload_places(call, t);
  // Of every gate one rank has the gradient, the others 0.
  sum_over_ranks(call, t, t.returned_dgates, {}, {}, f.dgates);
}

}  // namespace fp4t
