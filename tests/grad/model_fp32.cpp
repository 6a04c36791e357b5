// The whole model in fp32: every parameter's gradient against central differences of the loss.
#include <cmath>
#include <cstdio>

#include "gtest/gtest.h"
#include "tests/support/model_runs.h"

namespace fp4t::test {
namespace {

std::vector<double> unit_direction(int64_t n, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<double> d(static_cast<size_t>(n));
  double norm = 0;
  for (double& v : d) {
    v = normal(engine);
    norm += v * v;
  }
  for (double& v : d) v /= std::sqrt(norm);
  return d;
}

// Loss with `param` moved by h along d.
LossAndLoad moved_loss(TestModel& m, Param& param, const std::vector<float>& base,
                       const std::vector<double>& d, double h, const TokenBatch& batch, double weight) {
  float* w = param.master.as<float>();
  for (size_t i = 0; i < base.size(); ++i) w[i] = static_cast<float>(static_cast<double>(base[i]) + h * d[i]);
  m.model.weights_changed();
  Pass pass = m.training_pass();
  pass.backward = nullptr;
  const LossAndLoad loss = total_loss(m, pass, batch, weight);
  std::copy(base.begin(), base.end(), w);
  return loss;
}

struct Slope {
  double value, step;
};

// Fourth-order central difference along d. The loss jumps where a token changes its experts: the step
// is halved until the load is the same at all its points.
Slope slope(TestModel& m, Param& param, const std::vector<double>& d, double h, const TokenBatch& batch,
            double weight) {
  const float* w = param.master.as<float>();
  const std::vector<float> base(w, w + param.master.elements());
  const auto f = [&](double at) { return moved_loss(m, param, base, d, at, batch, weight); };
  for (;; h /= 2) {
    const LossAndLoad far_left = f(-2 * h), left = f(-h), right = f(h), far_right = f(2 * h);
    const bool same =
        far_left.load == far_right.load && left.load == right.load && left.load == far_left.load;
    if (same || h < 1e-4) {
      return {(8 * (right.loss - left.loss) - (far_right.loss - far_left.loss)) / (12 * h), h};
    }
  }
}

void check_all_gradients(const ModelSpec& model, const std::string& recompute, double step = 4e-3) {
  TestModel m(make_plan_by_hand(model, fp32_cells(), {}, recompute));
  const uint64_t seed = 11;
  const TokenBatch batch = random_batch({13, 1, 9, 17}, model.vocabulary, seed);
  const double weight = 1.0 / static_cast<double>(trained_tokens(batch));
  m.model.zero_gradients();
  forward_backward(m, m.training_pass(), batch, weight);

  for (Param& p : m.model.params().params()) {
    const int64_t n = p.gradient.elements();
    std::vector<double> g(static_cast<size_t>(n));
    double norm = 0;
    for (int64_t i = 0; i < n; ++i) {
      g[static_cast<size_t>(i)] = gradient_element(p.gradient, i);
      norm += g[static_cast<size_t>(i)] * g[static_cast<size_t>(i)];
    }
    norm = std::sqrt(norm);
    ASSERT_GT(norm, 1e-5) << p.info.name << " has no gradient worth testing";
    for (uint64_t trial = 0; trial < 3; ++trial) {
      // Along the gradient, where its length shows; and two random mixtures with it.
      std::vector<double> d = unit_direction(n, seed + 100 * trial);
      for (int64_t i = 0; i < n; ++i) {
        const auto k = static_cast<size_t>(i);
        d[k] = (trial == 0 ? 0.0 : d[k]) + g[k] / norm;
      }
      double expected = 0;
      for (int64_t i = 0; i < n; ++i) expected += d[static_cast<size_t>(i)] * g[static_cast<size_t>(i)];
      const Slope measured = slope(m, p, d, step, batch, weight);
      // The loss is good to about 1e-7; its noise grows as the step shrinks.
      EXPECT_NEAR(measured.value, expected, 2e-3 * norm + 2e-7 / measured.step)
          << p.info.name << " trial " << trial << " seed " << seed << " step " << measured.step;
    }
  }
}

ModelSpec model_with_router_losses() {
  ModelSpec m = tiny_model();
  m.moe.balance.aux_loss = 0.3;
  m.moe.balance.z_loss = 0.02;
  return m;
}

TEST(ModelFp32, gradients_match_finite_differences) {
  check_all_gradients(model_with_router_losses(), "none");
}

TEST(ModelFp32, gradients_match_finite_differences_when_blocks_run_again) {
  check_all_gradients(model_with_router_losses(), "block");
}

TEST(ModelFp32, gradients_match_with_sigmoid_routing_and_tied_head) {
  ModelSpec m = model_with_router_losses();
  m.moe.router = "sigmoid";
  m.moe.normalise = true;
  m.moe.gate_scale = 1.7;
  m.moe.dense_layers = 0;
  m.moe.shared_experts = 2;
  m.moe.shared_hidden = 40;
  m.tied_head = true;
  m.qk_norm = false;
  m.heads = 4;
  m.kv_heads = 4;
  m.head_dim = 16;
  check_all_gradients(m, "none");
}

TEST(ModelFp32, gradients_match_with_a_clamp) {
  ModelSpec m = tiny_model();
  m.moe = {};
  m.swiglu_clamp = 1.5;
  check_all_gradients(m, "none", 2.5e-4);  // small, since the clamp has corners
}

TEST(ModelFp32, gradients_match_without_experts) {
  ModelSpec m = tiny_model();
  m.moe = {};
  check_all_gradients(m, "none");
}

TEST(ModelFp32, gates_that_are_not_normalised_have_the_right_gradient) {
  ModelSpec m = model_with_router_losses();
  m.moe.normalise = false;
  m.moe.top_k = 3;
  check_all_gradients(m, "none");
}

}  // namespace
}  // namespace fp4t::test
