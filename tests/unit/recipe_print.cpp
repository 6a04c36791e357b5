// print_recipe reads back as the same recipe; compare_recipes and recipe_schema see every key.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "engine/recipe/scalars.h"
#include "engine/recipe/tables.h"
#include "tests/unit/recipe_text.h"

namespace fp4t {
namespace {

using Set = std::vector<std::string>;

void expect_round_trip(const std::string& text, const Set& overrides = {}) {
  const Recipe recipe = parse_recipe(text, "r.yaml", overrides).recipe;
  const std::string printed = print_recipe(recipe);
  const Recipe again = parse_recipe(printed, "printed", {}).recipe;
  EXPECT_EQ(again, recipe) << printed;
  EXPECT_EQ(print_recipe(again), printed);
}

TEST(recipe_print, reads_back_as_the_same_recipe) {
  expect_round_trip(test::minimal());
  expect_round_trip(test::with_rl());
  expect_round_trip(test::with_rl(),
                    {"stages[0].pretrain.eval.task={kind: sums, held_out: {fraction: 0.1}}",
                     "stages[0].pretrain.eval.prompts=['12+3=', \"a\\n\\t\\\"b\\\\\", 'é', yes, '5', ' ']",
                     "stages[1].rl.task.held_out.fraction=0.1", "run.name='true'", "model.init={std: 0.03}",
                     "run.dir='#1: x'"});
}

TEST(recipe_print, every_kind_of_source_reads_back) {
  for (const char* source : {"{kind: random}", "{kind: sums}", "{kind: countdown}", "{kind: text, paths: a}",
                             "{kind: jsonl, paths: a, field: b}"}) {
    expect_round_trip(test::with_rl(), {std::string("stages[0].pretrain.data=[") + source + "]"});
    expect_round_trip(test::with_rl(),
                      {std::string("stages[0].pretrain.data=[") + source + ", {kind: random, name: b}]"});
  }
}

TEST(recipe_print, presets_are_spelled_out_and_read_back) {
  for (const char* name : {"fp32", "bf16", "mxfp8", "nvidia_nvfp4", "quartet2", "rl_nvfp4"}) {
    const std::string text = test::with_rl() + "precision: {preset: " + name + "}\n";
    expect_round_trip(text);
    EXPECT_EQ(print_recipe(parse_recipe(text, "r", {}).recipe).find(" preset:"), std::string::npos);
  }
  expect_round_trip(test::with_rl() +
                    "precision: {preset: quartet2, override: {rl.sampler: [{module: attn.out, "
                    "operand: act, format: nvfp4, scale_scope: tensor}]}}\n");
}

TEST(recipe_print, every_double_survives) {
  const unsigned seed = 20240611;
  std::mt19937_64 random(seed);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t bits = random();
    double v = 0;
    static_assert(sizeof(v) == sizeof(bits));
    std::memcpy(&v, &bits, sizeof(v));
    if (!std::isfinite(v)) continue;
    double back = 0;
    EXPECT_EQ(read_double(write_double(v), back), "") << "seed " << seed << ", " << write_double(v);
    EXPECT_EQ(std::memcmp(&back, &v, sizeof(v)), 0) << "seed " << seed << ", " << write_double(v);
  }
}

TEST(recipe_print, files_in_configs_are_the_presets) {
  for (const char* name : {"fp32", "bf16", "mxfp8", "nvidia_nvfp4", "quartet2", "rl_nvfp4"}) {
    const std::string path =
        std::string(std::getenv("FP4T_TEST_SOURCE")) + "/configs/precision/" + name + ".yaml";
    std::ifstream in(path);
    ASSERT_TRUE(in) << path;
    std::ostringstream file;
    file << in.rdbuf();
    Recipe from_file = parse_recipe(test::with_rl() + file.str(), path, {}).recipe;
    Recipe built_in = parse_recipe(test::with_rl() + "precision: {preset: " + name + "}\n", "r", {}).recipe;
    for (auto& table : built_in.precision.tables) {
      for (RuleSpec& rule : table) rule.from_preset = false;
    }
    built_in.precision.preset.clear();
    EXPECT_EQ(from_file, built_in) << name;
  }
}

TEST(recipe_print, recipes_in_configs_are_accepted_and_read_back) {
  const std::filesystem::path configs = std::filesystem::path(std::getenv("FP4T_TEST_SOURCE")) / "configs";
  int recipes = 0;
  for (const auto& folder : {configs, configs / "bench"}) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() != ".yaml") continue;
      ++recipes;
      const Recipe recipe = load_recipe(entry.path().string(), {}).recipe;
      EXPECT_EQ(parse_recipe(print_recipe(recipe), "printed", {}).recipe, recipe) << entry.path();
    }
  }
  EXPECT_GE(recipes, 7);
}

// The yaml blocks of the text on how to edit a table are recipes' parts that hold.
TEST(recipe_print, examples_of_the_table_guide_are_accepted) {
  const std::string path = std::string(std::getenv("FP4T_TEST_SOURCE")) + "/configs/precision/README.md";
  std::ifstream in(path);
  ASSERT_TRUE(in) << path;
  std::string line, block;
  bool inside = false;
  int blocks = 0;
  while (std::getline(in, line)) {
    if (line == "```yaml") {
      inside = true;
      block.clear();
    } else if (line == "```" && inside) {
      inside = false;
      ++blocks;
      EXPECT_EQ(test::errors_of(test::with_rl() + block), "") << block;
    } else if (inside) {
      block += line + "\n";
    }
  }
  EXPECT_EQ(blocks, 2);
}

