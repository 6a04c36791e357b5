// The last product and the losses on it: log-probabilities of tokens, and their gradients through the head.
// Tokens are taken a chunk at a time (plan.head_chunk, a function of the vocabulary alone), so that FP32
// never holds more than a chunk's logits. They are computed again for the gradients, which follow the chunks
// from the last to the first: the last one's logits are often still there.
#pragma once

#include <memory>

#include "engine/model/call.h"
#include "engine/model/linear.h"
#include "engine/plan/step_layout.h"

namespace fp4t {

class Head {
 public:
  Head(const Plan& plan, std::unique_ptr<Linear> linear);

  Linear& linear() { return *linear_; }
  const Linear& linear() const { return *linear_; }

  // A batch: its rows x [T, D], its tokens' buffers, and where chunks may lie. All stay until end().
  void begin(const TensorView& x, const TokenBlocks& tokens, const LogitBlocks& blocks);
  void end() { x_ = {}; }

  // log_prob and lse of the batch's targets, entropy when asked for.
  void score(const Call& call, const Scoring& scoring);
  bool scored() const { return scored_; }

  // dx [T, D] and the weight's gradient of sum over t of (d_log_prob[t] * log_prob[t] + lse_slope *
  // lse[t]^2 / 2). Scores first what score() has not. Ends the batch.
  void backward(const Call& call, const Scoring& scoring, float lse_slope, const TensorView& dx);

  // Logits of a batch that is one chunk.
  TensorView logits(const Call& call);

 private:
  struct Chunk {
    int64_t index, begin, count;
  };
  // What products with the weight need, made at the first of them and kept in the scope.
  struct Operands {
    const Call& call;
    ScratchScope scope;
    bool made = false;
    Linear::Fprop fprop;
  };

  int64_t num_chunks() const;
  Chunk chunk(int64_t index) const;
  // Of this chunk; the product runs unless they are there.
  TensorView logits_of(const Chunk& c, Operands& operands);
  void score_chunk(const Chunk& c, const TensorView& logits, const Scoring& scoring, Queue& queue);
  // Gradients of the chunk's logits, in its rows of the buffer for them.
  TensorView gradient_of(const Chunk& c, const TensorView& logits, const Scoring& scoring, float lse_slope,
                         Queue& queue);

  int64_t chunk_rows_;
  bool whole_gradient_;  // the products of backward want all rows at once
  std::unique_ptr<Linear> linear_;
  TensorView x_;
  TokenBlocks tokens_;
  LogitBlocks blocks_;
  int64_t held_ = -1;  // the chunk whose logits are in blocks_
  bool scored_ = false;
};

}  // namespace fp4t
