// The shape of a recipe and its way into the structs.
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/process.h"
#include "tests/unit/recipe_text.h"

namespace fp4t {
namespace {

using test::errors_of;
using Set = std::vector<std::string>;

const char* const kFull = R"(
run: {name: quickstart, dir: runs/quickstart, seed: 1, device: auto, deterministic: true}
model:
  layers: 4
  hidden: 128
  heads: 4
  kv_heads: 2
  head_dim: 32
  moe: {experts: 8, top_k: 2, hidden: 128, shared_experts: 0, dense_layers: 0, router: softmax, balance: {bias_rate: 0.001, aux_loss: 0, z_loss: 0.001}}
tokenizer: {kind: bytes}
parallel: {expert: 1, zero: 1}
precision:
  pretrain.forward:
    - {module: [embed, head], format: bf16}
    - {layers: last 1, format: bf16}
    - {module: "experts.*", format: nvfp4, scale_rule: four_over_six}
    - {module: "*", format: mxfp8}
  pretrain.backward:
    - {gemm: dgrad, operand: grad, steps: 0-90%, format: nvfp4, rounding: stochastic, headroom: 17/16}
    - {format: bf16, source: forward}
  rl.sampler:
    - {module: "experts.*", operand: act, format: nvfp4, scale_scope: row, scale_round: pow2}
    - {module: kv_cache, format: mxfp8}
stages:
  - pretrain: {steps: 600, batch: {tokens: 8192, micro_sequences: 16, length: 128}, data: [{name: fortunes, paths: [a, b], separator: "%"}, {kind: sums, wrong_fraction: 0.5, held_out: {fraction: 0.05}}], optimizer: {learning_rate: 2e-3}, schedule: {kind: wsd, warmup: 100}, eval: {every: 100}, checkpoint: {every: 50}}
  - rl: {steps: 60, task: {kind: sums, held_out: {fraction: 0.05}}, sampling: {prompts: 32}, objective: {normalise_std: false}, optimizer: {state: keep}, checkpoint: {every: 10, every_updates: 4}}
)";

TEST(recipe_load, the_documented_shape_is_read) {
  const Recipe r = parse_recipe(kFull, "full.yaml", {}).recipe;
  EXPECT_EQ(r.run.name, "quickstart");
  EXPECT_EQ(r.model.moe.balance.bias_rate, 0.001);
  ASSERT_EQ(r.precision.tables[0].size(), 4u);
  EXPECT_EQ(r.precision.tables[0][0].modules, (Set{"embed", "head"}));
  EXPECT_EQ(r.precision.tables[0][2].spec.format, Format::kNvfp4);
  EXPECT_EQ(r.precision.tables[0][2].spec.scale_rule, ScaleRule::kFourOverSix);
  EXPECT_FALSE(r.precision.tables[0][2].scale_scope_given);
  EXPECT_EQ(r.precision.tables[1][0].spec.headroom, Headroom::k17over16);
  EXPECT_EQ(r.precision.tables[1][0].steps, "0-90%");
  EXPECT_EQ(r.precision.tables[1][1].spec.source, Source::kForward);
  EXPECT_TRUE(r.precision.tables[2][0].scale_scope_given);
  EXPECT_EQ(r.precision.tables[2][1].path, "precision.rl.sampler[1]");
  EXPECT_EQ(r.precision.tables[2][1].place.line, 23);
  EXPECT_EQ(r.precision.tables[2][1].place.column, 7);
  ASSERT_EQ(r.stages.size(), 2u);
  const auto& pretrain = std::get<PretrainSpec>(r.stages[0]);
  EXPECT_EQ(pretrain.data[0].name, "fortunes");
  EXPECT_EQ(pretrain.data[1].name, "sums");
  EXPECT_EQ(pretrain.data[1].wrong_fraction, 0.5);
  EXPECT_EQ(pretrain.optimizer.learning_rate, 2e-3);
  const auto& rl = std::get<RlSpec>(r.stages[1]);
  EXPECT_FALSE(rl.objective.normalise_std);
  EXPECT_EQ(rl.checkpoint.every_updates, 4);
}

TEST(recipe_load, silence_means_the_defaults) {
  const Recipe r = parse_recipe(test::with_rl(), "r.yaml", {}).recipe;
  EXPECT_EQ(r.run.dir, "runs/run");
  EXPECT_EQ(std::get<RlSpec>(r.stages[1]).sampling, SamplingSpec());
  EXPECT_EQ(r.dtypes, DtypesSpec());
}

TEST(recipe_load, presets_expand_into_rules) {
  for (const char* name : {"fp32", "bf16", "mxfp8", "nvidia_nvfp4", "quartet2", "rl_nvfp4"}) {
    const Recipe r =
        parse_recipe(test::with_rl() + "precision: {preset: " + name + "}\n", "r.yaml", {}).recipe;
    for (const auto& table : r.precision.tables) {
      ASSERT_FALSE(table.empty()) << name;
      for (const RuleSpec& rule : table) EXPECT_TRUE(rule.from_preset) << name;
    }
    EXPECT_EQ(r.precision.preset, name);
  }
}

TEST(recipe_load, overrides_stand_before_the_presets_rules) {
  const Recipe r = parse_recipe(test::minimal() +
                                    "precision: {preset: mxfp8, override: {pretrain.forward: [{layers: "
                                    "last 15%, format: bf16}]}}\n",
                                "r.yaml", {})
                       .recipe;
  const auto& rules = r.precision.tables[0];
  ASSERT_EQ(rules.size(), 3u);
  EXPECT_EQ(rules[0].layers, "last 15%");
  EXPECT_FALSE(rules[0].from_preset);
  EXPECT_EQ(rules[0].path, "precision.override.pretrain.forward[0]");
  EXPECT_TRUE(rules[1].from_preset);
}

TEST(recipe_load, fp32_tables_make_the_gradients_fp32) {
  const Recipe r = parse_recipe(test::minimal() + "precision: {preset: fp32}\n", "r.yaml", {}).recipe;
  EXPECT_EQ(r.dtypes.gradients, DType::kF32);
}

TEST(recipe_load, set_reaches_keys_lists_and_tables) {
  const Recipe r = parse_recipe(kFull, "full.yaml",
                                {"run.seed=7", "stages.0.pretrain.steps=10",
                                 "stages[1].rl.sampling.max_tokens=9", "precision.rl.sampler[1].format=bf16",
                                 "model.rope={theta: 5e5}", "stages[0].pretrain.data[0].paths=[x, y, z]",
                                 "model.qk_norm=true", "precision.rl.trainer.forward=[{format: mxfp8}]"})
                       .recipe;
  EXPECT_EQ(r.run.seed, 7u);
  EXPECT_EQ(std::get<PretrainSpec>(r.stages[0]).steps, 10);
  EXPECT_EQ(std::get<RlSpec>(r.stages[1]).sampling.max_tokens, 9);
  EXPECT_EQ(r.precision.tables[2][1].spec.format, Format::kBf16);
  EXPECT_EQ(r.model.rope.theta, 5e5);
  EXPECT_EQ(std::get<PretrainSpec>(r.stages[0]).data[0].paths, (Set{"x", "y", "z"}));
  EXPECT_TRUE(r.model.qk_norm);
  EXPECT_EQ(r.precision.tables[3][0].spec.format, Format::kMxfp8);
}

TEST(recipe_load, a_file_that_is_not_there_is_missing_input) {
  EXPECT_THROW(load_recipe("no/such/recipe.yaml", {}), MissingInputError);
}

TEST(recipe_load, a_shared_anchor_serves_two_tables) {
  const Recipe r = parse_recipe(test::minimal() +
                                    "precision:\n  pretrain.forward: &f [{format: mxfp8}]\n"
                                    "  rl.sampler: *f\n",
                                "r.yaml", {"precision.rl.sampler[0].format=bf16"})
                       .recipe;
  EXPECT_EQ(r.precision.tables[0][0].spec.format, Format::kMxfp8);
  EXPECT_EQ(r.precision.tables[2][0].spec.format, Format::kBf16)
      << "an override must not reach the other user";
}

TEST(recipe_load, what_is_no_file_is_not_opened) {
  const test::ScratchFolder folder;
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  // Were it opened it would wait for a writer: the alarm ends the test then.
  ::alarm(20);
  EXPECT_THROW(load_recipe(pipe, {}), MissingInputError);
  EXPECT_THROW(load_recipe("/dev/null", {}), MissingInputError);
  EXPECT_THROW(load_recipe(folder.path(), {}), MissingInputError);
  ::alarm(0);
}

}  // namespace
}  // namespace fp4t
