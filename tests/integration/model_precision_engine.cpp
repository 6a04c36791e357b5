// The model under quantised tables: what must not change numerics is shown by equal bits.
#include <cmath>
#include <map>

#include "gtest/gtest.h"
#include "tests/support/model_runs.h"

namespace fp4t::test {
namespace {

const std::map<std::string, TestCells>& all_cells() {
  static const std::map<std::string, TestCells> cells = [] {
    std::map<std::string, TestCells> c;
    c["fp32"] = fp32_cells();
    c["bf16"] = {};
    c["mxfp8"] = mxfp8_cells();
    c["nvidia_nvfp4"] = nvidia_nvfp4_cells();
    c["quartet2"] = quartet2_cells();
    c["rl_nvfp4"] = rl_nvfp4_cells();
    // Every way from fprop's codes to a backward operand.
    TestCells mixed = mxfp8_cells();
    mixed.forward = mixed.sampler = {nvfp4(), nvfp4()};
    mixed.backward.dgrad_weight = from_forward(mxfp8());
    mixed.backward.wgrad_act = from_forward(mxfp8());
    c["nvfp4_forward_mxfp8_backward"] = mixed;
    TestCells plain;
    plain.forward = plain.sampler = {mxfp8(), mxfp8()};
    plain.backward.dgrad_weight = plain.backward.wgrad_act = from_forward(QuantSpec{});
    c["mxfp8_forward_bf16_backward"] = plain;
    return c;
  }();
  return cells;
}

class Cells : public testing::TestWithParam<std::string> {
 protected:
  const TestCells& cells() const { return all_cells().at(GetParam()); }
};

std::vector<std::string> names_of_cells() {
  std::vector<std::string> names;
  for (const auto& [name, cells] : all_cells()) names.push_back(name);
  return names;
}

const std::vector<int> kLengths = {31, 1, 24, 40};

struct Outcome {
  std::vector<uint8_t> logits;
  std::vector<std::vector<uint8_t>> gradients;
  RouterSums router;
  std::vector<OperandStats> stats;
  double nonfinite;
};

Outcome run_once(TestModel& m, const TokenBatch& batch, Pass pass) {
  pass.count_load = true;
  m.model.zero_gradients();
  forward_backward(m, pass, batch, 1.0 / static_cast<double>(trained_tokens(batch)));
  Outcome o;
  o.logits = bytes_of(m.model.token_buffers(batch.size()).log_prob);
  o.gradients = gradient_bytes(m);
  o.router = m.model.take_router_sums();
  o.nonfinite = m.model.take_nonfinite();
  o.stats = m.model.take_operand_stats();
  return o;
}

void expect_same(TestModel& m, const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.logits, b.logits);
  const auto& params = m.model.params().params();
  for (size_t i = 0; i < params.size(); ++i) EXPECT_EQ(a.gradients[i], b.gradients[i]) << params[i].info.name;
  EXPECT_EQ(a.router.load, b.router.load);
  EXPECT_EQ(a.router.z, b.router.z);
  EXPECT_EQ(a.router.aux, b.router.aux);
  EXPECT_EQ(a.nonfinite, b.nonfinite);
  ASSERT_EQ(a.stats.size(), b.stats.size());
  for (size_t i = 0; i < a.stats.size(); ++i) {
    for (int k = 0; k < kNumQuantStats; ++k)
      EXPECT_EQ(a.stats[i].stat[k], b.stats[i].stat[k]) << i << " " << k;
  }
}

TEST_P(Cells, running_blocks_again_changes_no_bit) {
  ModelSpec model = tiny_model();  // two layers of each kind: they may share what backward reads the codes of
  model.layers = 4;
  model.moe.dense_layers = 2;
  TestModel kept(make_plan_by_hand(model, cells()));
  TestModel again(make_plan_by_hand(model, cells(), {}, "block"));
  const TokenBatch batch = random_batch(kLengths, model.vocabulary, 5);
  expect_same(kept, run_once(kept, batch, kept.training_pass()),
              run_once(again, batch, again.training_pass()));
}

TEST_P(Cells, the_same_pass_gives_the_same_bits_twice) {
  TestModel m(make_plan_by_hand(tiny_model(), cells()));
  const TokenBatch batch = random_batch(kLengths, tiny_model().vocabulary, 5);
  run_once(m, batch, m.training_pass());  // fills the kept codes of weights
  m.model.weights_changed();
  const Outcome first = run_once(m, batch, m.training_pass());
  m.model.weights_changed();
  expect_same(m, first, run_once(m, batch, m.training_pass()));
}

TEST_P(Cells, load_is_tokens_times_choices) {
  for (const char* recompute : {"none", "block"}) {
    TestModel m(make_plan_by_hand(tiny_model(), cells(), {}, recompute));
    const TokenBatch batch = random_batch(kLengths, tiny_model().vocabulary, 6);
    Pass pass = m.training_pass();
    const RouterSums counted = run_once(m, batch, pass).router;
    ASSERT_EQ(counted.load.size(), 1u);
    int64_t sum = 0;
    for (const int64_t n : counted.load[0]) sum += n;
    EXPECT_EQ(sum, batch.size() * tiny_model().moe.top_k) << recompute;
    pass.backward = nullptr;
    m.model.forward(pass, batch);  // an evaluation counts nothing
    const RouterSums none = m.model.take_router_sums();
    EXPECT_EQ(none.load[0], std::vector<int64_t>(none.load[0].size(), 0));
  }
}

TEST_P(Cells, experts_without_tokens_get_exact_zeros) {
  ModelSpec model = tiny_model();
  model.moe.shared_experts = 0;
  for (const DType gradients : {DType::kF32, DType::kBf16}) {
    DtypesSpec dtypes;
    dtypes.gradients = gradients;
    TestModel m(make_plan_by_hand(model, cells(), dtypes));
    float* bias = m.model.params().find_buffer("layers.1.router.bias").data.as<float>();
    bias[1] = bias[4] = 1000.0f;
    const TokenBatch batch = random_batch(kLengths, model.vocabulary, 7);
    run_once(m, batch, m.training_pass());
    for (const char* name : {"layers.1.experts.gate_up.weight", "layers.1.experts.down.weight"}) {
      const TensorView g = m.model.params().find(name).gradient;
      const int64_t one = g.elements() / model.moe.experts;
      for (int64_t e = 0; e < model.moe.experts; ++e) {
        int64_t zeros = 0;
        for (int64_t i = e * one; i < (e + 1) * one; ++i) {
          ASSERT_TRUE(std::isfinite(gradient_element(g, i))) << name << " expert " << e;
          zeros += gradient_element(g, i) == 0 ? 1 : 0;
        }
        if (e == 1 || e == 4) {
          EXPECT_LT(zeros, one / 2) << name << " expert " << e;
        } else {
          EXPECT_EQ(zeros, one) << name << " expert " << e;
        }
      }
    }
  }
}

TEST_P(Cells, one_token_and_one_expert_are_enough) {
  ModelSpec model = tiny_model();
  model.moe.experts = model.moe.top_k = 1;
  TestModel kept(make_plan_by_hand(model, cells()));
  TestModel again(make_plan_by_hand(model, cells(), {}, "block"));
  TokenBatch batch = random_batch({1}, model.vocabulary, 9);
  batch.targets[0] = 5;
  const Outcome o = run_once(kept, batch, kept.training_pass());
  expect_same(kept, o, run_once(again, batch, again.training_pass()));
  for (const Param& p : kept.model.params().params()) {
    for (int64_t i = 0; i < p.gradient.elements(); ++i) {
      ASSERT_TRUE(std::isfinite(gradient_element(p.gradient, i))) << p.info.name;
    }
  }
}

TEST_P(Cells, monitors_name_every_quantised_operand) {
  TestModel m(make_plan_by_hand(tiny_model(), cells()));
  Pass pass = m.training_pass();
  pass.measure_error = true;
  const Outcome o = run_once(m, random_batch(kLengths, tiny_model().vocabulary, 10), pass);
  const BackwardCell& b = cells().backward;
  int64_t quantised = 0;
  for (const QuantSpec* s : {&cells().forward.act, &cells().forward.weight, &b.dgrad_grad, &b.dgrad_weight,
                             &b.wgrad_grad, &b.wgrad_act}) {
    quantised += s->quantised() ? 1 : 0;
  }
  // A dense layer of four linear layers and a MoE layer of six; the head is BF16.
  ASSERT_EQ(static_cast<int64_t>(o.stats.size()), 10 * quantised);
  for (const OperandStats& s : o.stats) {
    const double nmse = s.stat[kStatErrorEnergy] / s.stat[kStatSignalEnergy];
    EXPECT_GT(nmse, 1e-5) << s.layer << " " << name_of(s.module) << " " << name_of(s.gemm);
    EXPECT_LT(nmse, 0.05) << s.layer << " " << name_of(s.module) << " " << name_of(s.gemm);
    EXPECT_EQ(s.stat[kStatNonFinite], 0.0);
  }
}

// Cosine between the gradient of a table and that of fp32, over all parameters. Two layers of 4-bit
// products and the routing that they move leave about 0.77 to 0.87; single products are held to much
// tighter bounds in tests/unit/model_linear.cpp.
TEST_P(Cells, gradients_point_where_fp32_points) {
  TestModel reference(make_plan_by_hand(tiny_model(), fp32_cells()));
  TestModel m(make_plan_by_hand(tiny_model(), cells()));
  const TokenBatch batch = random_batch(kLengths, tiny_model().vocabulary, 8);
  run_once(reference, batch, reference.training_pass());
  run_once(m, batch, m.training_pass());
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < m.model.params().params().size(); ++i) {
    const TensorView a = m.model.params().params()[i].gradient;
    const TensorView b = reference.model.params().params()[i].gradient;
    for (int64_t k = 0; k < a.elements(); ++k) {
      const double x = gradient_element(a, k), y = gradient_element(b, k);
      ab += x * y;
      aa += x * x;
      bb += y * y;
    }
  }
  const double cosine = ab / std::sqrt(aa * bb);
  const bool four_bit = GetParam().find("nvfp4") != std::string::npos || GetParam() == "quartet2";
  EXPECT_GT(cosine, four_bit ? 0.7 : 0.97) << "measured " << cosine;
  RecordProperty("cosine", std::to_string(cosine));
}

