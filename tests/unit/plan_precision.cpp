// The precision table: matching, order of rules, defaults, spans, and rules that never win.
#include "engine/plan/precision.h"

#include <gtest/gtest.h>

#include <chrono>

#include "engine/plan/match.h"
#include "kernels/base/check.h"

namespace fp4t {
namespace {

ModelSpec dense_model(int64_t layers = 4) {
  ModelSpec m;
  m.layers = layers;
  m.hidden = 64;
  m.heads = 2;
  m.kv_heads = 2;
  m.head_dim = 32;
  m.mlp_hidden = 64;
  m.vocabulary = 64;
  return m;
}

ModelSpec moe_model() {
  ModelSpec m = dense_model(6);
  m.moe.experts = 4;
  m.moe.top_k = 2;
  m.moe.hidden = 32;
  m.moe.dense_layers = 1;
  return m;
}

QuantSpec format(Format f) {
  QuantSpec s;
  s.format = f;
  return s;
}

QuantSpec nvfp4_16x16() {
  QuantSpec s = format(Format::kNvfp4);
  s.block = BlockShape::k16x16;
  return s;
}

struct RuleBuilder {
  PrecisionSpec spec;
  RuleSpec& add(Table t, std::vector<std::string> modules, const QuantSpec& cell) {
    auto& table = spec.tables[static_cast<size_t>(t)];
    RuleSpec rule;
    rule.modules = std::move(modules);
    rule.spec = cell;
    rule.path = "precision." + std::string(name_of(t)) + "[" + std::to_string(table.size()) + "]";
    rule.place = {"recipe.yaml", static_cast<int>(table.size()) + 10, 7};
    table.push_back(rule);
    return table.back();
  }
};

std::string error_of(const PrecisionSpec& spec, const ModelSpec& model, bool is_rl = false,
                     int64_t steps = 100) {
  try {
    resolve_precision(spec, model, is_rl, steps);
  } catch (const RecipeError& e) {
    return e.what();
  }
  return "";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

TEST(PlanPrecision, a_table_without_rules_is_bf16) {
  const StagePrecision p = resolve_precision({}, dense_model(), false, 100);
  ASSERT_EQ(p.forward.spans.size(), 1u);
  EXPECT_EQ(p.forward.spans[0].end, 100);
  EXPECT_EQ(p.forward.at(0).cell(3, Module::kMlpDown).act.format, Format::kBf16);
  EXPECT_EQ(p.backward.at(0).cell(3, Module::kHead).wgrad_grad.format, Format::kBf16);
  EXPECT_EQ(p.sampler.at(0).kv_cache, Format::kBf16);
}

TEST(PlanPrecision, the_first_rule_supplies_the_whole_cell) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"mlp.down"}, format(Format::kNvfp4)).operand = "act";
  QuantSpec rich = format(Format::kNvfp4);
  rich.scale_rule = ScaleRule::kFourOverSix;
  rich.scale_round = ScaleRound::kPow2;
  b.add(Table::kPretrainForward, {"*"}, rich);
  const StagePrecision p = resolve_precision(b.spec, dense_model(), false, 100);
  // What the first rule leaves out has the format's defaults, not the second rule's keys.
  EXPECT_EQ(p.forward.at(0).cell(1, Module::kMlpDown).act, format(Format::kNvfp4));
  EXPECT_EQ(p.forward.at(0).cell(1, Module::kMlpDown).weight, rich);
  EXPECT_EQ(p.forward.at(0).head.act, rich);
}

TEST(PlanPrecision, globs_cross_dots_and_leave_embed_alone) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"*.down"}, format(Format::kMxfp8));
  const StagePrecision p = resolve_precision(b.spec, moe_model(), false, 10);
  const ForwardTable& t = p.forward.at(0);
  EXPECT_EQ(t.cell(0, Module::kMlpDown).act.format, Format::kMxfp8);
  EXPECT_EQ(t.cell(1, Module::kExpertsDown).weight.format, Format::kMxfp8);
  EXPECT_EQ(t.cell(1, Module::kExpertsGateUp).act.format, Format::kBf16);
  EXPECT_EQ(t.embed, Format::kBf16);
}

