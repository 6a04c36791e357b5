#include "kernels/ops/policy.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 128;

struct RatioArgs {
  int64_t rows;
  const float *now, *old;
  const int32_t *begin, *end;
  double* mean;
};

// A warp a row; the row that begins a range sums it and writes the range's rows.
__global__ void __launch_bounds__(kThreads) sequence_log_ratio(RatioArgs a) {
  static_assert(kSequenceLanes == 32, "a lane of a warp is a lane of the sum");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32);
  for (int64_t t = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; t < a.rows; t += warps) {
    const int64_t begin = a.begin[t], end = a.end[t];
    if (begin >= end) {
      if (lane == 0) a.mean[t] = 0;
      continue;
    }
    if (begin != t || end > a.rows) continue;
    double sum = 0;
    for (int64_t i = begin + lane; i < end; i += 32) {
      sum += static_cast<double>(a.now[i]) - static_cast<double>(a.old[i]);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      const double other = __shfl_down_sync(0xFFFFFFFFu, sum, distance);
      if (lane < distance) sum += other;
    }
    const double mean = __shfl_sync(0xFFFFFFFFu, sum, 0) / static_cast<double>(end - begin);
    for (int64_t i = begin + lane; i < end; i += 32) a.mean[i] = mean;
  }
}

struct Args {
  int64_t rows;
  const float *now, *old, *reference, *advantage, *importance, *entropy;
  const double *weight, *log_ratio;
  PolicyTerms terms;
  float *loss, *slope, *d_entropy;
  int32_t* clipped;
};

__global__ void __launch_bounds__(kThreads) objective(Args a) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x; t < a.rows; t += stride) {
    TokenObjective o{};
    const double weight = a.weight[t];
    if (weight != 0) {
      const double ratio =
          a.log_ratio ? a.log_ratio[t] : static_cast<double>(a.now[t]) - static_cast<double>(a.old[t]);
      o = policy_token({a.now[t], a.reference ? a.reference[t] : 0.0f, a.advantage[t], ratio, a.importance[t],
                        a.entropy ? a.entropy[t] : 0.0f},
                       a.terms);
    }
    a.loss[t] = o.loss;
    a.clipped[t] = o.clipped;
    a.slope[t] = static_cast<float>(static_cast<double>(o.d_log_prob) * weight);
    if (a.d_entropy) a.d_entropy[t] = weight != 0 ? static_cast<float>(-a.terms.entropy * weight) : 0.0f;
  }
}

unsigned blocks_for(const Context& c, int64_t threads) {
  return static_cast<unsigned>(std::min<int64_t>(ceil_div(threads, kThreads), int64_t{c.sm_count} * 8));
}

}  // namespace

void run(Queue& queue, const SequenceLogRatio& op) {
  const int64_t rows = op.log_prob.elements();
  if (rows == 0) return;
  const Context& c = context_of(queue);
  const RatioArgs args{rows,
                       op.log_prob.as<float>(),
                       op.old_log_prob.as<float>(),
                       op.begin.as<int32_t>(),
                       op.end.as<int32_t>(),
                       op.mean.as<double>()};
  sequence_log_ratio<<<blocks_for(c, rows * 32), kThreads, 0, c.stream>>>(args);
  check_launch(SequenceLogRatio::kName);
}

void run(Queue& queue, const PolicyObjective& op) {
  const int64_t rows = op.log_prob.elements();
  if (rows == 0) return;
  const Context& c = context_of(queue);
  const auto optional = [](const TensorView& v, bool given) { return given ? v.as<float>() : nullptr; };
  const bool bonus = op.terms.entropy > 0;
  const Args args{rows,
                  op.log_prob.as<float>(),
                  op.old_log_prob.as<float>(),
                  optional(op.reference, op.terms.kl > 0),
                  op.advantage.as<float>(),
                  op.importance.as<float>(),
                  optional(op.entropy, bonus),
                  op.weight.as<double>(),
                  op.log_ratio.empty() ? nullptr : op.log_ratio.as<double>(),
                  op.terms,
                  op.loss.as<float>(),
                  op.d_log_prob.as<float>(),
                  optional(op.d_entropy, bonus),
                  op.clipped.as<int32_t>()};
  objective<<<blocks_for(c, rows), kThreads, 0, c.stream>>>(args);
  check_launch(PolicyObjective::kName);
}

}  // namespace fp4t::cuda
