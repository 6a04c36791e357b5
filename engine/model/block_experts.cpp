// A layer's experts where they are spread over ranks: every rank serves the tokens that come to its experts,
// its own among them, whether it has tokens itself or not. Forward: rows go out, FP32 partial sums come back.
// Backward mirrors it: gradients of the sums go out, gradients of the rows come back, and of the gates.
#include <utility>

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
          call.positions, call.groups,  call.router_sums, call.cos, call.sin, call.dispatch_stats,
          call.experts};
}

// Rows of codes that are not cut into groups and depend on their row alone.
QuantView code_rows(QuantView codes, int64_t begin, int64_t count) {
  codes.rows = codes.padded_rows = count;
  codes.codes = codes.codes.rows(begin, count);
  codes.block_scales = codes.block_scales.rows(begin, count);
  if (!codes.tensor_scale.empty()) codes.tensor_scale = codes.tensor_scale.rows(begin, count);
  return codes;
}

TensorView column(const TensorView& v) { return v.reshape({v.elements(), 1}); }

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

Block::Chunk Block::chunk_of(const Trip::Round& round, const LayerActs& acts, size_t index) const {
  const Trip::Chunk& c = round.chunks[index];
  return {c, acts.expert_offsets.rows(c.first_expert + c.index, c.experts + 1), round.bounds.data()};
}

Call Block::serving(const Call& call, const Chunk& chunk) const {
  Call of_chunk = call_of(call, call.pass, call.counting);
  of_chunk.experts = {chunk.first_expert, chunk.experts, chunk.bounds};
  return of_chunk;
}

void Block::receive(const Call& call, const Trip::Round& round, LayerActs& acts, const TripScratch& t,
                    const DispatchScratch& q) {
  std::vector<ExpertExchange::Field> fields;
  if (q.own.spec.quantised()) {
    fields.push_back({q.own.codes, q.sent.codes, q.guests.codes});
    fields.push_back({q.own.block_scales, q.sent.block_scales, q.guests.block_scales});
    if (!q.own.tensor_scale.empty()) {
      fields.push_back(
          {column(q.own.tensor_scale), column(q.sent.tensor_scale), column(q.guests.tensor_scale)});
    }
  } else {
    fields.push_back({acts.mlp_in, t.sent, acts.guests});
  }
  fields.push_back({acts.gates, t.sent_gates, acts.guest_gates});
  exchange_.bring(round, fields, acts.sent, {acts.experts, t.asked_experts, t.guest_experts}, acts.asked);
  exchange_.place(begun_.trip, round, acts, t, call.dims.receive_rows);
}

void Block::permute_guests(const Call& call, const Chunk& chunk, const LayerActs& acts) {
  run(call.queue, PermuteRows{.x = acts.guests,
                              .token_of = acts.guest_of.rows(chunk.first_row, chunk.rows),
                              .out = acts.expert_rows.rows(chunk.first_row, chunk.rows)});
}

// Outputs of the chunk's experts.
void Block::serve(const Call& call, const Chunk& chunk, LayerActs& acts) {
  const auto rows = [&](const TensorView& v) { return v.rows(chunk.first_row, chunk.rows); };
  const Call of_chunk = serving(call, chunk);
  permute_guests(call, chunk, acts);
  linears_.gate_up->forward(of_chunk, rows(acts.expert_rows), chunk.offsets,
                            codes_of(acts, *linears_.gate_up), rows(acts.gate_up));
  run(call.queue, SwigluForward{.gate_up = rows(acts.gate_up), .clamp = clamp_, .out = rows(acts.hidden)});
  linears_.down->forward(of_chunk, rows(acts.hidden), chunk.offsets, codes_of(acts, *linears_.down),
                         rows(acts.expert_rows));
}