TEST(PlanPrecision, last_percent_of_the_layers_rounds_up) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"attn.out"}, format(Format::kMxfp8)).layers = "last 15%";
  const StagePrecision p = resolve_precision(b.spec, dense_model(21), false, 10);  // 3.15 layers
  for (int64_t l = 0; l < 21; ++l) {
    EXPECT_EQ(p.forward.at(0).cell(l, Module::kAttnOut).act.format, l >= 17 ? Format::kMxfp8 : Format::kBf16)
        << l;
  }
  const StagePrecision q = resolve_precision(b.spec, dense_model(20), false, 10);  // 3 layers exactly
  EXPECT_EQ(q.forward.at(0).cell(16, Module::kAttnOut).act.format, Format::kBf16);
  EXPECT_EQ(q.forward.at(0).cell(17, Module::kAttnOut).act.format, Format::kMxfp8);
}

TEST(PlanPrecision, layer_ranges_include_both_ends_and_never_the_head) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {}, format(Format::kMxfp8)).layers = "1-2";
  const ForwardTable t = resolve_precision(b.spec, dense_model(), false, 10).forward.at(0);
  EXPECT_EQ(t.cell(0, Module::kAttnQkv).act.format, Format::kBf16);
  EXPECT_EQ(t.cell(1, Module::kAttnQkv).act.format, Format::kMxfp8);
  EXPECT_EQ(t.cell(2, Module::kAttnQkv).act.format, Format::kMxfp8);
  EXPECT_EQ(t.cell(3, Module::kAttnQkv).act.format, Format::kBf16);
  EXPECT_EQ(t.head.act.format, Format::kBf16);
}

TEST(PlanPrecision, step_percentages_are_half_open_and_round_down) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"*"}, format(Format::kMxfp8)).steps = "0-90%";
  const StagePrecision p = resolve_precision(b.spec, dense_model(), false, 99);  // 89.1
  ASSERT_EQ(p.forward.spans.size(), 2u);
  EXPECT_EQ(p.forward.spans[0].end, 89);
  EXPECT_EQ(p.forward.at(88).head.act.format, Format::kMxfp8);
  EXPECT_EQ(p.forward.at(89).head.act.format, Format::kBf16);
  EXPECT_EQ(p.forward.at(1000).head.act.format, Format::kBf16);
  EXPECT_EQ(p.backward.spans.size(), 1u);
}

TEST(PlanPrecision, a_longer_run_keeps_its_switch) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"*"}, format(Format::kMxfp8)).steps = "50-100%";
  const auto p = resolve_precision(b.spec, dense_model(), {StageShape{false, 300, 100}});
  ASSERT_EQ(p[0].forward.spans.size(), 2u);
  EXPECT_EQ(p[0].forward.spans[0].end, 50);
  EXPECT_EQ(p[0].forward.at(299).head.act.format, Format::kMxfp8);
}

TEST(PlanPrecision, rl_forward_activations_default_to_row_scope) {
  RuleBuilder b;
  for (const Table t : {Table::kPretrainForward, Table::kSampler, Table::kTrainerForward}) {
    b.add(t, {"mlp.*"}, format(Format::kNvfp4));
  }
  const auto p =
      resolve_precision(b.spec, dense_model(), {StageShape{false, 10, 0}, StageShape{true, 10, 0}});
  EXPECT_EQ(p[0].forward.at(0).cell(0, Module::kMlpDown).act.scale_scope, ScaleScope::kTensor);
  EXPECT_EQ(p[1].forward.at(0).cell(0, Module::kMlpDown).act.scale_scope, ScaleScope::kRow);
  EXPECT_EQ(p[1].forward.at(0).cell(0, Module::kMlpDown).weight.scale_scope, ScaleScope::kTensor);
  EXPECT_EQ(p[1].sampler.at(0).cell(0, Module::kMlpDown).act.scale_scope, ScaleScope::kRow);
  EXPECT_EQ(equality_obstacle(p[1], dense_model()), "");
}

TEST(PlanPrecision, a_given_scale_scope_is_kept_in_rl) {
  RuleBuilder b;
  b.add(Table::kSampler, {"mlp.*"}, format(Format::kNvfp4)).scale_scope_given = true;
  const StagePrecision p = resolve_precision(b.spec, dense_model(), true, 10);
  EXPECT_EQ(p.sampler.at(0).cell(0, Module::kMlpDown).act.scale_scope, ScaleScope::kTensor);
}

