#include "kernels/ops/policy.h"

#include "kernels/ops/run.h"

namespace fp4t::cpu {

void run(Queue& queue, const PolicyObjective& op) {
  const auto* now = op.log_prob.as<float>();
  const auto* old = op.old_log_prob.as<float>();
  const float* reference = op.clip.kl > 0 ? op.reference.as<float>() : nullptr;
  const auto* advantage = op.advantage.as<float>();
  const auto* weight = op.weight.as<double>();
  auto* loss = op.loss.as<float>();
  auto* clipped = op.clipped.as<int32_t>();
  auto* slope = op.d_log_prob.as<float>();
  parallel_for(queue, op.log_prob.elements(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (weight[t] == 0) {
        loss[t] = slope[t] = 0;
        clipped[t] = 0;
        continue;
      }
      const TokenObjective o =
          policy_token(now[t], old[t], reference ? reference[t] : 0.0f, advantage[t], op.clip);
      loss[t] = o.loss;
      clipped[t] = o.clipped;
      slope[t] = static_cast<float>(static_cast<double>(o.d_log_prob) * weight[t]);
    }
  });
}

}  // namespace fp4t::cpu
