// What the scratch arena holds beside the operands of products (operands.h): blocks that live within one
// forward or backward of a block of the model. As in step_layout.h, memory.cpp prices and engine/model
// allocates.
//
// Shape legend: T tokens of a call, R rows of the experts, T * top_k of them where they lie on this rank
// alone, D hidden, E experts. Where they are spread over ranks: X ranks, L experts on each, G guests at most
// (tokens that came to this rank's experts), S tokens sent, one a (token, rank).
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/plan/dims.h"
#include "engine/plan/operands.h"
#include "engine/plan/plan.h"
#include "kernels/base/tensor.h"
#include "kernels/formats/quant.h"

namespace fp4t {

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
  TensorView counts, first_row;          // I32 of DispatchTokens, I64 [X]
  TensorView asked_experts, sent;        // I32 [S, k], act [S, D]: on their way
  TensorView sent_gates;                 // F32 [S, k]: likewise
  TensorView guest_experts, come_from;   // I32 [G, k]: what guests chose, by rank and token; I32 [X]
  TensorView leaving, leaving_gates;     // I32 [G], F32 [G, k]: guests in the order in which their sums leave
  TensorView guest_dout, guest_dgates;   // act [G, D], as they came, and F32 [G, k], as they leave: backward
  TensorView row_gates, row_dgates;      // F32 [R, 1], [R + 1, 1], whose last is 0: backward
  TensorView partial;                    // F32 [G, D]
  TensorView returned, returned_dgates;  // F32 [S, D], [S, k]
};
template <class Take>
TripScratch take_trip_scratch(const ModelDims& d, int64_t tokens, bool backward, Take&& take) {
  TripScratch s;
  if (!d.spreads_experts()) return s;
  const ExpertSplit split = split_of(d);
  const int64_t sent = tokens * split.visits_of_token(d.top_k), guests = d.receive_rows;
  s.counts = take("experts of other ranks", DType::kI32, {split.num_counts()});
  s.first_row = take("experts of other ranks", DType::kI64, {split.ranks});
  s.asked_experts = take("experts of other ranks", DType::kI32, {sent, d.top_k});
  s.sent = take("experts of other ranks", d.act, {sent, d.hidden});
  s.sent_gates = take("experts of other ranks", DType::kF32, {sent, d.top_k});
  s.guest_experts = take("experts of other ranks", DType::kI32, {guests, d.top_k});
  s.come_from = take("experts of other ranks", DType::kI32, {split.ranks});
  s.leaving = take("experts of other ranks", DType::kI32, {guests});
  s.leaving_gates = take("experts of other ranks", DType::kF32, {guests, d.top_k});
  s.partial = take("experts of other ranks", DType::kF32, {guests, d.hidden});
  s.returned = take("experts of other ranks", DType::kF32, {sent, d.hidden});
  if (!backward) return s;
  s.guest_dout = take("experts of other ranks", d.act, {guests, d.hidden});
  s.guest_dgates = take("experts of other ranks", DType::kF32, {guests, d.top_k});
  s.row_gates = take("experts of other ranks", DType::kF32, {guests, 1});
  s.row_dgates = take("experts of other ranks", DType::kF32, {guests + 1, 1});
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
  s.sent = codes(tokens * split_of(d).visits_of_token(d.top_k));
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