// What this rank's experts add to the sums of the guests that leave with the chunk.
void Block::sum_here(const Call& call, const Chunk& chunk, const LayerActs& acts, const TensorView& gates,
                     const TensorView& out) {
  const auto leaving = [&](const TensorView& v) { return v.rows(chunk.first_leaving, chunk.leaving); };
  run(call.queue, CombineExperts{.y = acts.expert_rows,
                                 .row_of = leaving(acts.guest_row_of),
                                 .experts = leaving(acts.guest_experts),
                                 .gates = gates.empty() ? gates : leaving(gates),
                                 .num_experts = model_.moe.experts,
                                 .shared = {},
                                 .residual = {},
                                 .out = leaving(out),
                                 .partial = true});
}

// The root of the tree: sums over ranks of what came back, and the addends.
void Block::sum_over_ranks(const Call& call, const LayerActs& acts, const TensorView& returned,
                           const TensorView& shared, const TensorView& residual, const TensorView& out) {
  run(call.queue, CombineExperts{.y = returned,
                                 .row_of = acts.place_of,
                                 .experts = acts.rank_of,
                                 .gates = {},
                                 .num_experts = call.dims.expert_ranks,
                                 .shared = shared,
                                 .residual = residual,
                                 .out = out,
                                 .partial = true});
}

void Block::serve_round(const Call& call, const Trip::Round& round, LayerActs& acts, const DispatchScratch& q,
                        const std::function<void(const Chunk&)>& then) {
  for (size_t i = 0; i < round.chunks.size(); ++i) {
    const Chunk chunk = chunk_of(round, acts, i);
    exchange_.await(chunk.index);
    if (q.own.spec.quantised() && chunk.came > 0) {
      decode(call, code_rows(q.guests, chunk.first_came, chunk.came),
             acts.guests.rows(chunk.first_came, chunk.came));
    }
    if (chunk.rows > 0) serve(call, chunk, acts);
    then(chunk);
  }
}

// The guests' gates in the order in which they leave.
TensorView Block::leaving_gates(const Call& call, const Chunk& chunk, const LayerActs& acts,
                                const TripScratch& t) {
  if (begun_.trip.split.chunks == 1) return acts.guest_gates;  // as they came
  run(call.queue, PermuteRows{.x = acts.guest_gates,
                              .token_of = t.leaving.rows(chunk.first_leaving, chunk.leaving),
                              .out = t.leaving_gates.rows(chunk.first_leaving, chunk.leaving)});
  return t.leaving_gates;
}

void Block::spread_forward(const Call& call, LayerActs& acts, const TripScratch& t) {
  begun_ = exchange_.begin(acts, t, call.pass.sample_id);
  const Pass pass = pass_of(call, begun_.sample_id);
  const Call serving = call_of(call, pass, call.counting);
  const DispatchScratch q =
      take_dispatch_scratch(call.dims, pass.forward->dispatch, call.tokens, ArenaTake{call.scratch});
  if (q.own.rows > 0) encode(call, acts.mlp_in, q.own);
  for (const Trip::Round& round : begun_.trip.rounds) {
    exchange_.finish();  // of the round before
    receive(call, round, acts, t, q);
    serve_round(serving, round, acts, q, [&](const Chunk& chunk) {
      if (chunk.leaving > 0) {
        sum_here(serving, chunk, acts, leaving_gates(call, chunk, acts, t), t.partial);
      }
      exchange_.bring_back(round, chunk.index, {{t.partial, t.returned}});
    });
  }
}