TEST(recipe_compare, equal_recipes_do_not_differ) {
  EXPECT_TRUE(
      compare_recipes(test::with_rl(), print_recipe(parse_recipe(test::with_rl(), "r", {}).recipe)).empty());
  // Spelling a preset out is no change.
  const std::string preset = test::with_rl() + "precision: {preset: quartet2}\n";
  EXPECT_TRUE(compare_recipes(preset, print_recipe(parse_recipe(preset, "r", {}).recipe)).empty());
}

TEST(recipe_compare, changes_carry_path_values_and_class) {
  const auto change = [](const Set& overrides) {
    const std::string before = print_recipe(parse_recipe(test::with_rl(), "r", {}).recipe);
    const std::string after = print_recipe(parse_recipe(test::with_rl(), "r", overrides).recipe);
    const std::vector<RecipeChange> changes = compare_recipes(before, after);
    EXPECT_EQ(changes.size(), 1u) << overrides[0];
    return changes.empty() ? RecipeChange{} : changes[0];
  };
  const RecipeChange steps = change({"stages[0].pretrain.steps=700"});
  EXPECT_EQ(steps.path, "stages[0].pretrain.steps");
  EXPECT_EQ(steps.before, "600");
  EXPECT_EQ(steps.after, "700");
  EXPECT_EQ(steps.resume_class, ResumeClass::kCourse);
  EXPECT_EQ(change({"model.layers=5"}).resume_class, ResumeClass::kIdentity);
  EXPECT_EQ(change({"run.seed=5"}).resume_class, ResumeClass::kIdentity);
  EXPECT_EQ(change({"dtypes.moments=bf16"}).resume_class, ResumeClass::kIdentity);  // stored so
  EXPECT_EQ(change({"dtypes.gradients=fp32"}).resume_class, ResumeClass::kCourse);
  EXPECT_EQ(change({"model.moe.balance.bias_rate=0.5"}).resume_class, ResumeClass::kCourse);
  EXPECT_EQ(change({"stages[0].pretrain.batch.micro_sequences=8"}).resume_class, ResumeClass::kLayout);
  EXPECT_EQ(change({"run.threads=1"}).resume_class, ResumeClass::kLayout);
  EXPECT_EQ(change({"parallel.recompute=block"}).resume_class, ResumeClass::kLayout);
  EXPECT_EQ(change({"stages[1].rl.objective.micro_tokens=99"}).resume_class, ResumeClass::kLayout);
  EXPECT_EQ(change({"stages[1].rl.objective.entropy=0.5"}).resume_class, ResumeClass::kCourse);
  EXPECT_EQ(change({"stages[1].rl.checkpoint.every=9"}).resume_class, ResumeClass::kOutput);
  EXPECT_EQ(change({"run.dir=elsewhere"}).resume_class, ResumeClass::kOutput);
  const RecipeChange rule = change({"precision={rl.sampler: [{format: mxfp8}]}"});
  EXPECT_EQ(rule.path, "precision.rl.sampler[0]");
  EXPECT_EQ(rule.before, "");
  EXPECT_EQ(rule.after, "{format: mxfp8}");
  EXPECT_EQ(rule.resume_class, ResumeClass::kCourse);
}

TEST(recipe_schema, is_json_with_help_for_every_key) {
  const nlohmann::json schema = nlohmann::json::parse(recipe_schema());
  EXPECT_EQ(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
  EXPECT_EQ(schema["required"], (nlohmann::json{"model", "stages"}));
  const auto& top_k = schema["properties"]["model"]["properties"]["moe"]["properties"]["top_k"];
  EXPECT_EQ(top_k["type"], "integer");
  EXPECT_EQ(top_k["minimum"], 1);
  const auto& stages = schema["properties"]["stages"]["items"]["oneOf"];
  ASSERT_EQ(stages.size(), 2u);
  const auto& rl = stages[1]["properties"]["rl"]["properties"];
  EXPECT_EQ(rl["sampling"]["properties"]["samples"]["default"], 16);
  const auto& precision = schema["properties"]["precision"]["properties"];
  for (const char* table : kTableNames) {
    const auto& rule = precision[table]["items"]["properties"];
    EXPECT_EQ(rule["hadamard"]["enum"], (nlohmann::json{"none", 16, 32, 64, 128})) << table;
    EXPECT_EQ(precision["override"]["properties"][table], precision[table]);
  }
  // Every property says what it is.
  const std::function<void(const nlohmann::json&)> walk = [&](const nlohmann::json& node) {
    if (node.is_object() && node.contains("properties")) {
      EXPECT_EQ(node["additionalProperties"], false);
      for (const auto& [key, value] : node["properties"].items()) {
        if (key != "pretrain" && key != "rl") {
          EXPECT_FALSE(value.value("description", "").empty()) << key;
        }
      }
    }
    for (const auto& child : node) {
      if (child.is_structured()) walk(child);
    }
  };
  walk(schema);
}

}  // namespace
}  // namespace fp4t
