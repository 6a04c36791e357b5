// What stands behind a Transformer: its arenas, its layers, the phase that the step arena is in.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/model/block.h"
#include "engine/model/call.h"
#include "engine/model/head.h"
#include "engine/model/monitors.h"
#include "engine/model/transformer.h"
#include "engine/plan/step_layout.h"

namespace fp4t {

struct Transformer::Impl {
  Impl(Queue& queue_in, Communicator& comm, const Plan& plan_in, Poison poison);
  ~Impl() { queue.after_waits({}); }

  void forward(const Pass& pass, const TokenBatch& batch);
  void score(const Pass& pass, const Scoring& scoring);
  void backward(const Pass& pass, const Scoring& scoring, float lse_slope);
  TensorView logits_of_batch(const Pass& pass);
  TensorView decode(const Pass& pass, const DecodeRows& rows);
  void set_pages(int32_t slot, const std::vector<int32_t>& pages);
  void copy_pages(const Pass& pass, const std::vector<int32_t>& from, const std::vector<int32_t>& to);
  // The decoding phase, with its page table in place.
  void enter_decoding();
  Drawn decode_and_draw(const Pass& pass, const DecodeRows& rows, const Draws& draws);

  // Inputs of a decode call on the device.
  struct RowInputs {
    TensorView tokens, positions, slots;
    TensorView logit_rows;  // empty: all rows, in order
  };
  // What the call enqueues then; returns the logits.
  TensorView enqueue_decode(const Pass& pass, const RowInputs& in, bool counting);
  void enqueue_draws(const TensorView& from, const Draws& draws, const TensorView& sample_ids,
                     const TensorView& positions, const TensorView& tokens, const TensorView& log_prob);
  // Rows of the recording that serves the call; 0 where none gives the same bits.
  int64_t recorded_rows(const Pass& pass, const DecodeRows& rows);
  TensorView decode_recorded(const Pass& pass, const DecodeRows& rows, const Draws* draws, int64_t bucket);
  Drawn draw_recorded(const Pass& pass, const DecodeRows& rows, const Draws& draws, int64_t bucket);
  TensorView replay_decode(const Pass& pass, const RowInputs& in);
  void prepare_weights(const Call& call);

  enum class Phase : uint8_t { kNone, kTrain, kDecode };

  void build_blocks();
  std::vector<Linear*> linears();  // of all blocks, then the head's
  void enter(Phase next);
  void forget();
  int64_t layer_after(size_t l) const { return l + 1 < blocks.size() ? static_cast<int64_t>(l) + 1 : -1; }
  void begin_block_gradients(size_t l);
  void end_block_gradients(const Pass& pass, size_t l);
  // Those of parameters before or after the blocks, once they are complete.
  void end_outside_gradients(const Pass& pass, ShardExchange::Outside part);
  Call make_call(const Pass& pass, int64_t tokens, bool counting);
  void upload(const std::vector<int32_t>& values, const TensorView& block);
  void place_routing(const Pass& pass, const TokenBatch& batch, BatchActs& acts);
  // What the routers of the last decode call of this many rows chose.
  Download record_of(int64_t rows);
  void embed(const TensorView& tokens, const TensorView& out);
  KvCacheView cache_of(int64_t layer, Format format) const;
  void check_batch(const Pass& pass, const TokenBatch& batch) const;
  void check_rows(const Pass& pass, const DecodeRows& rows) const;
  void check_ids(const std::vector<int32_t>& tokens, const std::vector<int32_t>& positions) const;
  void final_norm(const TensorView& x, const TensorView& out, const TensorView& rstd);

  Queue& queue;
  const Plan& plan;
  ModelDims dims;
  Arena run_arena, step_arena, scratch;
  ParamSet params;
  ShardExchange exchange;
  ExpertExchange experts;
  int64_t first_expert;  // that this rank has
  StateBlocks state;
  Monitors monitors;
  std::vector<Block> blocks;
  std::unique_ptr<Head> head;
  Param *embedding, *final_weight;

  TokenBlocks token_blocks;
  std::vector<void*> caches;   // of the decoding phase, a layer each
  std::vector<int32_t> pages;  // [slots][pages_per_slot], -1: none; page_table on the device follows it
  bool pages_changed = true;
  TensorView page_table;

  // Phases overlay in the step arena: each begins at `phases_mark`, its calls at `calls_mark`.
  Phase phase = Phase::kNone;
  int64_t phases_mark = 0, calls_mark = 0;

  // The last forward, that others may continue.
  struct Kept {
    BatchActs acts;
    int64_t tokens;
    Keep keep;
    // The head's logits lie in scratch, above what a backward holds all along and where its blocks have
    // theirs: score() leaves a chunk for backward().
    int64_t logits_end = 0;
  };
  std::optional<Kept> kept;

  // Decode calls by forward table and rows.
  struct RecordedCall {
    bool warm = false;  // ran once as it is: scratch is there
    Recording recording;
    TensorView logits;
  };
  std::map<std::pair<const ForwardTable*, int64_t>, RecordedCall> recorded;
  std::map<const ForwardTable*, bool> row_invariance;
};

}  // namespace fp4t