TEST(PlanPrecision, the_obstacle_to_equal_bits_is_the_first_cell_that_differs) {
  RuleBuilder b;
  b.add(Table::kSampler, {"mlp.down"}, format(Format::kMxfp8)).layers = "2";
  const std::string why =
      equality_obstacle(resolve_precision(b.spec, dense_model(), true, 10), dense_model());
  EXPECT_EQ(why, "layers.2 mlp.down act differs: rl.sampler has mxfp8, rl.trainer.forward has bf16");
}

TEST(PlanPrecision, the_obstacle_names_the_operand_and_the_step) {
  RuleBuilder b;
  b.add(Table::kSampler, {"head"}, format(Format::kMxfp8)).operand = "weight";
  b.spec.tables[static_cast<size_t>(Table::kSampler)][0].steps = "50-100%";
  const std::string why =
      equality_obstacle(resolve_precision(b.spec, dense_model(), true, 10), dense_model());
  EXPECT_EQ(why, "head weight differs: rl.sampler has mxfp8, rl.trainer.forward has bf16 (from step 5)");
}

TEST(PlanPrecision, equal_cells_that_depend_on_their_batch_are_an_obstacle) {
  RuleBuilder b;
  for (const Table t : {Table::kSampler, Table::kTrainerForward}) {
    b.add(t, {"attn.qkv"}, format(Format::kNvfp4)).scale_scope_given = true;  // tensor
  }
  const std::string why =
      equality_obstacle(resolve_precision(b.spec, dense_model(), true, 10), dense_model());
  EXPECT_EQ(why, "layers.0 attn.qkv is not row-invariant: act has one scale for the whole micro-batch");
}

TEST(PlanPrecision, random_rounding_and_fresh_signs_are_not_row_invariant) {
  ForwardCell cell{format(Format::kNvfp4), format(Format::kNvfp4)};
  cell.act.scale_scope = ScaleScope::kRow;
  EXPECT_TRUE(row_invariant(cell));
  EXPECT_TRUE(row_invariant({format(Format::kMxfp8), format(Format::kMxfp8)}));
  EXPECT_TRUE(row_invariant({format(Format::kBf16), format(Format::kNvfp4)}));
  ForwardCell random = cell;
  random.act.rounding = Rounding::kStochastic;
  EXPECT_FALSE(row_invariant(random));
  random = cell;
  random.weight.rounding = Rounding::kStochastic;
  EXPECT_FALSE(row_invariant(random));
  ForwardCell rotated = cell;
  rotated.act.hadamard = rotated.weight.hadamard = 16;
  EXPECT_TRUE(row_invariant(rotated));
  rotated.act.signs = rotated.weight.signs = Signs::kFresh;
  EXPECT_FALSE(row_invariant(rotated));
}

TEST(PlanPrecision, illegal_cells_name_rule_cell_and_how_many_more) {
  RuleBuilder b;
  QuantSpec s = format(Format::kNvfp4);
  s.block = BlockShape::k16x16;
  s.hadamard = 16;
  b.add(Table::kPretrainForward, {"mlp.*"}, s);
  b.add(Table::kPretrainBackward, {"attn.out"}, format(Format::kNvfp4)).operand = "grad";
  b.add(Table::kPretrainBackward, {"attn.out"}, format(Format::kMxfp8));
  const std::string e = error_of(b.spec, dense_model());
  EXPECT_HAS(
      e,
      "recipe.yaml:10:7: precision.pretrain.forward[0]: pretrain.forward layers.0 mlp.gate_up fprop act "
      "(and 15 more cells): hadamard excludes 16x16");
  // dgrad and wgrad of four layers: the same reason from the same rule is one line.
  EXPECT_HAS(e, "pretrain.backward layers.0 attn.out dgrad (and 7 more cells): nvfp4 with mxfp8 in one GEMM");
}

TEST(PlanPrecision, forward_and_backward_must_see_the_same_weights) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"mlp.*"}, format(Format::kNvfp4)).steps = "50-100%";
  b.add(Table::kPretrainBackward, {"mlp.*"}, format(Format::kNvfp4)).gemm = "dgrad";
  const std::string e = error_of(b.spec, dense_model());
  EXPECT_HAS(e, "precision.pretrain.backward[0]: pretrain.backward layers.0 mlp.gate_up dgrad weight");
  EXPECT_HAS(e, "forward and backward would see different weights");
  b.spec.tables[0][0].spec.block = BlockShape::k16x16;
  b.spec.tables[1][0].spec.block = BlockShape::k16x16;
  EXPECT_EQ(error_of(b.spec, dense_model()), "");
}

