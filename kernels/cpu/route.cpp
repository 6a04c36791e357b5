// Routing: scores, choice, counting sort, balance statistics and their gradients.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/base/numeric.h"
#include "kernels/cpu/rows.h"
#include "kernels/formats/math.h"
#include "kernels/ops/moe.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

constexpr int64_t kTokensPerChunk = 64;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// In index order: rows are short, and the order is easy to repeat on any machine.
float row_sum(const float* row, int64_t n) {
  float sum = 0.0f;
  for (int64_t e = 0; e < n; ++e) sum = sum + row[e];
  return sum;
}

// out = softmax(logits); returns the log-sum-exp.
float softmax(const float* logits, int64_t n, float* out) {
  float m = -kInf;
  for (int64_t e = 0; e < n; ++e) m = logits[e] > m ? logits[e] : m;
  for (int64_t e = 0; e < n; ++e) out[e] = exp_f32(logits[e] - m);
  const float sum = row_sum(out, n);
  for (int64_t e = 0; e < n; ++e) out[e] = out[e] / sum;
  return m + log_f32(sum);
}

void score(RouterKind kind, const float* logits, int64_t n, float* out) {
  if (kind == RouterKind::kSoftmax) {
    softmax(logits, n, out);
  } else {
    for (int64_t e = 0; e < n; ++e) out[e] = sigmoid_f32(logits[e]);
  }
}

// The top_k largest keys in descending order, ties to the lower index; uses the keys up. A NaN counts as
// +inf, so that a non-finite score is chosen and stays visible in the gates; afterwards NaN marks taken.
void choose(float* keys, int64_t n, int64_t top_k, int32_t* chosen) {
  for (int64_t e = 0; e < n; ++e) keys[e] = std::isnan(keys[e]) ? kInf : keys[e];
  for (int64_t j = 0; j < top_k; ++j) {
    int64_t best = 0;
    while (std::isnan(keys[best])) ++best;
    for (int64_t e = best + 1; e < n; ++e) best = keys[e] > keys[best] ? e : best;
    chosen[j] = static_cast<int32_t>(best);
    keys[best] = kNan;
  }
}

// Sum of the chosen scores in the order of choice.
float chosen_sum(const float* scores, const int32_t* chosen, int64_t top_k) {
  float sum = 0.0f;
  for (int64_t j = 0; j < top_k; ++j) sum = sum + scores[chosen[j]];
  return sum;
}

void gate(const Route& op, const float* scores, const int32_t* chosen, float* gates) {
  const float sum = op.normalise ? chosen_sum(scores, chosen, op.top_k) : 1.0f;
  for (int64_t j = 0; j < op.top_k; ++j) {
    const float share = sum == 0.0f ? 0.0f : scores[chosen[j]] / sum;
    gates[j] = share * op.gate_scale;
  }
}

// Puts the experts of `replay` in the place of the chosen; returns whether they are another set.
bool replace_choice(const int32_t* replay, int64_t num_experts, int64_t top_k, int32_t* chosen) {
  const auto end = replay + top_k;
  bool differs = false;
  for (int64_t j = 0; j < top_k; ++j) {
    FP4T_CHECK(
        replay[j] >= 0 && replay[j] < num_experts && std::find(replay, replay + j, replay[j]) == replay + j,
        Route::kName, ": replay of expert ", replay[j], " of ", num_experts);
    differs = differs || std::find(replay, end, chosen[j]) == end;
  }
  std::copy(replay, end, chosen);
  return differs;
}

// Rows sorted by expert, then by token.
void counting_sort(const Route& op) {
  const int64_t tokens = op.logits.dim(0), num_experts = op.logits.dim(1), top_k = op.top_k;
  const int32_t* experts = op.experts.as<int32_t>();
  int32_t *offsets = op.offsets.as<int32_t>(), *row_of = op.row_of.as<int32_t>();
  int32_t* token_of = op.token_of.as<int32_t>();
  std::fill(offsets, offsets + num_experts + 1, 0);
  for (int64_t i = 0; i < tokens * top_k; ++i) ++offsets[experts[i] + 1];
  for (int64_t e = 0; e < num_experts; ++e) offsets[e + 1] += offsets[e];
  std::vector<int32_t> next(offsets, offsets + num_experts);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < top_k; ++j) {
      const int32_t row = next[static_cast<size_t>(experts[t * top_k + j])]++;
      row_of[t * top_k + j] = row;
      token_of[row] = static_cast<int32_t>(t);
    }
  }
}

