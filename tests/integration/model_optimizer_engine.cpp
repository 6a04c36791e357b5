// Model and optimizer together: what a bad number may not do, and masters stored in BF16.
#include <cmath>
#include <limits>

#include "engine/optim/optimizer.h"
#include "gtest/gtest.h"
#include "kernels/formats/bf16.h"
#include "tests/support/model_runs.h"

namespace fp4t::test {
namespace {

OptimizerSpec adamw() {
  OptimizerSpec spec;
  spec.kind = "adamw";
  spec.learning_rate = 1e-3;
  return spec;
}

// Sets element 3 of a parameter, of every expert, in what products read and in the master.
void poison(Param& p, float bad) {
  const int64_t stride =
      p.info.role == ParamRole::kExpertWeight ? p.master.elements() / p.info.shape[0] : p.master.elements();
  for (int64_t i = 3; i < p.master.elements(); i += stride) {
    for (const TensorView& v : {p.master, p.copy}) {
      if (v.empty()) continue;
      if (v.dtype == DType::kF32) {
        v.as<float>()[i] = bad;
      } else {
        v.as<Bf16>()[i] = f32_to_bf16(bad);
      }
    }
  }
}

std::vector<std::vector<uint8_t>> master_bytes(TestModel& m) {
  std::vector<std::vector<uint8_t>> list;
  for (const Param& p : m.model.params().params()) list.push_back(bytes_of(p.master));
  return list;
}

// NVFP4 has no NaN, so quantisers must have seen it; without quantised cells it must reach a gradient.
void expect_skipped(const std::string& table, const TestCells& cells, const std::string& recompute) {
  const std::string names[] = {"embed.weight",
                               "layers.0.attn_norm.weight",
                               "layers.0.attn.qkv.weight",
                               "layers.1.attn.k_norm.weight",
                               "layers.0.mlp.down.weight",
                               "layers.1.router.weight",
                               "layers.1.experts.gate_up.weight",
                               "layers.1.experts.down.weight",
                               "layers.1.shared.down.weight",
                               "norm.weight",
                               "head.weight"};
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    for (const std::string& name : names) {
      TestModel m(make_plan_by_hand(tiny_model(), cells, {}, recompute));
      Optimizer optimizer(m.model, *m.comm, m.model.run_arena());
      TokenBatch batch = random_batch({31, 24, 40}, tiny_model().vocabulary, 5);
      batch.tokens[0] = 0;  // element 3 of the embedding is in its row
      poison(m.model.params().find(name), bad);
      m.model.weights_changed();
      m.model.zero_gradients();
      const auto before = master_bytes(m);
      forward_backward(m, m.training_pass(), batch, 1.0 / static_cast<double>(trained_tokens(batch)));
      const StepReport report = optimizer.step(adamw(), 1.0, 3, m.model.take_nonfinite());
      const std::string what = detail::concat(table, " ", name, " ", bad, " recompute ", recompute);
      EXPECT_FALSE(report.applied) << what;
      EXPECT_GT(report.nonfinite, 0) << what;
      EXPECT_EQ(before, master_bytes(m)) << what;
      EXPECT_EQ(optimizer.applied_updates(), 0) << what;
    }
  }
}

TEST(ModelOptimizer, a_non_finite_weight_anywhere_skips_the_update_without_quantised_cells) {
  expect_skipped("fp32", fp32_cells(), "none");
  expect_skipped("bf16", {}, "none");
  expect_skipped("bf16", {}, "block");
}

TEST(ModelOptimizer, a_non_finite_weight_anywhere_skips_the_update_with_quantised_cells) {
  expect_skipped("mxfp8", mxfp8_cells(), "none");
  expect_skipped("nvidia_nvfp4", nvidia_nvfp4_cells(), "block");
  expect_skipped("quartet2", quartet2_cells(), "none");
  expect_skipped("rl_nvfp4", rl_nvfp4_cells(), "none");
}

// The model sees the same weights, whether they are copies of FP32 masters or the masters themselves; an
// update stores one of the two BF16 neighbours of what FP32 masters become.
TEST(ModelOptimizer, bf16_masters_compute_alike_and_store_a_neighbour) {
  DtypesSpec narrow;
  narrow.masters = DType::kBf16;
  TestModel a(make_plan_by_hand(tiny_model(), nvidia_nvfp4_cells()));
  TestModel b(make_plan_by_hand(tiny_model(), nvidia_nvfp4_cells(), narrow));
  auto &wide_params = a.model.params().params(), &narrow_params = b.model.params().params();
  for (size_t i = 0; i < wide_params.size(); ++i) {
    const Param &w = wide_params[i], &n = narrow_params[i];
    const bool fixed = n.info.role == ParamRole::kNorm || n.info.role == ParamRole::kRouter;
    ASSERT_EQ(n.master.dtype, fixed ? DType::kF32 : DType::kBf16) << n.info.name;
    ASSERT_TRUE(n.copy.empty()) << n.info.name;
    for (int64_t k = 0; k < w.master.elements(); ++k) {
      w.master.as<float>()[k] = static_cast<float>(gradient_element(n.master, k));
    }
  }
  a.model.params().refresh_copies(a.queue);
  a.model.weights_changed();
  Optimizer of_a(a.model, *a.comm, a.model.run_arena()), of_b(b.model, *b.comm, b.model.run_arena());

  const TokenBatch batch = random_batch({31, 24, 40}, tiny_model().vocabulary, 6);
  const double weight = 1.0 / static_cast<double>(trained_tokens(batch));
  for (TestModel* m : {&a, &b}) {
    m->model.zero_gradients();
    forward_backward(*m, m->training_pass(), batch, weight);
  }
  EXPECT_EQ(gradient_bytes(a), gradient_bytes(b));
  ASSERT_TRUE(of_a.step(adamw(), 1.0, 3, 0).applied);
  ASSERT_TRUE(of_b.step(adamw(), 1.0, 3, 0).applied);
  int64_t away_from_nearest = 0;
  for (size_t i = 0; i < wide_params.size(); ++i) {
    const Param &w = wide_params[i], &n = narrow_params[i];
    for (int64_t k = 0; k < w.master.elements(); ++k) {
      const float exact = w.master.as<float>()[k];
      if (n.master.dtype == DType::kF32) {
        ASSERT_EQ(exact, n.master.as<float>()[k]) << n.info.name;
        continue;
      }
      const uint16_t toward_zero = static_cast<uint16_t>(bits_of(exact) >> 16),
                     got = n.master.as<Bf16>()[k].bits;
      const bool exact_in_bf16 = (bits_of(exact) & 0xFFFFu) == 0;
      ASSERT_TRUE(got == toward_zero || (!exact_in_bf16 && got == toward_zero + 1))
          << n.info.name << " " << k;
      away_from_nearest += got != f32_to_bf16(exact).bits;
    }
  }
  EXPECT_GT(away_from_nearest, 0);
}

}  // namespace
}  // namespace fp4t::test
