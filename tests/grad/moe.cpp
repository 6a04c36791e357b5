// Gradients of routing and combination against central differences in double. The choice of experts and
// the counts are constants, as the ops define.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/support/ops.h"
#include "tests/support/routing.h"

namespace fp4t::test {
namespace {

constexpr double kTolerance = 1e-5;

// total = <gates, dgates> + aux_coefficient * aux + z_coefficient * z, in double.
class RouterLoss {
 public:
  RouterLoss(Routing& r, const Values& dgates, double aux, double z)
      : r_(r), dgates_(dgates), aux_(aux), z_(z) {}

  double operator()(const Values& logits) const {
    const auto n = static_cast<size_t>(r_.setup.num_experts);
    double total = 0;
    Values score_sums(n, 0.0);
    for (int64_t t = 0; t < r_.setup.tokens; ++t) {
      const double* x = logits.data() + static_cast<size_t>(t) * n;
      double power = 0;
      for (size_t e = 0; e < n; ++e) power += std::exp(x[e]);
      total += z_ * std::log(power) * std::log(power);
      Values scores(n);
      double sum = 0;
      for (size_t e = 0; e < n; ++e) {
        scores[e] =
            r_.setup.kind == RouterKind::kSoftmax ? std::exp(x[e]) / power : 1 / (1 + std::exp(-x[e]));
        sum += scores[e];
      }
      for (size_t e = 0; e < n; ++e) score_sums[e] += scores[e] / sum;
      total += gate_term(t, scores);
    }
    const double pairs = static_cast<double>(r_.setup.tokens * r_.setup.top_k);
    for (size_t e = 0; e < n; ++e) {
      const double fraction = static_cast<double>(r_.count(static_cast<int64_t>(e))) / pairs;
      total += aux_ * static_cast<double>(n) * fraction * score_sums[e];
    }
    return total;
  }

 private:
  double gate_term(int64_t t, const Values& scores) const {
    const int64_t k = r_.setup.top_k;
    const int32_t* chosen = r_.experts.as<int32_t>() + t * k;
    double sum = 0, term = 0;
    for (int64_t j = 0; j < k; ++j) sum += scores[static_cast<size_t>(chosen[j])];
    for (int64_t j = 0; j < k; ++j) {
      const double s = scores[static_cast<size_t>(chosen[j])];
      const double gate = double{r_.setup.gate_scale} * (r_.setup.normalise ? s / sum : s);
      term += gate * dgates_[static_cast<size_t>(t * k + j)];
    }
    return term;
  }

