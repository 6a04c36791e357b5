#include "kernels/ops/loss.h"

#include "kernels/cpu/row_softmax.h"
#include "kernels/cpu/rows.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

constexpr int32_t kIgnored = -1;

void check_target(const char* op, int64_t row, int32_t target, int64_t vocab) {
  FP4T_CHECK(target >= kIgnored && target < vocab, op, ": target ", target, " of row ", row,
             " in a vocabulary of ", vocab);
}

// Weights of one row's log_prob, lse and entropy in the loss.
struct RowWeights {
  float log_prob, lse, entropy;
};

// With p = softmax over the set and z = logits / temperature:
//   d log_prob / dz_i = [i = target] - p_i,  d lse / dz_i = p_i,  d entropy / dz_i = -p_i (log p_i + entropy)
class RowGradient {
 public:
  RowGradient(const LogProbBackward& op)
      : width_(op.logits.dim(1)),
        temperature_(op.temperature),
        restricted_(op.top_p < 1.0f),
        softmax_(restricted_ ? width_ : 0, op.temperature, op.top_p),
        log_p_(width_),
        gradient_(width_) {}

  const float* compute(const float* logits, int64_t target, float lse, float entropy, RowWeights w) {
    float *log_p = log_p_.get(), *gradient = gradient_.get();
    for (int64_t i = 0; i < width_; ++i) log_p[i] = logits[i] / temperature_ - lse;
    for (int64_t i = 0; i < width_; ++i) gradient[i] = exp_f32(log_p[i]);
    if (restricted_) {
      softmax_.load(logits, target);
      // Without a finite sum there is no set, and the NaN of lse stays visible.
      const bool masked = softmax_.finite();
      const float* weights = softmax_.weights();
      for (int64_t i = 0; i < width_; ++i) gradient[i] = masked && weights[i] == 0.0f ? 0.0f : gradient[i];
    }
    const float constant = (w.lse - w.log_prob) - w.entropy * entropy;
    if (w.entropy != 0.0f) {
      for (int64_t i = 0; i < width_; ++i) {
        const float p = gradient[i];
        gradient[i] = p == 0.0f ? 0.0f : p * (constant - w.entropy * log_p[i]);
      }
    } else {
      for (int64_t i = 0; i < width_; ++i) gradient[i] = gradient[i] * constant;
    }
    gradient[target] = gradient[target] + w.log_prob;
    for (int64_t i = 0; i < width_; ++i) gradient[i] = gradient[i] / temperature_;
    return gradient;
  }

 private:
  int64_t width_;
  float temperature_;
  bool restricted_;
  RowSoftmax softmax_;
  Scratch log_p_, gradient_;
};

template <class T>
void log_prob_backward(Queue& queue, const LogProbBackward& op) {
  const int64_t vocab = op.logits.dim(1);
  const float *logits = op.logits.as<float>(), *lse = op.lse.as<float>();
  const float* d_log_prob = op.d_log_prob.as<float>();
  const float* d_lse = op.d_lse.empty() ? nullptr : op.d_lse.as<float>();
  const float* d_entropy = op.d_entropy.empty() ? nullptr : op.d_entropy.as<float>();
  const float* entropy = d_entropy ? op.entropy.as<float>() : nullptr;
  const int32_t* targets = op.targets.as<int32_t>();
  T* dlogits = op.dlogits.as<T>();
  parallel_for(queue, op.logits.dim(0), rows_per_chunk(vocab), [&](int64_t begin, int64_t end) {
    RowGradient row(op);
    for (int64_t t = begin; t < end; ++t) {
      check_target(op.kName, t, targets[t], vocab);
      T* out = dlogits + t * vocab;
      const RowWeights w{d_log_prob[t], d_lse ? d_lse[t] : 0.0f, d_entropy ? d_entropy[t] : 0.0f};
      // Masked tokens and samples without advantage are common: their rows cost nothing.
      if (targets[t] == kIgnored || (w.log_prob == 0.0f && w.lse == 0.0f && w.entropy == 0.0f)) {
        std::fill(out, out + vocab, T{});
        continue;
      }
      const float h = entropy ? entropy[t] : 0.0f;
      store_row(row.compute(logits + t * vocab, targets[t], lse[t], h, w), out, vocab);
    }
  });
}

}  // namespace

void run(Queue& queue, const LogProbForward& op) {
  const int64_t vocab = op.logits.dim(1);
  const float* logits = op.logits.as<float>();
  const int32_t* targets = op.targets.as<int32_t>();
  float *log_prob = op.log_prob.as<float>(), *lse = op.lse.as<float>();
  float* entropy = op.entropy.empty() ? nullptr : op.entropy.as<float>();
  parallel_for(queue, op.logits.dim(0), rows_per_chunk(vocab), [&](int64_t begin, int64_t end) {
    RowSoftmax row(vocab, op.temperature, op.top_p);
    for (int64_t t = begin; t < end; ++t) {
      check_target(op.kName, t, targets[t], vocab);
      row.load(logits + t * vocab, targets[t]);
      lse[t] = row.lse();
      log_prob[t] = targets[t] == kIgnored ? 0.0f : row.log_prob(targets[t]);
      if (entropy) entropy[t] = targets[t] == kIgnored ? 0.0f : row.take_entropy();
    }
  });
}

void run(Queue& queue, const LogProbBackward& op) {
  for_float_type(op.dlogits.dtype, [&](auto type) { log_prob_backward<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cpu