// Per-op constants of the gradient, and its scratch for one token.
class RouteGradient {
 public:
  explicit RouteGradient(const RouteBackward& op)
      : op_(op), n_(op.logits.dim(1)), top_k_(op.experts.dim(1)), aux_(n_), dscores_(n_), softmax_(n_) {
    const double rows = static_cast<double>(op.logits.dim(0) * top_k_);
    const int32_t* offsets = op.offsets.as<int32_t>();
    for (int64_t e = 0; e < n_; ++e) {
      const double count = offsets[e + 1] - offsets[e];
      aux_.get()[e] =
          rows == 0 ? 0.0f : static_cast<float>(op.aux_coefficient * static_cast<double>(n_) * count / rows);
    }
  }

  void token(const float* logits, const float* scores, const int32_t* experts, const float* dgates,
             float* dlogits) const {
    float* ds = dscores_.get();
    std::fill(ds, ds + n_, 0.0f);
    add_gates(scores, experts, dgates, ds);
    if (op_.aux_coefficient != 0.0f) add_aux(scores, ds);
    if (op_.kind == RouterKind::kSoftmax) {
      float dot = 0.0f;
      for (int64_t e = 0; e < n_; ++e) dot = dot + scores[e] * ds[e];
      for (int64_t e = 0; e < n_; ++e) dlogits[e] = scores[e] * (ds[e] - dot);
    } else {
      for (int64_t e = 0; e < n_; ++e) dlogits[e] = ds[e] * (scores[e] * (1.0f - scores[e]));
    }
    if (op_.z_coefficient != 0.0f) {
      const float lse = softmax(logits, n_, softmax_.get());
      const float factor = 2.0f * op_.z_coefficient * lse;
      for (int64_t e = 0; e < n_; ++e) dlogits[e] = dlogits[e] + factor * softmax_.get()[e];
    }
  }

 private:
  // gate_j = scale * s_j, or scale * s_j / S with S the sum of the chosen.
  void add_gates(const float* scores, const int32_t* experts, const float* dgates, float* ds) const {
    if (!op_.normalise) {
      for (int64_t j = 0; j < top_k_; ++j) ds[experts[j]] = op_.gate_scale * dgates[j];
      return;
    }
    const float sum = chosen_sum(scores, experts, top_k_);
    if (sum == 0.0f) return;  // the gates are the constant 0
    float mean = 0.0f;
    for (int64_t j = 0; j < top_k_; ++j) mean = mean + dgates[j] * (scores[experts[j]] / sum);
    for (int64_t j = 0; j < top_k_; ++j) ds[experts[j]] = op_.gate_scale * (dgates[j] - mean) / sum;
  }

  // aux = sum over tokens and e of aux_[e] * p_e; p is the score, or the score by its sum for sigmoid.
  void add_aux(const float* scores, float* ds) const {
    const float* aux = aux_.get();
    if (op_.kind == RouterKind::kSoftmax) {
      for (int64_t e = 0; e < n_; ++e) ds[e] = ds[e] + aux[e];
      return;
    }
    const float sum = row_sum(scores, n_);
    if (sum == 0.0f) return;
    float mean = 0.0f;
    for (int64_t e = 0; e < n_; ++e) mean = mean + aux[e] * (scores[e] / sum);
    for (int64_t e = 0; e < n_; ++e) ds[e] = ds[e] + (aux[e] - mean) / sum;
  }

  const RouteBackward& op_;
  int64_t n_, top_k_;
  Scratch aux_, dscores_, softmax_;
};

void check_experts(const char* op, const int32_t* experts, int64_t count, int64_t num_experts) {
  for (int64_t i = 0; i < count; ++i) {
    FP4T_CHECK(experts[i] >= 0 && experts[i] < num_experts, op, ": expert ", experts[i], " of ", num_experts);
  }
}

// Sums of one chunk of tokens: z, then the scores of each expert, normalised to sum 1 a token.
void chunk_statistics(const RouterStats& op, int64_t begin, int64_t end, double* sums) {
  const int64_t n = op.logits.dim(1);
  const float *logits = op.logits.as<float>(), *scores = op.scores.as<float>();
  Scratch probabilities(n);
  for (int64_t t = begin; t < end; ++t) {
    const double lse = double{softmax(logits + t * n, n, probabilities.get())};
    sums[0] += lse * lse;
    const float* s = scores + t * n;
    double total = 1.0;
    if (op.kind == RouterKind::kSigmoid) {
      total = 0.0;
      for (int64_t e = 0; e < n; ++e) total += double{s[e]};
      if (total == 0.0) continue;
    }
    for (int64_t e = 0; e < n; ++e) sums[1 + e] += double{s[e]} / total;
  }
}

}  // namespace

