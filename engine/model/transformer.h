// The model: parameters, forward, backward, cached decoding. One object serves pretraining, sampling and
// RL training; which numbers it computes with is the precision tables that a Pass names.
//
// Shape legend: T tokens of a call (documents packed one after another, no padding), D hidden, V
// vocabulary, E experts, k choices a token, B rows of a decode call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/model/params.h"
#include "engine/model/shard_exchange.h"
#include "engine/plan/plan.h"
#include "kernels/base/arena.h"
#include "kernels/base/philox.h"
#include "kernels/base/queue.h"
#include "kernels/base/tensor.h"

namespace fp4t {

// Quantiser monitors of one GEMM operand, summed over what was asked for.
struct OperandStats {
  int64_t layer;
  Module module;
  GemmRole gemm;
  OperandRole operand;
  double stat[kNumQuantStats];  // QuantStat
};

// Shown what fprop of every linear layer is given, before it is coded; of experts all their rows.
class ActWatcher {
 public:
  virtual ~ActWatcher() = default;
  virtual void saw(Queue& queue, int64_t layer, Module module, const TensorView& x) = 0;
};

// How a forward-backward computes.
struct Pass {
  const ForwardTable* forward = nullptr;
  const BackwardTable* backward = nullptr;  // null: no backward follows, nothing is kept for it
  uint64_t seed = 0;                        // run seed
  uint32_t step = 0;                        // attempted updates of the run so far
  uint32_t sample_id = 0;                   // global id of the micro-batch's first sample
  bool count_load = false;                  // add to the expert load (a training forward, once a micro-batch)
  double token_weight = 0.0;                // 1 / trained tokens of the step: normalises aux and z losses
  bool measure_error = false;               // quantisers also sum their error energies
  // No backward adds to the gradients after this one, on any rank; ranks may add them up block by block.
  // Every rank runs one such backward of an update, or none does.
  bool completes_gradients = false;
  // Decode calls also return what the routers chose; a forward without backward leaves it in the token
  // buffers.
  bool record_router = false;
  // For who measures activations; null: nobody. Sees nothing of rows that their producer rounds (linear.h).
  ActWatcher* watcher = nullptr;
};

// Packed tokens, on the host; every vector has T entries.
struct TokenBatch {
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;    // next token inside the document; -1: not trained
  std::vector<int32_t> positions;  // inside the document
  std::vector<int32_t> doc_begin;  // index of the document's first token
  // [MoE layers][T][k]: experts that the routers take in place of their own choice, -1 where they choose
  // themselves (Route in kernels/ops/moe.h); empty: everywhere. Only where the plan records routing.
  std::vector<int32_t> router = {};
  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
};

// Router statistics of the forwards since the last reset, for the metrics.
struct RouterSums {
  double z = 0, aux = 0;                   // sums over tokens and layers, see RouterStats
  std::vector<std::vector<int64_t>> load;  // [MoE layers][E] tokens
};

// The same on their way to the host.
class RouterDownload {
 public:
  RouterSums get();  // waits for the device, unless somebody has since

 private:
  friend class Monitors;
  Download sums_, load_;
  size_t experts_ = 1;
};

// The distribution whose log-probabilities are scored (kernels/ops/loss.h).
struct Scoring {
  float temperature = 1.0f;
  float top_p = 1.0f;
  bool entropy = false;  // besides
  // backward also adds the gradient of the sum over t of d_entropy[t] * entropy[t]; needs `entropy`.
  bool entropy_gradient = false;
};

class Transformer {
 public:
  // Allocates the run, step and scratch arenas as the plan priced them; parameters are initialised. Tests
  // poison the arenas, so that whatever is read before it was written shows.
  Transformer(Queue& queue, Communicator& comm, const Plan& plan, Poison poison = Poison::kNone);
  ~Transformer();

  ParamSet& params();
  const Plan& plan() const;
  Queue& queue();
  // The arena of run lifetime, for the optimizer's state and a reference policy's weights.
  Arena& run_arena();

  // Parameters between ranks.
  ShardExchange& shard_exchange();

  // Runs a packed batch up to its last norm. Keeps what backward needs when pass.backward is set.
  // Where experts are spread over ranks, all ranks of a group make the same calls of forward, backward and
  // decode, with an empty batch those that have no tokens.
  void forward(const Pass& pass, const TokenBatch& batch);

  // Continues the last forward: log-probabilities of its targets, into the token buffers.
  void score(const Pass& pass, const Scoring& scoring);