TEST(PlanPrecision, the_trainer_rounds_keys_and_values_as_the_cache) {
  RuleBuilder b;
  b.add(Table::kSampler, {"kv_cache"}, format(Format::kMxfp8)).steps = "0-50%";
  const StagePrecision p = resolve_precision(b.spec, dense_model(), true, 10);
  EXPECT_EQ(p.forward.at(4).kv_cache, Format::kMxfp8);
  EXPECT_EQ(p.forward.at(5).kv_cache, Format::kBf16);
  EXPECT_EQ(equality_obstacle(p, dense_model()), "");
}

TEST(PlanPrecision, rules_that_never_win_are_all_reported_with_their_place) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"*"}, format(Format::kMxfp8));
  b.add(Table::kPretrainForward, {"head"}, format(Format::kBf16));
  b.add(Table::kPretrainBackward, {"experts.*"}, format(Format::kBf16));
  b.add(Table::kPretrainBackward, {"mlp.down"}, format(Format::kBf16)).gemm = "fprop";
  const std::string e = error_of(b.spec, dense_model());
  EXPECT_HAS(e, "recipe.yaml:11:7: precision.pretrain.forward[1]: this rule never wins");
  EXPECT_HAS(e, "recipe.yaml:10:7: precision.pretrain.backward[0]: this rule never wins");
  EXPECT_HAS(e, "the model has none of its modules");
  EXPECT_HAS(e, "a backward table has dgrad and wgrad alone");
}

TEST(PlanPrecision, rules_of_a_preset_may_lose) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"experts.*"}, format(Format::kMxfp8)).from_preset = true;
  EXPECT_EQ(error_of(b.spec, dense_model()), "");
}

TEST(PlanPrecision, a_rule_that_wins_in_one_of_two_stages_is_no_error) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"*"}, format(Format::kMxfp8)).steps = "500-600";
  EXPECT_HAS(error_of(b.spec, dense_model(), false, 100), "never wins");
  EXPECT_NO_THROW(
      resolve_precision(b.spec, dense_model(), {StageShape{false, 100, 0}, StageShape{false, 1000, 0}}));
}

TEST(PlanPrecision, tables_without_a_stage_are_checked_too) {
  RuleBuilder b;
  b.add(Table::kTrainerForward, {"experts.*"}, format(Format::kMxfp8));
  EXPECT_HAS(error_of(b.spec, dense_model(), false), "precision.rl.trainer.forward[0]");
  RuleBuilder good;
  good.add(Table::kTrainerForward, {"*"}, format(Format::kMxfp8)).steps = "0-90%";
  good.add(Table::kTrainerForward, {"*"}, format(Format::kBf16)).steps = "90-100%";
  good.add(Table::kSampler, {"*"}, format(Format::kMxfp8)).steps = "100000-200000";
  EXPECT_EQ(error_of(good.spec, dense_model(), false), "");
}

TEST(PlanPrecision, unreadable_matchers_name_what_is_allowed) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"atn.qkv"}, format(Format::kMxfp8));
  b.add(Table::kPretrainForward, {"*"}, format(Format::kMxfp8)).layers = "2-9";
  b.add(Table::kPretrainForward, {"*"}, format(Format::kMxfp8)).steps = "90-80%";
  b.add(Table::kPretrainForward, {"*"}, format(Format::kMxfp8)).layers = "most";
  const std::string e = error_of(b.spec, dense_model());
  EXPECT_HAS(
      e,
      "recipe.yaml:10:7: precision.pretrain.forward[0].module: found atn.qkv, which matches no module; "
      "did you mean attn.qkv?");
  EXPECT_HAS(e, "forward[1].layers: found 2-9, and the model has layers 0 to 3");
  EXPECT_HAS(e, "forward[2].steps: found 90-80% (it runs backwards); allowed: 100-500 or 0-90%");
  EXPECT_HAS(e, "forward[3].layers: found most (a number is missing");
}

