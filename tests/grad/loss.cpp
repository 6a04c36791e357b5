// Gradients of log-probability, log-sum-exp and entropy against central differences in double. The top-p
// set is a constant.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "kernels/ops/run.h"
#include "tests/support/distribution.h"
#include "tests/support/ops.h"

namespace fp4t::test {
namespace {

// Logits and lse reach 8 to 16 after division by the temperature, so both carry a rounding of 2^-21 and
// probabilities a relative error of 2^-20; weights (up to 2.5) and 1 / temperature enlarge it.
constexpr double kTolerance = 0x1p-18;
constexpr int64_t kTokens = 4;

// Largest distance between the gradient and the central differences of loss() at every element of x.
double worst_error(Values& x, const std::function<double()>& loss, const TensorView& gradient) {
  constexpr double kStep = 1e-5;
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double kept = x[i];
    x[i] = kept + kStep;
    const double above = loss();
    x[i] = kept - kStep;
    const double below = loss();
    x[i] = kept;
    const double error =
        std::fabs((above - below) / (2 * kStep) - element(gradient, static_cast<int64_t>(i)));
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

struct LossCase {
  int64_t vocab;
  float temperature, top_p;
  bool log_prob, lse, entropy;
};

void check_gradient(const LossCase& c) {
  SCOPED_TRACE(detail::concat("V=", c.vocab, " temperature=", c.temperature, " top_p=", c.top_p,
                              " terms=", c.log_prob, c.lse, c.entropy));
  Queue queue = Queue::cpu(2);
  HostTensor logits = normal_tensor(DType::kF32, {kTokens, c.vocab}, 91, 2.0f);
  HostTensor targets =
      i32_tensor({0, -1, static_cast<int32_t>(c.vocab - 1), static_cast<int32_t>(c.vocab / 2)});
  HostTensor log_prob(DType::kF32, {kTokens}), lse(DType::kF32, {kTokens}), entropy(DType::kF32, {kTokens});
  HostTensor a = normal_tensor(DType::kF32, {kTokens}, 92), b = normal_tensor(DType::kF32, {kTokens}, 93);
  HostTensor h = normal_tensor(DType::kF32, {kTokens}, 94), dlogits(DType::kF32, {kTokens, c.vocab});
  if (!c.log_prob) a.zero();
  run(queue, LogProbForward{logits.view(), targets.view(), c.temperature, c.top_p, log_prob.view(),
                            lse.view(), entropy.view()});
  run(queue, LogProbBackward{logits.view(), targets.view(), c.temperature, c.top_p, lse.view(),
                             entropy.view(), a.view(), c.lse ? b.view() : TensorView{},
                             c.entropy ? h.view() : TensorView{}, dlogits.view()});

  Values x = values_of(logits);
  std::vector<std::vector<bool>> sets;
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto z = tempered(logits.as<float>() + t * c.vocab, c.vocab, double{c.temperature});
    sets.push_back(top_p_set(z, double{c.top_p}, targets.as<int32_t>()[t]));
  }
  const auto loss = [&] {
    double total = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      const int32_t target = targets.as<int32_t>()[t];
      if (target < 0) continue;
      Values z(x.begin() + t * c.vocab, x.begin() + (t + 1) * c.vocab);
      for (double& v : z) v /= double{c.temperature};
      const Distribution d = distribution(z, sets[static_cast<size_t>(t)]);
      total += double{a.as<float>()[t]} * d.log_prob(z, target);
      if (c.lse) total += double{b.as<float>()[t]} * d.lse;
      if (c.entropy) total += double{h.as<float>()[t]} * d.entropy;
    }
    return total;
  };
  EXPECT_LT(worst_error(x, loss, dlogits.view()), kTolerance);
}

TEST(LogProbBackward, matches_differences_of_every_term) {
  for (const int64_t vocab : {2, 19, 257}) {
    for (const float temperature : {1.0f, 0.7f, 1.6f}) {
      for (const float top_p : {1.0f, 0.9f, 0.4f}) {
        for (int terms = 1; terms < 8; ++terms) {
          check_gradient({vocab, temperature, top_p, (terms & 1) != 0, (terms & 2) != 0, (terms & 4) != 0});
        }
      }
    }
  }
}

TEST(LogProbBackward, bf16_is_the_rounded_fp32_gradient) {
  Queue queue = Queue::cpu(1);
  HostTensor logits = normal_tensor(DType::kF32, {kTokens, 257}, 95), targets = i32_tensor({5, 0, 256, -1});
  HostTensor log_prob(DType::kF32, {kTokens}), lse(DType::kF32, {kTokens});
  HostTensor weights = normal_tensor(DType::kF32, {kTokens}, 96);
  HostTensor wide(DType::kF32, {kTokens, 257}), narrow(DType::kBf16, {kTokens, 257});
  run(queue, LogProbForward{logits.view(), targets.view(), 1.0f, 1.0f, log_prob.view(), lse.view(), {}});
  for (HostTensor* out : {&wide, &narrow}) {
    run(queue,
        LogProbBackward{
            logits.view(), targets.view(), 1.0f, 1.0f, lse.view(), {}, weights.view(), {}, {}, out->view()});
  }
  EXPECT_TRUE(narrow.same_bytes(in_dtype(wide, DType::kBf16)));
}

}  // namespace
}  // namespace fp4t::test
