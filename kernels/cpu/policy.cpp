#include "kernels/ops/policy.h"

#include "kernels/ops/run.h"

namespace fp4t::cpu {

void run(Queue& queue, const SequenceLogRatio& op) {
  const auto *now = op.log_prob.as<float>(), *old = op.old_log_prob.as<float>();
  const auto *begin = op.begin.as<int32_t>(), *end = op.end.as<int32_t>();
  auto* mean = op.mean.as<double>();
  const int64_t rows = op.log_prob.elements();
  parallel_for(queue, rows, 4096, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      FP4T_CHECK(begin[t] >= 0 && begin[t] <= end[t] && end[t] <= rows, op.kName, ": row ", t, " in [",
                 begin[t], ", ", end[t], ") of ", rows);
      if (begin[t] == end[t]) {
        mean[t] = 0;
        continue;
      }
      if (t > first && begin[t - 1] == begin[t] && end[t - 1] == end[t]) {
        mean[t] = mean[t - 1];
        continue;
      }
      double lanes[kSequenceLanes] = {};
      for (int64_t i = begin[t]; i < end[t]; ++i) {
        lanes[(i - begin[t]) % kSequenceLanes] += static_cast<double>(now[i]) - static_cast<double>(old[i]);
      }
      for (int distance = kSequenceLanes / 2; distance > 0; distance /= 2) {
        for (int l = 0; l < distance; ++l) lanes[l] += lanes[l + distance];
      }
      mean[t] = lanes[0] / static_cast<double>(end[t] - begin[t]);
    }
  });
}

void run(Queue& queue, const PolicyObjective& op) {
  const auto optional = [](const TensorView& v, bool given) { return given ? v.as<float>() : nullptr; };
  const bool bonus = op.terms.entropy > 0;
  const auto *now = op.log_prob.as<float>(), *old = op.old_log_prob.as<float>();
  const float *reference = optional(op.reference, op.terms.kl > 0), *entropy = optional(op.entropy, bonus);
  const auto *advantage = op.advantage.as<float>(), *importance = op.importance.as<float>();
  const auto* weight = op.weight.as<double>();
  const double* log_ratio = op.log_ratio.empty() ? nullptr : op.log_ratio.as<double>();
  auto *loss = op.loss.as<float>(), *slope = op.d_log_prob.as<float>();
  float* d_entropy = optional(op.d_entropy, bonus);
  auto* clipped = op.clipped.as<int32_t>();
  parallel_for(queue, op.log_prob.elements(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (d_entropy) d_entropy[t] = static_cast<float>(-op.terms.entropy * weight[t]);
      if (weight[t] == 0) {
        loss[t] = slope[t] = 0;
        clipped[t] = kNotClipped;
        if (d_entropy) d_entropy[t] = 0;
        continue;
      }
      const double ratio =
          log_ratio ? log_ratio[t] : static_cast<double>(now[t]) - static_cast<double>(old[t]);
      const TokenObjective o = policy_token({now[t], reference ? reference[t] : 0.0f, advantage[t], ratio,
                                             importance[t], entropy ? entropy[t] : 0.0f},
                                            op.terms);
      loss[t] = o.loss;
      clipped[t] = o.clipped;
      slope[t] = static_cast<float>(static_cast<double>(o.d_log_prob) * weight[t]);
    }
  });
}

}  // namespace fp4t::cpu
