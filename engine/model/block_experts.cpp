// A layer's experts where they are spread over ranks: every rank serves the tokens that come to its experts,
// its own among them, whether it has tokens itself or not. Forward: rows go out, FP32 partial sums come back.
// Backward mirrors it: gradients of the sums go out, gradients of the rows come back, and of the gates.
#include <numeric>

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

Block::Chunk Block::chunk_of(const LayerActs& acts, int64_t index) const {
  const auto sum = [](const std::vector<int64_t>& list) {
    return std::accumulate(list.begin(), list.end(), int64_t{0});
  };
  Chunk c{};
  c.index = index;
  for (int64_t i = 0; i < index; ++i) {
    const GuestRows::Chunk& before = placed_.chunks[static_cast<size_t>(i)];
    c.first_came += sum(before.come);
    c.first_leaving += sum(before.leave);
  }
  const GuestRows::Chunk& chunk = placed_.chunks[static_cast<size_t>(index)];
  c.first_row = chunk.first_row;
  c.rows = chunk.rows;
  c.came = sum(chunk.come);
  c.leaving = sum(chunk.leave);
  c.offsets = acts.expert_offsets.rows(chunk.first_expert + index, chunk.experts + 1);
  return c;
}

Call Block::serving(const Call& call, const Chunk& chunk) const {
  const GuestRows::Chunk& c = placed_.chunks[static_cast<size_t>(chunk.index)];
  Call of_chunk = call_of(call, call.pass, call.counting);
  of_chunk.experts = {c.first_expert, c.experts, placed_.bounds.data()};
  return of_chunk;
}

void Block::receive(const Call& call, Trip::Round& round, LayerActs& acts, const TripScratch& t,
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
  fields.push_back({acts.gates, t.sent_choices, acts.guest_gates});
  exchange_.bring(round, fields, t.sent_tokens);
  placed_ = exchange_.bring_choices(begun_, round, static_cast<int32_t>(call.dims.receive_rows));
  const auto upload = [&](const std::vector<int32_t>& list, const TensorView& to) {
    FP4T_CHECK(static_cast<int64_t>(list.size()) <= to.elements(), list.size(), " entries, room for ",
               to.elements());
    call.queue.upload(to.data, list.data(), static_cast<int64_t>(list.size()) * 4);
  };
  upload(placed_.experts, acts.guest_experts);
  upload(placed_.row_of, acts.guest_row_of);
  upload(placed_.offsets, acts.expert_offsets);
  upload(placed_.guest_of, acts.guest_of);
  upload(placed_.choice_of, acts.guest_choice);
  upload(placed_.leaving, t.leaving);
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

void Block::serve_round(const Call& call, LayerActs& acts, const DispatchScratch& q,
                        const std::function<void(const Chunk&)>& then) {
  for (int64_t i = 0; i < begun_.chunks; ++i) {
    const Chunk chunk = chunk_of(acts, i);
    exchange_.await(i);
    if (q.own.spec.quantised() && chunk.came > 0) {
      decode(call, code_rows(q.guests, chunk.first_came, chunk.came),
             acts.guests.rows(chunk.first_came, chunk.came));
    }
    if (chunk.rows > 0) serve(call, chunk, acts);
    then(chunk);
  }
}

void Block::spread_forward(const Call& call, LayerActs& acts, const TripScratch& t) {
  begun_ = exchange_.begin(acts.experts, call.pass.sample_id);
  upload_sent(call, t);
  const Pass pass = pass_of(call, begun_.sample_id);
  const Call serving = call_of(call, pass, call.counting);
  const DispatchScratch q =
      take_dispatch_scratch(call.dims, pass.forward->dispatch, call.tokens, ArenaTake{call.scratch});
  if (q.own.rows > 0) encode(call, acts.mlp_in, q.own);
  for (Trip::Round& round : begun_.trip.rounds) {
    exchange_.finish();  // of the round before
    receive(call, round, acts, t, q);
    serve_round(serving, acts, q, [&](const Chunk& chunk) {
      if (chunk.leaving > 0) {
        const TensorView order = t.leaving.rows(chunk.first_leaving, chunk.leaving),
                         gates = t.leaving_gates.rows(chunk.first_leaving, chunk.leaving);
        run(call.queue, PermuteRows{.x = acts.guest_gates, .token_of = order, .out = gates});
        sum_here(serving, chunk, acts, t.leaving_gates, t.partial);
      }
      exchange_.bring_back(round, chunk.index, {{t.partial, t.returned}});
    });
  }
  upload_places(call, t);
}

// Gradients of the chunk's experts and of what they were given.
void Block::serve_backward(const Call& call, const Chunk& chunk, LayerActs& acts, const FfnScratch& f,
                           const TripScratch& t) {
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
  if (codes_of(acts, *linears_.gate_up).wgrad.empty()) permute_guests(call, chunk, acts);
  linears_.gate_up->backward(of_chunk, rows(acts.expert_rows), codes_of(acts, *linears_.gate_up),
                             rows(acts.gate_up), chunk.offsets, rows(acts.expert_rows));
}

void Block::spread_backward(const Call& call, LayerActs& acts, const TensorView& dout, const FfnScratch& f,
                            const TripScratch& t) {
  const Pass pass = pass_of(call, begun_.sample_id);
  const Call serving = call_of(call, pass, call.counting), again = call_of(call, pass, false);
  Trip& trip = begun_.trip;
  const bool several = trip.rounds.size() > 1;  // of which the forward has kept the last alone
  const DispatchScratch q =
      take_dispatch_scratch(call.dims, pass.forward->dispatch, call.tokens, ArenaTake{call.scratch});
  if (several && q.own.rows > 0) encode(again, acts.mlp_in, q.own);
  upload_sent(call, t);
  call.queue.fill_bytes(t.row_dgates.data, 0, t.row_dgates.bytes());  // the last stays 0
  for (Trip::Round& round : trip.rounds) {
    exchange_.finish();
    if (several) {
      receive(call, round, acts, t, q);
      serve_round(again, acts, q, [](const Chunk&) {});
      exchange_.finish();
    }
    exchange_.bring(round, {{dout, t.sent, t.guest_dout}}, t.sent_tokens);
    for (int64_t i = 0; i < begun_.chunks; ++i) {
      const Chunk chunk = chunk_of(acts, i);
      exchange_.await(i);
      if (chunk.rows > 0) serve_backward(serving, chunk, acts, f, t);
      if (chunk.leaving > 0) {
        sum_here(serving, chunk, acts, {}, t.partial);
        const TensorView rows = acts.guest_row_of.rows(chunk.first_leaving, chunk.leaving),
                         dgates = t.guest_dgates.rows(chunk.first_leaving, chunk.leaving);
        run(call.queue,
            PermuteRows{
                .x = t.row_dgates, .token_of = rows.reshape({rows.elements()}), .out = column(dgates)});
      }
      exchange_.bring_back(round, i, {{t.partial, t.returned}, {t.guest_dgates, t.returned_dgates}});
    }
  }
  if (call.tokens > 0) upload_places(call, t);
}

}  // namespace fp4t
