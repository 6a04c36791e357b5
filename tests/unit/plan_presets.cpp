// Every preset and every shipped recipe makes a plan, on dense and mixture models, also from the recipe that
// the plan itself writes down; and the verdict on equal bits is the one that the contract gives.
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "engine/plan/plan.h"
#include "engine/recipe/load.h"
#include "engine/recipe/presets.h"

namespace fp4t {
namespace {

Machine cpu_machine() {
  Machine m;
  m.device_name = "cpu";
  return m;
}

std::string recipe_text(const std::string& preset, bool moe) {
  return std::string("model:\n  layers: 3\n  hidden: 128\n  heads: 4\n  kv_heads: 2\n  head_dim: 32\n") +
         (moe ? "  moe: {experts: 8, top_k: 2, hidden: 128}\n" : "  mlp_hidden: 256\n") +
         "precision: {preset: " + preset +
         "}\n"
         "stages:\n"
         "  - pretrain:\n"
         "      steps: 600\n"
         "      batch: {tokens: 8192, micro_sequences: 16, length: 128}\n"
         "      data: [{kind: text, paths: corpus}]\n"
         "  - rl:\n"
         "      steps: 60\n"
         "      task: {kind: sums}\n";
}

Plan plan_of(const std::string& text) {
  return make_plan(parse_recipe(text, "r.yaml", {}).recipe, cpu_machine(), {});
}

TEST(PlanPresets, every_preset_makes_a_plan_and_its_printed_recipe_the_same_one) {
  for (const std::string& preset : preset_names()) {
    for (const bool moe : {false, true}) {
      SCOPED_TRACE(preset + (moe ? ", mixture" : ", dense"));
      const Plan plan = plan_of(recipe_text(preset, moe));
      const Plan again = plan_of(plan.recipe_yaml);
      EXPECT_EQ(again.precision_hash, plan.precision_hash);
      EXPECT_EQ(again.recipe_yaml, plan.recipe_yaml);
    }
  }
}

TEST(PlanPresets, all_presets_promise_equal_bits_of_sampler_and_trainer) {
  for (const std::string& preset : preset_names()) {
    const Plan plan = plan_of(recipe_text(preset, true));
    EXPECT_EQ(plan.stages[1].equality_obstacle, "") << preset;
  }
}

TEST(PlanPresets, presets_differ_in_their_cells) {
  std::set<std::string> hashes;
  for (const std::string& preset : preset_names()) {
    hashes.insert(plan_of(recipe_text(preset, true)).precision_hash);
  }
  EXPECT_EQ(hashes.size(), preset_names().size());
}

TEST(PlanPresets, the_quickstart_is_a_plan_with_equal_bits) {
  const std::string path = std::string(std::getenv("FP4T_TEST_SOURCE")) + "/configs/quickstart.yaml";
  const Plan plan = make_plan(load_recipe(path, {}).recipe, cpu_machine(), {});
  ASSERT_EQ(plan.stages.size(), 2u);
  EXPECT_EQ(plan.stages[1].equality_obstacle, "");
  EXPECT_EQ(plan.stages[0].precision.forward.at(0).cell(0, Module::kExpertsDown).act.format, Format::kNvfp4);
}

TEST(PlanPlaces, problems_of_the_plan_name_the_place_of_their_key) {
  const std::string text = R"(model:
  layers: 2
  hidden: 64
  heads: 2
  kv_heads: 2
  head_dim: 32
  mlp_hidden: 64
  max_positions: 128
precision:
  pretrain.forward:
    - {module: "*", format: bf16}
stages:
  - pretrain:
      steps: 6
      batch: {tokens: 512, micro_sequences: 4, length: 128}
      data: [{kind: text, paths: corpus}]
      eval:
        every: 1
        prompts: [short, "LONG"]
)";
  std::string written = text;
  written.replace(written.find("LONG"), 4, std::string(200, 'x'));
  const LoadedRecipe loaded =
      parse_recipe(written, "r.yaml", {"run.device=cuda", "precision.pretrain.forward.0.module=experts.*"});
  try {
    make_plan(loaded.recipe, cpu_machine(), {}, loaded.places);
    FAIL() << "not refused";
  } catch (const RecipeError& e) {
    const std::string errors = e.what();
    for (const char* line : {"r.yaml:19:18: stages[0].pretrain.eval.prompts[1]: prompts of up to 200 tokens",
                             "--set: run.device: ", "precision.pretrain.forward[0]: this rule never wins"}) {
      EXPECT_NE(errors.find(line), std::string::npos) << line << "\nin\n" << errors;
    }
  }
}

}  // namespace
}  // namespace fp4t
