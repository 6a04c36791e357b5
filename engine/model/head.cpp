#include "engine/model/head.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/ops/run.h"

namespace fp4t {

Head::Head(const Plan& plan, std::unique_ptr<Linear> linear)
    : chunk_rows_(plan.head_chunk),
      whole_gradient_(head_gradient_is_whole(plan)),
      linear_(std::move(linear)) {
  FP4T_CHECK(chunk_rows_ > 0, "the plan gives the head no chunk");
}

void Head::begin(const TensorView& x, const TokenBlocks& tokens, const LogitBlocks& blocks) {
  x_ = x;
  tokens_ = tokens;
  blocks_ = blocks;
  held_ = -1;
  scored_ = false;
}

int64_t Head::num_chunks() const {
  FP4T_CHECK(!x_.empty(), "the head without a batch");
  return ceil_div(x_.dim(0), chunk_rows_);
}

Head::Chunk Head::chunk(int64_t index) const {
  const int64_t begin = index * chunk_rows_;
  return {index, begin, std::min(chunk_rows_, x_.dim(0) - begin)};
}

TensorView Head::logits_of(const Chunk& c, Operands& operands) {
  const TensorView out = blocks_.logits.rows(0, c.count);
  if (held_ == c.index) return out;
  if (!operands.made) {
    operands.fprop = linear_->fprop(operands.call, operands.scope, x_, {}, {});
    operands.made = true;
  }
  linear_->forward_rows(operands.call, operands.fprop, c.begin, out);
  held_ = c.index;
  return out;
}

void Head::score_chunk(const Chunk& c, const TensorView& logits, const Scoring& scoring, Queue& queue) {
  const auto rows = [&](const TensorView& v) { return v.rows(c.begin, c.count); };
  run(queue, LogProbForward{.logits = logits,
                            .targets = rows(tokens_.targets),
                            .temperature = scoring.temperature,
                            .top_p = scoring.top_p,
                            .log_prob = rows(tokens_.log_prob),
                            .lse = rows(tokens_.lse),
                            .entropy = scoring.entropy ? rows(tokens_.entropy) : TensorView{}});
}

TensorView Head::gradient_of(const Chunk& c, const TensorView& logits, const Scoring& scoring,
                             float lse_slope, Queue& queue) {
  const auto rows = [&](const TensorView& v) { return v.rows(c.begin, c.count); };
  if (lse_slope != 0.0f) {
    run(queue, LinearCombination{
                   .a = lse_slope, .x = rows(tokens_.lse), .b = 0.0f, .y = {}, .out = rows(tokens_.d_lse)});
  }
  const TensorView out = blocks_.dlogits.rows(whole_gradient_ ? c.begin : 0, c.count);
  run(queue, LogProbBackward{.logits = logits,
                             .targets = rows(tokens_.targets),
                             .temperature = scoring.temperature,
                             .top_p = scoring.top_p,
                             .lse = rows(tokens_.lse),
                             .entropy = scoring.entropy_gradient ? rows(tokens_.entropy) : TensorView{},
                             .d_log_prob = rows(tokens_.d_log_prob),
                             .d_lse = lse_slope != 0.0f ? rows(tokens_.d_lse) : TensorView{},
                             .d_entropy = scoring.entropy_gradient ? rows(tokens_.d_entropy) : TensorView{},
                             .dlogits = out});
  held_ = -1;  // FP32 gradients take the place of the logits
  return out;
}

void Head::score(const Call& call, const Scoring& scoring) {
  Operands operands{call, ScratchScope(call.scratch), false, {}};
  for (int64_t i = 0; i < num_chunks(); ++i) {
    score_chunk(chunk(i), logits_of(chunk(i), operands), scoring, call.queue);
  }
  scored_ = true;
}

void Head::backward(const Call& call, const Scoring& scoring, float lse_slope, const TensorView& dx) {
  FP4T_CHECK(scoring.entropy || !scoring.entropy_gradient, "the gradient of an entropy that is not scored");
  // Scoring has counted what these operands show.
  Call fprop_call = call;
  fprop_call.counting = call.counting && !scored_;
  {
    Operands operands{fprop_call, ScratchScope(call.scratch), false, {}};
    for (int64_t i = num_chunks(); i-- > 0;) {
      const Chunk c = chunk(i);
      const TensorView logits = logits_of(c, operands);
      if (!scored_) score_chunk(c, logits, scoring, call.queue);
      const TensorView gradient = gradient_of(c, logits, scoring, lse_slope, call.queue);
      if (whole_gradient_) continue;
      linear_->backward(call, x_.rows(c.begin, c.count), {}, gradient, {}, dx.rows(c.begin, c.count));
    }
  }
  if (whole_gradient_) linear_->backward(call, x_, {}, blocks_.dlogits.rows(0, x_.dim(0)), {}, dx);
  end();
}

TensorView Head::logits(const Call& call) {
  FP4T_CHECK_EQ(num_chunks(), 1, "logits of a batch of several chunks");
  Operands operands{call, ScratchScope(call.scratch), false, {}};
  return logits_of(chunk(0), operands);
}

}  // namespace fp4t
