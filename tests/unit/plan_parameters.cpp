#include "engine/plan/parameters.h"

#include <gtest/gtest.h>

#include <set>

namespace fp4t {
namespace {

ModelSpec small_moe() {
  ModelSpec m;
  m.layers = 3;
  m.hidden = 8;
  m.heads = 4;
  m.kv_heads = 2;
  m.head_dim = 6;
  m.mlp_hidden = 10;
  m.vocabulary = 11;
  m.qk_norm = true;
  m.moe.experts = 4;
  m.moe.top_k = 2;
  m.moe.hidden = 5;
  m.moe.shared_experts = 2;
  m.moe.shared_hidden = 3;
  m.moe.dense_layers = 1;
  return m;
}

const ParamInfo& find(const std::vector<ParamInfo>& list, const std::string& name) {
  for (const ParamInfo& p : list) {
    if (p.name == name) return p;
  }
  throw InternalError("no " + name);
}

TEST(PlanParameters, every_parameter_has_its_shape) {
  const auto list = parameter_list(small_moe(), {});
  EXPECT_EQ(find(list, "embed.weight").shape, Shape({11, 8}));
  EXPECT_EQ(find(list, "layers.0.attn.qkv.weight").shape, Shape({(4 + 2 + 2) * 6, 8}));
  EXPECT_EQ(find(list, "layers.0.attn.out.weight").shape, Shape({8, 24}));
  EXPECT_EQ(find(list, "layers.0.attn.q_norm.weight").shape, Shape({6}));
  EXPECT_EQ(find(list, "layers.0.attn_norm.weight").shape, Shape({8}));
  EXPECT_EQ(find(list, "layers.0.mlp.gate_up.weight").shape, Shape({20, 8}));
  EXPECT_EQ(find(list, "layers.0.mlp.down.weight").shape, Shape({8, 10}));
  EXPECT_EQ(find(list, "layers.2.router.weight").shape, Shape({4, 8}));
  EXPECT_EQ(find(list, "layers.2.experts.gate_up.weight").shape, Shape({4, 10, 8}));
  EXPECT_EQ(find(list, "layers.2.experts.down.weight").shape, Shape({4, 8, 5}));
  EXPECT_EQ(find(list, "layers.2.shared.gate_up.weight").shape, Shape({12, 8}));
  EXPECT_EQ(find(list, "layers.2.shared.down.weight").shape, Shape({8, 6}));
  EXPECT_EQ(find(list, "norm.weight").shape, Shape({8}));
  EXPECT_EQ(find(list, "head.weight").shape, Shape({11, 8}));
}

TEST(PlanParameters, dense_layers_have_no_experts_and_moe_layers_no_mlp) {
  const auto list = parameter_list(small_moe(), {});
  EXPECT_THROW(find(list, "layers.0.experts.down.weight"), InternalError);
  EXPECT_THROW(find(list, "layers.0.router.weight"), InternalError);
  EXPECT_THROW(find(list, "layers.1.mlp.down.weight"), InternalError);
  const auto buffers = buffer_list(small_moe());
  ASSERT_EQ(buffers.size(), 2u);
  EXPECT_EQ(buffers[0].name, "layers.1.router.bias");
  EXPECT_EQ(buffers[1].shape, Shape({4}));
}

TEST(PlanParameters, names_are_unique_and_ids_are_positions) {
  const auto list = parameter_list(small_moe(), {});
  std::set<std::string> names;
  for (size_t i = 0; i < list.size(); ++i) {
    EXPECT_TRUE(names.insert(list[i].name).second) << list[i].name;
    EXPECT_EQ(list[i].tensor_id, i);
  }
}

TEST(PlanParameters, totals_match_hand_counts) {
  const ModelSpec m = small_moe();
  const auto list = parameter_list(m, {});
  const int64_t attention = 48 * 8 + 8 * 24 + 2 * 6 + 2 * 8;
  const int64_t dense = 20 * 8 + 8 * 10;
  const int64_t expert = 10 * 8 + 8 * 5;
  const int64_t shared = 12 * 8 + 8 * 6;
  const int64_t router = 4 * 8;
  EXPECT_EQ(total_parameters(list),
            11 * 8 + 3 * attention + dense + 2 * (router + 4 * expert + shared) + 8 + 11 * 8);
  EXPECT_EQ(active_parameters(list, m),
            3 * attention + dense + 2 * (router + 2 * expert + shared) + 8 + 11 * 8);
}

TEST(PlanParameters, a_tied_head_has_no_weight_of_its_own_but_counts_as_active) {
  ModelSpec m = small_moe();
  const int64_t active = active_parameters(parameter_list(m, {}), m);
  m.tied_head = true;
  const auto list = parameter_list(m, {});
  EXPECT_THROW(find(list, "head.weight"), InternalError);
  EXPECT_EQ(active_parameters(list, m), active);
}

TEST(PlanParameters, sensitive_gradients_stay_fp32_and_norms_have_no_decay) {
  const auto list = parameter_list(small_moe(), {});
  for (const char* name : {"embed.weight", "head.weight", "norm.weight", "layers.1.router.weight"}) {
    EXPECT_EQ(find(list, name).gradient, DType::kF32) << name;
  }
  EXPECT_EQ(find(list, "layers.1.experts.down.weight").gradient, DType::kBf16);
  EXPECT_FALSE(find(list, "norm.weight").weight_decay);
  EXPECT_TRUE(find(list, "layers.1.experts.down.weight").weight_decay);
  EXPECT_TRUE(find(list, "layers.1.experts.down.weight").residual_out);
  EXPECT_TRUE(find(list, "layers.1.attn.out.weight").residual_out);
  EXPECT_FALSE(find(list, "layers.1.attn.qkv.weight").residual_out);
  EXPECT_EQ(find(list, "layers.1.experts.down.weight").placement, Placement::kSplitByExpert);
}

}  // namespace
}  // namespace fp4t