  Routing& r_;
  const Values& dgates_;
  double aux_, z_;
};

std::vector<RoutingSetup> setups() {
  std::vector<RoutingSetup> all;
  for (const auto kind : {RouterKind::kSoftmax, RouterKind::kSigmoid}) {
    for (const bool normalise : {true, false}) {
      for (const auto& [n, k] : {std::pair<int64_t, int64_t>{8, 2}, {5, 1}, {7, 3}, {4, 4}}) {
        all.push_back({21, n, k, kind, normalise, 1.5f});
      }
    }
  }
  return all;
}

TEST(RouteBackward, matches_differences_of_gates_aux_and_z) {
  Queue queue = Queue::cpu(2);
  for (const RoutingSetup& s : setups()) {
    for (const auto& [gates, aux, z] :
         {std::tuple<float, float, float>{1, 0, 0}, {0, 0.3f, 0}, {0, 0, 0.2f}, {1, 0.3f, 0.2f}}) {
      SCOPED_TRACE(detail::concat("E=", s.num_experts, " k=", s.top_k, " kind=", static_cast<int>(s.kind),
                                  " normalise=", s.normalise, " gates=", gates, " aux=", aux, " z=", z));
      Routing r(s);
      fill_normal(r.logits, 50, 1.5f);
      fill_normal(r.bias, 51, 0.1f);
      r.route(queue);
      HostTensor dgates = normal_tensor(DType::kF32, {s.tokens, s.top_k}, 52, gates);
      HostTensor dlogits(DType::kF32, {s.tokens, s.num_experts});
      r.backward(queue, dgates, aux, z, dlogits);
      // One expert of one choice: a normalised gate is constant, and so is the auxiliary loss of every
      // token's whole choice.
      const bool constant = (gates == 1 && aux == 0 && s.top_k == 1 && s.normalise) ||
                            (aux > 0 && gates == 0 && s.top_k == s.num_experts);
      Values logits = values_of(r.logits);
      const Values weights = values_of(dgates);
      const RouterLoss loss(r, weights, double{aux}, double{z});
      if (constant) {
        for (double g : values_of(dlogits)) EXPECT_NEAR(g, 0.0, 1e-6);
      } else {
        EXPECT_TRUE(gradient_matches(
            logits, [&] { return loss(logits); }, dlogits.view(), kTolerance, 1));
      }
    }
  }
}

// The whole router: the auxiliary and z losses reach its weight (and the input) through the logits.
TEST(RouteBackward, reaches_the_weight_and_the_input) {
  Queue queue = Queue::cpu(2);
  for (const auto kind : {RouterKind::kSoftmax, RouterKind::kSigmoid}) {
    const int64_t tokens = 70, width = 12, n = 8;
    Routing r({tokens, n, 2, kind, true, 1.0f});
    HostTensor x = normal_tensor(DType::kF32, {tokens, width}, 60);
    HostTensor weight = normal_tensor(DType::kF32, {n, width}, 61, 0.3f);
    run(queue, RouterLogits{x.view(), weight.view(), r.logits.view()});
    r.route(queue);
    HostTensor dgates = normal_tensor(DType::kF32, {tokens, 2}, 62), dlogits(DType::kF32, {tokens, n});
    HostTensor dx(DType::kF32, {tokens, width}), dweight = zeros(DType::kF32, {n, width});
    r.backward(queue, dgates, 0.1f, 0.05f, dlogits);
    run(queue, RouterLogitsBackward{x.view(), weight.view(), dlogits.view(), dx.view(), dweight.view()});

    Values xs = values_of(x), ws = values_of(weight);
    const Values weights = values_of(dgates);
    const RouterLoss loss(r, weights, double{0.1f}, double{0.05f});
    const auto total = [&] {
      Values logits(static_cast<size_t>(tokens * n), 0.0);
      for (size_t i = 0; i < logits.size(); ++i) {
        const size_t t = i / static_cast<size_t>(n), e = i % static_cast<size_t>(n);
        for (size_t k = 0; k < static_cast<size_t>(width); ++k) {
          logits[i] += xs[t * static_cast<size_t>(width) + k] * ws[e * static_cast<size_t>(width) + k];
        }
      }
      return loss(logits);
    };
    EXPECT_TRUE(gradient_matches(ws, total, dweight.view(), kTolerance, 1));
    EXPECT_TRUE(gradient_matches(xs, total, dx.view(), kTolerance, 7));
  }
}

TEST(RouterLogitsBackward, adds_to_the_weight_gradient) {
  Queue queue = Queue::cpu(1);
  HostTensor x = normal_tensor(DType::kBf16, {70, 40}, 63), weight = normal_tensor(DType::kF32, {8, 40}, 64);
  HostTensor dlogits = normal_tensor(DType::kF32, {70, 8}, 65), dx(DType::kF32, {70, 40});
  HostTensor once = zeros(DType::kF32, {8, 40}), twice = zeros(DType::kF32, {8, 40});
  run(queue, RouterLogitsBackward{x.view(), weight.view(), dlogits.view(), dx.view(), once.view()});
  for (int i = 0; i < 2; ++i) {
    run(queue, RouterLogitsBackward{x.view(), weight.view(), dlogits.view(), dx.view(), twice.view()});
  }
  for (int64_t i = 0; i < 320; ++i) EXPECT_EQ(twice.as<float>()[i], 2 * once.as<float>()[i]);
}

TEST(CombineExpertsBackward, matches_differences) {
  Queue queue = Queue::cpu(2);
  const int64_t tokens = 9, width = 20, k = 3;
  Routing r({tokens, 8, k});
  fill_normal(r.logits, 70);
  r.route(queue);
  HostTensor y = normal_tensor(DType::kF32, {tokens * k, width}, 71);
  HostTensor dout = normal_tensor(DType::kF32, {tokens, width}, 72);
  HostTensor dy(DType::kF32, {tokens * k, width}), dgates(DType::kF32, {tokens, k});
  run(queue, CombineExpertsBackward{dout.view(), y.view(), r.row_of.view(), r.gates.view(), dy.view(),
                                    dgates.view()});
  Values ys = values_of(y), gates = values_of(r.gates);
  const Values douts = values_of(dout);
  const auto loss = [&] {
    double total = 0;
    for (int64_t i = 0; i < tokens * k; ++i) {
      const int64_t row = r.row_of.as<int32_t>()[i];
      for (int64_t d = 0; d < width; ++d) {
        total += gates[static_cast<size_t>(i)] * ys[static_cast<size_t>(row * width + d)] *
                 douts[static_cast<size_t>(i / k * width + d)];
      }
    }
    return total;
  };
  EXPECT_TRUE(gradient_matches(ys, loss, dy.view(), kTolerance, 1));
  EXPECT_TRUE(gradient_matches(gates, loss, dgates.view(), kTolerance, 1));
}

}  // namespace
}  // namespace fp4t::test