// Gradients of the chunk's experts and of what they were given.
void Block::serve_backward(const Call& call, const Chunk& chunk, LayerActs& acts, const FfnScratch& f,
                           const TripScratch& t, const std::function<void()>& then) {
  const auto rows = [&](const TensorView& v) { return v.rows(chunk.first_row, chunk.rows); };
  const Call of_chunk = serving(call, chunk);
  run(call.queue,
      PermuteRows{
          .x = column(acts.guest_gates), .token_of = rows(acts.guest_choice), .out = rows(t.row_gates)});
  run(call.queue, CombineExpertsBackward{.dout = t.guest_dout,
                                         .y = rows(acts.expert_rows),
                                         .row_of = {},
                                         .gates = rows(t.row_gates),
                                         .dy = rows(acts.expert_rows),
                                         .dgates = rows(t.row_dgates),
                                         .dout_of = rows(acts.guest_of)});
  linears_.down->backward(of_chunk, rows(acts.hidden), codes_of(acts, *linears_.down), rows(acts.expert_rows),
                          chunk.offsets, rows(f.dhidden));
  swiglu_backward(call, rows(acts.gate_up), rows(f.dhidden));
  // expert_rows get the rows' gradients, and are given the rows again for the weights'. Where a later chunk
  // has yet to sum these gradients, the weights' come first.
  const KeptCodes& codes = codes_of(acts, *linears_.gate_up);
  const auto give_rows = [&] {
    if (codes.wgrad.empty()) permute_guests(call, chunk, acts);
  };
  if (chunk.index + 1 < begun_.trip.split.chunks && codes.wgrad.empty()) {
    give_rows();
    linears_.gate_up->backward(of_chunk, rows(acts.expert_rows), codes, rows(acts.gate_up), chunk.offsets,
                               rows(acts.expert_rows));
    return then();
  }
  const auto between = [&] {
    then();
    give_rows();
  };
  linears_.gate_up->backward_dx_first(of_chunk, rows(acts.expert_rows), codes, rows(acts.gate_up),
                                      chunk.offsets, rows(acts.expert_rows), between);
}

void Block::sum_gradients(const Call& call, const Chunk& chunk, const LayerActs& acts, const TripScratch& t) {
  sum_here(call, chunk, acts, {}, t.partial);
  const TensorView rows = acts.guest_row_of.rows(chunk.first_leaving, chunk.leaving),
                   dgates = t.guest_dgates.rows(chunk.first_leaving, chunk.leaving);
  run(call.queue,
      PermuteRows{.x = t.row_dgates, .token_of = rows.reshape({rows.elements()}), .out = column(dgates)});
}

void Block::spread_backward(const Call& call, LayerActs& acts, const TensorView& dout, const FfnScratch& f,
                            const TripScratch& t, std::function<void()> meanwhile) {
  const Pass pass = pass_of(call, begun_.sample_id);
  const Call serving = call_of(call, pass, call.counting), again = call_of(call, pass, false);
  const Trip& trip = begun_.trip;
  const bool several = trip.rounds.size() > 1;  // of which the forward has kept the last alone
  const DispatchScratch q =
      take_dispatch_scratch(call.dims, pass.forward->dispatch, call.tokens, ArenaTake{call.scratch});
  if (several && q.own.rows > 0) encode(again, acts.mlp_in, q.own);
  call.queue.fill_bytes(t.row_dgates.data, 0, t.row_dgates.bytes());  // the last stays 0
  for (const Trip::Round& round : trip.rounds) {
    exchange_.finish();
    if (several) {
      receive(call, round, acts, t, q);
      serve_round(again, round, acts, q, [](const Chunk&) {});
      exchange_.finish();
    }
    exchange_.bring(round, {{dout, t.sent, t.guest_dout}}, acts.sent);
    for (size_t i = 0; i < round.chunks.size(); ++i) {
      const Chunk chunk = chunk_of(round, acts, i);
      exchange_.await(chunk.index);
      if (meanwhile && i + 1 == round.chunks.size()) std::exchange(meanwhile, {})();
      const auto give_back = [&] {
        if (chunk.leaving > 0) sum_gradients(serving, chunk, acts, t);
        exchange_.bring_back(round, chunk.index,
                             {{t.partial, t.returned}, {t.guest_dgates, t.returned_dgates}});
      };
      if (chunk.rows == 0) {
        give_back();
      } else {
        serve_backward(serving, chunk, acts, f, t, give_back);
      }
    }
  }
  if (meanwhile) meanwhile();  // nobody has sent anything
}

}  // namespace fp4t