INSTANTIATE_TEST_SUITE_P(Model, Cells, testing::ValuesIn(names_of_cells()),
                         [](const auto& test) { return test.param; });

TEST(ModelPrecision, stochastic_draws_follow_the_sample_and_the_step) {
  TestModel m(make_plan_by_hand(tiny_model(), nvidia_nvfp4_cells()));
  const TokenBatch batch = random_batch(kLengths, tiny_model().vocabulary, 5);
  Pass pass = m.training_pass();
  const Outcome base = run_once(m, batch, pass);
  pass.sample_id += 4;
  const Outcome other_sample = run_once(m, batch, pass);
  pass = m.training_pass();
  pass.step += 1;
  const Outcome other_step = run_once(m, batch, pass);
  EXPECT_EQ(base.logits, other_sample.logits);  // the forward rounds to nearest
  EXPECT_NE(base.gradients, other_sample.gradients);
  EXPECT_NE(base.gradients, other_step.gradients);
}

TEST(ModelPrecision, a_non_finite_weight_is_counted_once) {
  for (const char* recompute : {"none", "block"}) {
    TestModel m(make_plan_by_hand(tiny_model(), mxfp8_cells(), {}, recompute));
    const TokenBatch batch = random_batch({20}, tiny_model().vocabulary, 5);
    EXPECT_EQ(run_once(m, batch, m.training_pass()).nonfinite, 0.0);
    Param& p = m.model.params().find("layers.1.attn.out.weight");
    p.copy.as<Bf16>()[3] = to_bf16(std::nanf(""));
    m.model.weights_changed();
    Pass pass = m.training_pass();
    pass.backward = nullptr;
    m.model.forward(pass, batch);
    const double first = m.model.take_nonfinite();
    EXPECT_GE(first, 1.0);
    EXPECT_EQ(m.model.take_nonfinite(), 0.0);
    m.model.take_operand_stats();
    EXPECT_EQ(m.model.take_nonfinite(), 0.0);
  }
}

TEST(ModelPrecision, a_second_micro_batch_refuses_bf16_gradients) {
  DtypesSpec dtypes;
  dtypes.gradients = DType::kBf16;
  TestModel m(make_plan_by_hand(tiny_model(), {}, dtypes));
  const TokenBatch batch = random_batch({20}, tiny_model().vocabulary, 5);
  m.model.zero_gradients();
  forward_backward(m, m.training_pass(), batch, 0.1);
  EXPECT_THROW(forward_backward(m, m.training_pass(), batch, 0.1), InternalError);
}

}  // namespace
}  // namespace fp4t::test
