// Around the products: rotary tables, initialisation, priced memory, balance.
#include <cmath>

#include "engine/model/rope.h"
#include "gtest/gtest.h"
#include "tests/support/model_runs.h"

namespace fp4t::test {
namespace {

TEST(ModelRope, unscaled_tables_turn_by_position_times_frequency) {
  RopeSpec spec;
  spec.theta = 500.0;
  const RopeTables t = rope_tables(spec, 8, 40);
  for (int p = 0; p < 40; ++p) {
    for (int i = 0; i < 4; ++i) {
      const double angle = p / std::pow(500.0, i / 4.0);
      EXPECT_NEAR(t.cos[static_cast<size_t>(p * 4 + i)], std::cos(angle), 1e-6);
      EXPECT_NEAR(t.sin[static_cast<size_t>(p * 4 + i)], std::sin(angle), 1e-6);
    }
  }
}

TEST(ModelRope, scalings_stretch_slow_turns_and_keep_fast_ones) {
  for (const char* scaling : {"llama3", "yarn"}) {
    RopeSpec spec, plain;
    spec.scaling = scaling;
    spec.factor = 8;
    spec.original_positions = 1024;
    const auto base = rope_frequencies(plain, 64), scaled = rope_frequencies(spec, 64);
    EXPECT_DOUBLE_EQ(scaled.front(), base.front()) << scaling;
    EXPECT_NEAR(scaled.back(), base.back() / 8, 1e-12) << scaling;
    for (size_t i = 0; i < base.size(); ++i) {
      EXPECT_LE(scaled[i], base[i] * (1 + 1e-12)) << scaling << " " << i;
      EXPECT_GE(scaled[i], base[i] / 8 * (1 - 1e-12)) << scaling << " " << i;
      if (i > 0) {
        EXPECT_LT(scaled[i], scaled[i - 1]) << scaling << " " << i;
      }
    }
  }
  RopeSpec linear;
  linear.scaling = "linear";
  linear.factor = 4;
  EXPECT_DOUBLE_EQ(rope_frequencies(linear, 64)[3], rope_frequencies({}, 64)[3] / 4);
}

TEST(ModelRope, yarn_amplifies_by_its_attention_factor) {
  RopeSpec yarn;
  yarn.scaling = "yarn";
  yarn.factor = 4;
  yarn.original_positions = 512;
  EXPECT_NEAR(rope_tables(yarn, 32, 1).cos[0], 0.1 * std::log(4.0) + 1.0, 1e-6);
}

TEST(ModelInit, matrices_have_the_asked_spread_and_norms_are_one) {
  ModelSpec spec = tiny_model();
  spec.init.std = 0.02;
  TestModel m(make_plan_by_hand(spec, {}));
  for (const Param& p : m.model.params().params()) {
    double sum = 0, squares = 0;
    const int64_t n = p.master.elements();
    for (int64_t i = 0; i < n; ++i) {
      const double v = gradient_element(p.master, i);
      sum += v;
      squares += v * v;
      if (p.info.role == ParamRole::kNorm) {
        ASSERT_EQ(v, 1.0) << p.info.name;
      }
    }
    if (p.info.role == ParamRole::kNorm) continue;
    const double expected = p.info.residual_out ? 0.02 / std::sqrt(2.0 * 2) : 0.02;
    const double count = static_cast<double>(n);
    // Five standard errors of mean and standard deviation.
    EXPECT_NEAR(sum / count, 0.0, 5 * expected / std::sqrt(count)) << p.info.name;
    EXPECT_NEAR(std::sqrt(squares / count), expected, 5 * expected / std::sqrt(2 * count)) << p.info.name;
  }
}

TEST(ModelInit, weights_depend_on_the_seed_and_nothing_else) {
  Plan plan = make_plan_by_hand(tiny_model(), {});
  TestModel a(plan), b(plan);
  plan.run.seed = 8;
  TestModel c(plan);
  const char* name = "layers.1.experts.down.weight";
  EXPECT_EQ(bytes_of(a.model.params().find(name).master), bytes_of(b.model.params().find(name).master));
  EXPECT_NE(bytes_of(a.model.params().find(name).master), bytes_of(c.model.params().find(name).master));
}

// The largest calls that the plan allows fit into what it priced, under every kind of cell.
TEST(ModelMemory, priced_arenas_hold_the_largest_calls) {
  for (const TestCells& cells :
       {fp32_cells(), TestCells{}, mxfp8_cells(), nvidia_nvfp4_cells(), quartet2_cells(), rl_nvfp4_cells()}) {
    for (const char* recompute : {"none", "block"}) {
      TestSizes sizes;
      sizes.max_tokens = 50;
      sizes.max_decode_tokens = 33;
      sizes.max_cache_slots = 5;
      TestModel m(make_plan_by_hand(tiny_model(), cells, {}, recompute, sizes));
      const TokenBatch batch = random_batch({30, 20}, tiny_model().vocabulary, 3);
      m.model.zero_gradients();
      forward_backward(m, m.training_pass(), batch, 0.1);
      Transformer::DecodeRows rows;
      for (int32_t i = 0; i < 33; ++i) {
        rows.tokens.push_back(i);
        rows.slots.push_back(i % 5);
        rows.positions.push_back(i / 5);
      }
      rows.logit_rows = {1, 2, 3, 4, 32};
      m.model.decode(m.sampling_pass(), rows);
      // What remains of the run arena is the optimizer's.
      for (const Param& p : m.model.params().params()) {
        m.model.run_arena().take("m", DType::kF32, p.master.shape);
        m.model.run_arena().take("v", DType::kF32, p.master.shape);
      }
      int64_t sum = 0;
      for (const MemoryLine& line : m.plan.memory.run) sum += line.bytes;
      EXPECT_EQ(sum, m.plan.memory.run_bytes);
      EXPECT_LE(m.plan.memory.run_bytes - m.model.run_arena().used_bytes(), 16 * 256);
    }
  }
}

TEST(ModelMemory, a_reclaimed_block_holds_what_it_held) {
  Queue queue = Queue::cpu(1);
  Arena arena(queue, "test", 4096, Poison::kNan);
  const int64_t mark = arena.used_bytes();
  const TensorView kept = arena.take("kept", DType::kI32, {3});
  kept.as<int32_t>()[2] = 7;
  const int64_t level = arena.used_bytes();
  arena.rewind(mark);
  arena.reclaim(level);
  EXPECT_EQ(kept.as<int32_t>()[2], 7);
  EXPECT_NE(arena.take("next", DType::kI32, {3}).data, kept.data);
  EXPECT_THROW(arena.reclaim(4096), InternalError);
}

TEST(ModelMemory, recomputing_blocks_needs_less) {
  ModelSpec spec = tiny_model();
  spec.layers = 6;
  TestSizes sizes;
  sizes.max_cache_slots = sizes.max_decode_tokens = 0;
  const Plan kept = make_plan_by_hand(spec, {}, {}, "none", sizes);
  const Plan again = make_plan_by_hand(spec, {}, {}, "block", sizes);
  EXPECT_LT(again.memory.step_bytes, kept.memory.step_bytes / 2);
}

TEST(ModelBalance, bias_moves_towards_idle_experts_once) {
  ModelSpec spec = tiny_model();
  spec.moe.balance.bias_rate = 0.125;
  TestModel m(make_plan_by_hand(spec, {}));
  const std::vector<int64_t> load = {10, 0, 4, 4, 4, 2};  // mean 4
  m.model.update_expert_bias({load});
  const float* bias = m.model.params().find_buffer("layers.1.router.bias").data.as<float>();
  const float expected[] = {-0.125f, 0.125f, 0, 0, 0, 0.125f};
  for (int e = 0; e < 6; ++e) EXPECT_EQ(bias[e], expected[e]) << e;
}

// One batch of eight sequences in one, two or eight micro-batches. Cross-entropy and z-loss are sums over
// tokens, so only FP32 rounding may differ; the balance loss uses the expert fractions of each micro-batch
// (engine/model/README.md) and is left out here.
TEST(ModelMicroBatch, splits_give_the_same_gradient) {
  ModelSpec spec = tiny_model();
  spec.moe.balance.z_loss = 0.02;
  const int length = 11;
  TestModel m(make_plan_by_hand(spec, fp32_cells()));
  const TokenBatch whole = random_batch(std::vector<int>(8, length), spec.vocabulary, 4);
  const double weight = 1.0 / static_cast<double>(trained_tokens(whole));
  const auto gradients = [&](int micro_batches) {
    m.model.zero_gradients();
    const int tokens = 8 * length / micro_batches;
    for (int b = 0; b < micro_batches; ++b) {
      TokenBatch part;
      for (int t = b * tokens; t < (b + 1) * tokens; ++t) {
        const auto i = static_cast<size_t>(t);
        part.tokens.push_back(whole.tokens[i]);
        part.targets.push_back(whole.targets[i]);
        part.positions.push_back(whole.positions[i]);
        part.doc_begin.push_back(whole.doc_begin[i] - b * tokens);
      }
      forward_backward(m, m.training_pass(), part, weight);
    }
    std::vector<std::vector<double>> list;
    for (const Param& p : m.model.params().params()) {
      std::vector<double>& g = list.emplace_back();
      for (int64_t i = 0; i < p.gradient.elements(); ++i) g.push_back(gradient_element(p.gradient, i));
    }
    return list;
  };
  const auto one = gradients(1);
  for (const int micro_batches : {2, 4, 8}) {
    const auto split = gradients(micro_batches);
    for (size_t p = 0; p < one.size(); ++p) {
      double error = 0, signal = 0;
      for (size_t i = 0; i < one[p].size(); ++i) {
        error += std::pow(one[p][i] - split[p][i], 2);
        signal += std::pow(one[p][i], 2);
      }
      EXPECT_LT(error, 1e-10 * signal) << m.plan.parameters[p].name << " in " << micro_batches;
    }
  }
}

}  // namespace
}  // namespace fp4t::test