TEST(PlanPrecision, fp32_in_every_cell_takes_the_rest_along) {
  RuleBuilder b;
  for (int t = 0; t < kNumTables; ++t) b.add(static_cast<Table>(t), {"*"}, format(Format::kFp32));
  const StagePrecision p = resolve_precision(b.spec, dense_model(), true, 10);
  EXPECT_EQ(p.forward.at(0).embed, Format::kFp32);
  EXPECT_EQ(p.forward.at(0).kv_cache, Format::kFp32);
  EXPECT_EQ(equality_obstacle(p, dense_model()), "");
}

TEST(PlanPrecision, fp32_in_some_cells_is_an_error) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"mlp.*"}, format(Format::kFp32));
  EXPECT_HAS(error_of(b.spec, dense_model()), "fp32 is legal only when every cell has it");
}

TEST(PlanPrecision, modules_without_gemm_take_their_formats_only) {
  RuleBuilder b;
  b.add(Table::kSampler, {"kv_cache"}, format(Format::kNvfp4));
  b.add(Table::kPretrainForward, {"embed"}, format(Format::kMxfp8));
  b.add(Table::kPretrainForward, {"kv_cache"}, format(Format::kMxfp8));
  const std::string e = error_of(b.spec, dense_model());
  EXPECT_HAS(e, "rl.sampler kv_cache: cannot be nvfp4; allowed: bf16, mxfp8");
  EXPECT_HAS(e, "pretrain.forward embed: cannot be mxfp8; allowed: bf16");
  EXPECT_HAS(e, "kv_cache to rl.sampler");
}

TEST(PlanPrecision, rows_go_to_experts_in_any_format) {
  for (const Format f : {Format::kBf16, Format::kMxfp8, Format::kNvfp4}) {
    RuleBuilder b;
    b.add(Table::kPretrainForward, {"dispatch"}, format(f));
    EXPECT_EQ(resolve_precision(b.spec, moe_model(), false, 10).forward.at(0).dispatch, f);
  }
}

TEST(PlanPrecision, the_hash_sees_cells_and_spans) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"*"}, format(Format::kMxfp8)).steps = "0-90%";
  const uint64_t h = hash_of(resolve_precision(b.spec, dense_model(), false, 100));
  EXPECT_EQ(h, hash_of(resolve_precision(b.spec, dense_model(), false, 100)));
  EXPECT_NE(h, hash_of(resolve_precision(b.spec, dense_model(), false, 200)));
  b.spec.tables[0][0].spec = nvfp4_16x16();
  EXPECT_NE(h, hash_of(resolve_precision(b.spec, dense_model(), false, 100)));
}

TEST(PlanPrecision, the_text_folds_runs_of_equal_cells) {
  RuleBuilder b;
  b.add(Table::kPretrainForward, {"mlp.*"}, nvfp4_16x16()).layers = "1-3";
  const std::string text =
      describe(resolve_precision(b.spec, dense_model(), false, 100), dense_model(), false);
  EXPECT_HAS(text, "pretrain.forward, steps 0 to 100");
  EXPECT_HAS(text, "mlp.gate_up, mlp.down");
  EXPECT_HAS(text, "layers 1-3");
  EXPECT_HAS(text, "nvfp4 16x16");
  EXPECT_HAS(text, "attn.qkv, attn.out, head");
  EXPECT_EQ(text.find("experts"), std::string::npos);
}

TEST(PlanPrecision, site_ids_are_as_the_contract_writes_them) {
  EXPECT_EQ(site_id(0, Module::kAttnQkv, GemmRole::kFprop, OperandRole::kAct), 0u);
  EXPECT_EQ(site_id(3, Module::kExpertsDown, GemmRole::kWgrad, OperandRole::kGrad),
            ((3u * 64 + 5) * 4 + 2) * 4 + 2);
}

TEST(PlanPrecision, a_glob_of_many_stars_is_matched_at_once) {
  std::string pattern;
  for (int i = 0; i < 60; ++i) pattern += "*?";
  std::string problem;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(match_modules({pattern}, &problem));
  EXPECT_TRUE(match_modules({"**e*p*t****.*d**"}, &problem));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_NE(problem.find("matches no module"), std::string::npos) << problem;
}

}  // namespace
}  // namespace fp4t
