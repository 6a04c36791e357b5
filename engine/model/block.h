// One transformer block: x + attention(norm(x)), then + FFN(norm(.)), where the FFN is dense or a mixture
// of experts. Forward and backward by hand (DESIGN.md sections 4 and 6).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/model/call.h"
#include "engine/model/expert_exchange.h"
#include "engine/model/linear.h"
#include "engine/model/params.h"
#include "engine/plan/scratch_layout.h"
#include "engine/plan/step_layout.h"
#include "kernels/ops/moe.h"

namespace fp4t {

// The sites of one layer by module; null where the layer has none.
struct BlockLinears {
  std::unique_ptr<Linear> qkv, out;       // attention
  std::unique_ptr<Linear> gate_up, down;  // dense or expert FFN
  std::unique_ptr<Linear> shared_gate_up, shared_down;
};

class Block {
 public:
  // `load` I64 [E]: the layer's counter of tokens by expert (MoE layers).
  Block(const Plan& plan, int64_t layer, ParamSet& params, ExpertExchange& exchange, BlockLinears linears,
        const TensorView& load);

  // Where experts are spread, all ranks of a group call forward and backward for every layer; one without
  // tokens (T = 0) serves the others' and does no more.
  // out [T, D] from x [T, D]. With `cache` the keys and values go there and attention reads it.
  void forward(const Call& call, const TensorView& x, LayerActs& acts, const KvCacheView* cache,
               const TensorView& out);

  // `s.dstream` holds the gradient of the block's output and gets that of its input. Consumes `acts`.
  // `meanwhile`, where there is one: what else travels, begun once; behind the gradients of sums that this
  // block's experts wait for, those of a first round.
  void backward(const Call& call, const TensorView& x, LayerActs& acts, const StreamScratch& s,
                const std::function<void()>& meanwhile = {});

  std::vector<Linear*> linears() const;

 private:
  void attention_forward(const Call& call, const TensorView& x, LayerActs& acts, const KvCacheView* cache,
                         const ForwardScratch& s);
  // From the sum with attention's output to gate_up (of experts that are spread: to the choice of experts),
  // and from there to `out`.
  void ffn_in(const Call& call, const TensorView& x, LayerActs& acts, const ForwardScratch& s, bool rounding);
  void ffn_out(const Call& call, Linear& down, const TensorView& gate_up, const TensorView& offsets,
               const LayerActs& acts, const TensorView& hidden, bool rounding, const TensorView& out);
  // What experts on this rank alone read: the tokens as dispatch leaves them.
  TensorView expert_input(const Call& call, const LayerActs& acts) const;
  bool codes_dispatch(const Call& call) const;
  void route(const Call& call, LayerActs& acts);

  void dense_backward(const Call& call, LayerActs& acts, const StreamScratch& s);
  void moe_backward(const Call& call, LayerActs& acts, const StreamScratch& s,
                    const std::function<void()>& meanwhile);
  void local_experts_backward(const Call& call, LayerActs& acts, const TensorView& dout, const FfnScratch& f);
  void router_backward(const Call& call, const LayerActs& acts, const FfnScratch& f);
  void attention_backward(const Call& call, const TensorView& x, LayerActs& acts, const StreamScratch& s);

  // Experts that are spread over ranks (block_experts.cpp).
  // Chunk by chunk: those whose experts compute now.
  struct Chunk : Trip::Chunk {
    TensorView offsets;
    const int32_t* bounds;  // of the round
  };
  Chunk chunk_of(const Trip::Round& round, const LayerActs& acts, size_t index) const;
  // The call of a chunk's experts.
  Call serving(const Call& call, const Chunk& chunk) const;
  // Begins to bring a round's tokens here, and finds their rows.
  void receive(const Call& call, const Trip::Round& round, LayerActs& acts, const TripScratch& t,
               const DispatchScratch& q);
  // Rows that go to experts as codes, where the table says so, and what arrived as values.
  void encode(const Call& call, const TensorView& x, const QuantView& codes) const;
  void decode(const Call& call, const QuantView& codes, const TensorView& out) const;
  void permute_guests(const Call& call, const Chunk& chunk, const LayerActs& acts);
  // Of every chunk, what its experts make of the guests, once these are there; and `then`.
  void serve_round(const Call& call, const Trip::Round& round, LayerActs& acts, const DispatchScratch& q,
                   const std::function<void(const Chunk&)>& then);
  void serve(const Call& call, const Chunk& chunk, LayerActs& acts);
  // `then`: once the gradients of the chunk's rows are there, before those of the weights that they are
  // waited for beside.
  void serve_backward(const Call& call, const Chunk& chunk, LayerActs& acts, const FfnScratch& f,
                      const TripScratch& t, const std::function<void()>& then);
  // What the chunk's guests take back with them: gradients of their rows and gates.
  void sum_gradients(const Call& call, const Chunk& chunk, const LayerActs& acts, const TripScratch& t);
  void sum_here(const Call& call, const Chunk& chunk, const LayerActs& acts, const TensorView& gates,
                const TensorView& out);
  TensorView leaving_gates(const Call& call, const Chunk& chunk, const LayerActs& acts, const TripScratch& t);
  void sum_over_ranks(const Call& call, const LayerActs& acts, const TensorView& returned,
                      const TensorView& shared, const TensorView& residual, const TensorView& out);
  // Leaves in `t`, after exchange_.finish(), what the experts of all ranks made of this rank's tokens.
  void spread_forward(const Call& call, LayerActs& acts, const TripScratch& t);
  // Likewise of the gradient `dout` of the combination.
  void spread_backward(const Call& call, LayerActs& acts, const TensorView& dout, const FfnScratch& f,
                       const TripScratch& t, std::function<void()> meanwhile);
  void swiglu_backward(const Call& call, const TensorView& gate_up, const TensorView& dout) const;

  const ModelSpec& model_;
  bool is_moe_;
  float eps_, clamp_, scale_;
  RouterKind router_kind_ = RouterKind::kSoftmax;
  Param &attn_norm_, &mlp_norm_;
  Param *q_norm_ = nullptr, *k_norm_ = nullptr, *router_ = nullptr;
  TensorView router_bias_, load_;
  BlockLinears linears_;
  ExpertExchange& exchange_;
  ExpertExchange::Begun begun_;  // of the last forward
};

}  // namespace fp4t
