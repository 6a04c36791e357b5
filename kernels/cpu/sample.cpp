// Sampling by the inverse of the cumulative distribution, in integers: weights are summed exactly in fixed
// point and compared with a 24-bit draw. So no order of summation matters, the draw always falls inside
// the set, and a token of weight zero is never drawn.
#include "kernels/ops/sample.h"

#include "kernels/cpu/row_softmax.h"
#include "kernels/cpu/rows.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

// The token i with sum of weights before i <= floor(total * draw / 2^24) < sum up to and with i.
int32_t draw_token(const float* weights, int64_t vocab, uint32_t draw24) {
  int64_t total = 0;
  for (int64_t i = 0; i < vocab; ++i) total += fixed_point(weights[i]);
  const int64_t high = total >> 24, low = total & 0xFFFFFF;
  const int64_t threshold = high * draw24 + ((low * draw24) >> 24);
  int64_t sum = 0;
  int32_t token = 0;
  for (;; ++token) {
    sum += fixed_point(weights[token]);
    if (sum > threshold) return token;  // draw24 < 2^24, so threshold < total: reached
  }
}

int32_t largest(const float* logits, int64_t vocab) {
  int32_t best = 0;
  for (int64_t i = 1; i < vocab; ++i) {
    if (logits[i] > logits[best]) best = static_cast<int32_t>(i);
  }
  return best;
}

}  // namespace

void run(Queue& queue, const SampleTokens& op) {
  const int64_t vocab = op.logits.dim(1);
  const bool greedy = op.temperature == 0.0f;
  const float* logits = op.logits.as<float>();
  const int64_t* sample_ids = op.sample_ids.as<int64_t>();
  const int32_t* positions = op.positions.as<int32_t>();
  int32_t* tokens = op.tokens.as<int32_t>();
  float* log_prob = op.log_prob.as<float>();
  parallel_for(queue, op.logits.dim(0), rows_per_chunk(vocab), [&](int64_t begin, int64_t end) {
    RowSoftmax row(vocab, greedy ? 1.0f : op.temperature, op.top_p);
    for (int64_t b = begin; b < end; ++b) {
      row.load(logits + b * vocab, -1);
      if (!row.finite()) {
        throw NonFiniteError(detail::concat(op.kName, ": row ", b, " (sample ", sample_ids[b], ", position ",
                                            positions[b], ") has NaN or infinite logits"));
      }
      tokens[b] = greedy ? largest(logits + b * vocab, vocab)
                         : draw_token(row.weights(), vocab, token_draw(op.key, sample_ids[b], positions[b]));
      log_prob[b] = row.log_prob(tokens[b]);
    }
  });
}

}  // namespace fp4t::cpu
