#include "kernels/ops/policy.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 128;

struct Args {
  int64_t rows;
  const float *now, *old, *reference, *advantage;
  const double* weight;
  PolicyClip clip;
  float *loss, *slope;
  int32_t* clipped;
};

__global__ void __launch_bounds__(kThreads) objective(Args a) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x; t < a.rows; t += stride) {
    TokenObjective o{};
    if (a.weight[t] != 0) {
      o = policy_token(a.now[t], a.old[t], a.reference ? a.reference[t] : 0.0f, a.advantage[t], a.clip);
    }
    a.loss[t] = o.loss;
    a.clipped[t] = o.clipped;
    a.slope[t] = static_cast<float>(static_cast<double>(o.d_log_prob) * a.weight[t]);
  }
}

}  // namespace

void run(Queue& queue, const PolicyObjective& op) {
  const int64_t rows = op.log_prob.elements();
  if (rows == 0) return;
  const Context& c = context_of(queue);
  const Args args{rows,
                  op.log_prob.as<float>(),
                  op.old_log_prob.as<float>(),
                  op.clip.kl > 0 ? op.reference.as<float>() : nullptr,
                  op.advantage.as<float>(),
                  op.weight.as<double>(),
                  op.clip,
                  op.loss.as<float>(),
                  op.d_log_prob.as<float>(),
                  op.clipped.as<int32_t>()};
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>(ceil_div(rows, kThreads), int64_t{c.sm_count} * 8));
  objective<<<blocks, kThreads, 0, c.stream>>>(args);
  check_launch(PolicyObjective::kName);
}

}  // namespace fp4t::cuda