  // Continues the last forward, scored or not: gradients, added to the parameters' buffers, of the sum over
  // tokens of d_log_prob[t] * log_prob[t] + lse_slope * lse[t]^2 / 2, d_log_prob from the token buffers. The
  // auxiliary and z losses of the router join with the plan's coefficients times pass.token_weight. The token
  // buffers hold log_prob and lse afterwards.
  void backward(const Pass& pass, const Scoring& scoring, float lse_slope = 0.0f);

  // Logits [T, V] F32 of the last forward, valid until the next call: for comparisons, where T is at most
  // plan().head_chunk.
  TensorView logits(const Pass& pass);

  // Per-token buffers in the step arena, [T] each.
  struct TokenBuffers {
    TensorView targets;                 // I32, filled by forward from the batch
    TensorView log_prob, lse, entropy;  // F32, filled by score
    TensorView d_log_prob;              // F32, for backward
    // For a policy objective between the two: F32, F64, I32.
    TensorView old_log_prob, reference, advantage, importance, loss, d_entropy;
    TensorView weight, log_ratio;
    TensorView clipped, sequence_begin, sequence_end;
    // I32 [MoE layers * T]: where the forward's routers had their own choice replaced by another set of
    // experts, filled by a forward with TokenBatch::router.
    TensorView router_differs;
    TensorView router;  // I32 [MoE layers * T, k], filled by a forward with Pass::record_router
  };
  TokenBuffers token_buffers(int64_t num_tokens);

  // Cached decoding. Rows are (slot, position) with the token at that position; keys and values are
  // appended, then logits [rows.size(), V] F32 of the rows listed in `logit_rows` are returned, valid
  // until the next call. Slots are reused freely: a row reads positions 0..its own of its slot. The cache
  // shares memory with the activations of forward, which ends what slots hold.
  // Keys and values lie in pages of kKvPage positions. Slot s begins with the pages from s * pages_per_slot
  // on, as many as there are; set_pages gives it others, maybe shared with slots that only read them too.
  struct DecodeRows {
    std::vector<int32_t> tokens, slots, positions;
    std::vector<int32_t> logit_rows;
  };
  TensorView decode(const Pass& pass, const DecodeRows& rows);
  int64_t num_pages() const;
  void set_pages(int32_t slot, const std::vector<int32_t>& pages);
  // Contents of pages in all layers; none is written twice, or read and written.
  void copy_pages(const Pass& pass, const std::vector<int32_t>& from, const std::vector<int32_t>& to);

  // One token for each logit row of a decode call (kernels/ops/sample.h).
  struct Draws {
    float temperature, top_p;
    PhiloxKey key;
    std::vector<int64_t> sample_ids;
    std::vector<int32_t> positions;
  };
  struct Drawn {
    std::vector<int32_t> tokens;
    std::vector<float> log_probs;
    // Where the pass records routing: [MoE layers][rows][k] experts of all rows of the call.
    std::vector<int32_t> router = {};
  };
  // decode(), and the draws from its logits; the host waits for the device once.
  Drawn decode_and_draw(const Pass& pass, const DecodeRows& rows, const Draws& draws);

  // After parameters changed (optimizer step, load): derived copies and codes are made anew on next use.
  void weights_changed();

  // Makes the forward's codes of all weights now, where the rank holds them, instead of at their next use.
  void prepare(const Pass& pass);

  // The start of an accumulation: gradients count as zero. Those of linear layers are first written by the
  // next backward, or by settle_gradients(), which whoever reads gradients without a backward calls first.
  void zero_gradients();
  void settle_gradients();

  // Balance: moves the selection bias of every MoE layer once, after the last update of a step, from the
  // load that the caller has summed over the step's take_router_sums(). The model itself keeps no state
  // between updates beyond parameters and biases, so a checkpoint may fall between two updates.
  void update_expert_bias(const std::vector<std::vector<int64_t>>& load);
  RouterDownload begin_router_sums();  // what take_router_sums() returns, without waiting
  RouterSums take_router_sums() { return begin_router_sums().get(); }  // returns and resets
  // Non-finite values that quantisers saw since the last call; 0 when none.
  double take_nonfinite();
  // Monitors since the last call, one entry a quantised operand; resets them.
  std::vector<OperandStats> take_operand_stats();
  // Drops all that the last four would return.
  void reset_monitors();

  // Which kernels each module's products used: "layers.0 attn.qkv fprop mxfp8 x mxfp8: cpu fp32 fma".
  std::vector<std::string> kernels_used() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fp4t