void run(Queue& queue, const Route& op) {
  const int64_t n = op.logits.dim(1), top_k = op.top_k;
  const float *logits = op.logits.as<float>(), *bias = op.bias.as<float>();
  float *scores = op.scores.as<float>(), *gates = op.gates.as<float>();
  int32_t* experts = op.experts.as<int32_t>();
  const int32_t* replay = op.replay.empty() ? nullptr : op.replay.as<int32_t>();
  int32_t* differs = replay ? op.differs.as<int32_t>() : nullptr;
  parallel_for(queue, op.logits.dim(0), kTokensPerChunk, [&](int64_t begin, int64_t end) {
    Scratch keys(n);
    for (int64_t t = begin; t < end; ++t) {
      float* row = scores + t * n;
      score(op.kind, logits + t * n, n, row);
      for (int64_t e = 0; e < n; ++e) keys.get()[e] = row[e] + bias[e];
      choose(keys.get(), n, top_k, experts + t * top_k);
      if (replay) {
        const int32_t* given = replay + t * top_k;
        differs[t] = given[0] >= 0 && replace_choice(given, n, top_k, experts + t * top_k) ? 1 : 0;
      }
      gate(op, row, experts + t * top_k, gates + t * top_k);
    }
  });
  counting_sort(op);
}

void run(Queue& queue, const RouterStats& op) {
  const int64_t tokens = op.logits.dim(0), n = op.logits.dim(1);
  const int32_t* offsets = op.offsets.as<int32_t>();
  int64_t* load = op.load.as<int64_t>();
  for (int64_t e = 0; e < n; ++e) load[e] += offsets[e + 1] - offsets[e];
  if (tokens == 0) return;

  const int64_t chunks = ceil_div(tokens, kTokensPerChunk), stride = n + 1;
  std::vector<double> partials(static_cast<size_t>(chunks * stride), 0.0);
  parallel_for(queue, tokens, kTokensPerChunk, [&](int64_t begin, int64_t end) {
    chunk_statistics(op, begin, end, partials.data() + begin / kTokensPerChunk * stride);
  });
  for (int64_t c = 1; c < chunks; ++c) {
    for (int64_t i = 0; i < stride; ++i) {
      partials[static_cast<size_t>(i)] += partials[static_cast<size_t>(c * stride + i)];
    }
  }
  double weighted = 0.0;
  for (int64_t e = 0; e < n; ++e) {
    weighted += static_cast<double>(offsets[e + 1] - offsets[e]) * partials[static_cast<size_t>(1 + e)];
  }
  double* sums = op.sums.as<double>();
  sums[0] += partials[0];
  sums[1] += static_cast<double>(n) * weighted / static_cast<double>(tokens * op.top_k);
}

void run(Queue& queue, const RouteBackward& op) {
  const int64_t tokens = op.logits.dim(0), n = op.logits.dim(1), top_k = op.experts.dim(1);
  const float *logits = op.logits.as<float>(), *scores = op.scores.as<float>();
  const float* dgates = op.dgates.as<float>();
  const int32_t* experts = op.experts.as<int32_t>();
  float* dlogits = op.dlogits.as<float>();
  check_experts(op.kName, experts, tokens * top_k, n);
  parallel_for(queue, tokens, kTokensPerChunk, [&](int64_t begin, int64_t end) {
    const RouteGradient gradient(op);
    for (int64_t t = begin; t < end; ++t) {
      gradient.token(logits + t * n, scores + t * n, experts + t * top_k, dgates + t * top_k,
                     dlogits + t * n);
    }
  });
}

void run(Queue&, const UpdateExpertBias& op) {
  const int64_t n = op.load.dim(0);
  const int64_t* load = op.load.as<int64_t>();
  float* bias = op.bias.as<float>();
  int64_t total = 0;
  for (int64_t e = 0; e < n; ++e) total += load[e];
  for (int64_t e = 0; e < n; ++e) {
    // mean - load, times n: in integers, so that balanced experts get exactly no move.
    const int64_t below_mean = total - load[e] * n;
    if (below_mean > 0) bias[e] = bias[e] + op.rate;
    if (below_mean < 0) bias[e] = bias[e] - op.rate;
  }
}

}  // namespace fp4t::cpu
