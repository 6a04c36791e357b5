// make_plan: sizes, gradient types, machine checks, and what the plan prints.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "engine/comm/device.h"
#include "engine/plan/cache_layout.h"
#include "engine/plan/plan.h"
#include "engine/plan/sizes.h"
#include "engine/recipe/load.h"

namespace fp4t {
namespace {

PretrainSpec pretrain_stage() {
  PretrainSpec s;
  s.steps = 600;
  s.batch = {8192, 16, 128};
  s.eval.prompts = {"The "};
  return s;
}

RlSpec rl_stage() {
  RlSpec s;
  s.steps = 60;
  s.sampling.prompts = 32;
  s.sampling.samples = 16;
  s.sampling.max_tokens = 8;
  s.objective.mini_batches = 8;
  s.objective.micro_tokens = 4096;
  return s;
}

Recipe small_recipe() {
  Recipe r;
  r.run.name = "small";
  r.run.dir = "runs/small";
  r.model.layers = 4;
  r.model.hidden = 128;
  r.model.heads = 4;
  r.model.kv_heads = 2;
  r.model.head_dim = 32;
  r.model.max_positions = 512;
  r.model.moe.experts = 8;
  r.model.moe.top_k = 2;
  r.model.moe.hidden = 128;
  r.stages = {pretrain_stage(), rl_stage()};
  return r;
}

Machine cpu_machine() {
  Machine m;
  m.device_name = "cpu";
  m.num_threads = 2;
  m.memory_bytes = int64_t{8} << 30;
  return m;
}

Plan plan_of(const Recipe& r) { return make_plan(r, cpu_machine(), {}); }

std::string error_of(const Recipe& r, const Machine& m = cpu_machine()) {
  try {
    make_plan(r, m, {});
  } catch (const RecipeError& e) {
    return e.what();
  }
  return "";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

TEST(PlanMake, sizes_follow_the_stages) {
  const Plan p = plan_of(small_recipe());
  EXPECT_EQ(p.model.vocabulary, 257);
  EXPECT_EQ(p.stages[0].accumulation, 4);
  EXPECT_EQ(p.stages[1].updates_per_step, 8);
  EXPECT_EQ(p.max_tokens, 4096);          // RL: 512 completions of 6 + 8 tokens are more
  EXPECT_EQ(p.max_cache_slots, 512);      // 32 x 16
  EXPECT_EQ(p.max_cache_length, 4 + 16);  // the sample "The " and eval.max_tokens, more than "99+99=" and 8
  EXPECT_EQ(p.max_decode_tokens, 512 * 6);
}

TEST(PlanMake, rl_forwards_are_no_larger_than_a_rollout) {
  Recipe r = small_recipe();
  RlSpec rl = rl_stage();
  rl.sampling.prompts = 2;
  rl.sampling.samples = 4;
  r.stages = {rl};
  EXPECT_EQ(plan_of(r).max_tokens, 2 * 4 * (6 + 8));
}

TEST(PlanMake, samples_of_one_prompt_share_its_pages) {
  Recipe r = small_recipe();
  RlSpec rl = rl_stage();
  rl.task = {};
  rl.task.kind = "jsonl";
  rl.task.paths = {"rows"};
  rl.task.max_prompt_tokens = 480;
  rl.eval = {};
  rl.sampling.prompts = 8;
  rl.sampling.samples = 16;
  rl.sampling.max_tokens = 32;
  rl.objective.mini_batches = 1;
  r.model.max_positions = 512;
  r.stages = {rl};
  const Plan p = plan_of(r);
  EXPECT_EQ(p.max_cache_slots, 128);
  EXPECT_EQ(pages_per_slot(p), 16);
  // Each of 128 has at most 2 of its own; 8 prompts and one in part are in flight, with 15 each.
  EXPECT_EQ(cache_pages(p), 128 * 2 + 9 * 15);
  std::get<RlSpec>(r.stages[0]).sampling.samples = 1;
  const Plan one = plan_of(r);
  EXPECT_EQ(cache_pages(one), 8 * 16);
}

TEST(PlanMake, the_cache_ends_at_the_last_position) {
  Recipe r = small_recipe();
  r.model.max_positions = 128;
  std::get<PretrainSpec>(r.stages[0]).eval.max_tokens = 500;
  EXPECT_EQ(plan_of(r).max_cache_length, 128);
}

TEST(PlanMake, flops_match_a_hand_count) {
  const Plan p = plan_of(small_recipe());
  const double layer = 128 * (4 + 2 + 2) * 32 + 4 * 32 * 128 + 8 * 128 + 2 * 3 * 128 * 128;
  EXPECT_DOUBLE_EQ(p.flops_per_token, 6 * (4 * layer + 257 * 128) + 4 * 6.0 * 128 * 4 * 32);
}

TEST(PlanMake, gradients_are_fp32_where_micro_batches_add_up) {
  Recipe r = small_recipe();
  const auto gradient_of = [](const Plan& p, const std::string& name) {
    for (const ParamInfo& i : p.parameters) {
      if (i.name == name) return i.gradient;
    }
    throw InternalError(name);
  };
  const std::string down = "layers.0.experts.down.weight";
  EXPECT_EQ(gradient_of(plan_of(r), down), DType::kF32);
  std::get<PretrainSpec>(r.stages[0]).batch.tokens = 2048;  // one micro-batch; RL: 64 x 14 tokens, one too
  EXPECT_EQ(gradient_of(plan_of(r), down), DType::kBf16);
  EXPECT_EQ(gradient_of(plan_of(r), "head.weight"), DType::kF32);
  std::get<RlSpec>(r.stages[1]).objective.micro_tokens = 100;
  EXPECT_EQ(gradient_of(plan_of(r), down), DType::kF32);
}

TEST(PlanMake, ranks_share_samples_masters_and_moments) {
  const auto block = [](const Plan& p, const std::string& name) {
    for (const MemoryLine& line : p.memory.run) {
      if (line.name == name) return line.bytes;
    }
    return int64_t{0};
  };
  Recipe r = small_recipe();
  const Plan one = plan_of(r), four = make_plan(r, cpu_machine(), {}, {}, 4);
  EXPECT_EQ(four.axes, (Axes{.data = 4, .expert = 1}));
  EXPECT_EQ(four.stages[0].accumulation, 1);
  EXPECT_EQ(four.max_tokens, 2048);      // of either stage: 16 x 128, and 128 completions of 14
  EXPECT_EQ(four.max_cache_slots, 128);  // 8 prompts
  // Blocks are rounded up, and pieces end between chunks of 65536 elements.
  const int64_t slack = kNormChunk * 4 + int64_t{256} * static_cast<int64_t>(four.parameters.size());
  EXPECT_LE(block(four, "optimizer moments"), block(one, "optimizer moments") / 4 + 2 * slack);
  EXPECT_LT(block(four, "masters"), block(one, "masters") / 2);
  EXPECT_EQ(block(one, "rank exchange"), 0);
  EXPECT_GT(block(four, "rank exchange"), 0);
  EXPECT_EQ(four.memory.checkpoint_bytes, one.memory.checkpoint_bytes);
  EXPECT_EQ(four.precision_hash, one.precision_hash);
  for (const ParamInfo& p : four.parameters) EXPECT_EQ(p.gradient, DType::kF32) << p.name;

  // Muon needs whole matrices: no parameter is cut.
  std::get<PretrainSpec>(r.stages[0]).optimizer.kind = "muon";
  const Plan muon = make_plan(r, cpu_machine(), {}, {}, 4);
  for (const ParamInfo& p : muon.parameters) {
    for (int64_t rank = 0; rank < 4; ++rank) {
      const int64_t n = muon.shards.owned(p, rank).count();
      EXPECT_TRUE(n == 0 || n == p.shape.elements()) << p.name;
    }
  }
}

TEST(PlanMake, ranks_that_cannot_be_are_refused) {
  const auto refusal = [](const Recipe& r, const Machine& m, int64_t ranks) {
    try {
      make_plan(r, m, {}, {}, ranks);
    } catch (const RecipeError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  Recipe r = small_recipe();
  r.parallel.data = 3;
  EXPECT_HAS(refusal(r, cpu_machine(), 4),
             "parallel.data: 3 x parallel.expert 1 needs 3 ranks, and this run has 4");
  r.parallel = {.expert = 4};
  EXPECT_HAS(refusal(r, cpu_machine(), 6), "parallel.expert: 4 needs 4 ranks, or a multiple");
  r.parallel = {.expert = 2, .domain = 3};
  EXPECT_HAS(refusal(r, cpu_machine(), 6),
             "parallel.domain: 3 ranks, and 2 share experts (parallel.expert): some groups would lie in two "
             "domains");
  EXPECT_HAS(refusal(r, cpu_machine(), 8),
             "parallel.domain: 3 ranks, and this run has 8; allowed: a divisor of the number of ranks, or 0");
  EXPECT_EQ(refusal(r, cpu_machine(), 2), "");  // all in one
  r = small_recipe();
  EXPECT_HAS(refusal(r, cpu_machine(), 65), "64 sequences a step leave some of the 65 ranks without any");
  EXPECT_EQ(refusal(r, cpu_machine(), 64), "");
  r.parallel.transport = "nccl";
  EXPECT_HAS(refusal(r, cpu_machine(), 2),
             "parallel.transport: nccl, and this run computes on the CPU; allowed: auto, host");
}

TEST(PlanMake, tensors_travel_as_the_device_and_the_recipe_say) {
  Recipe r = small_recipe();
  EXPECT_EQ(plan_of(r).transport, "");
  EXPECT_EQ(make_plan(r, cpu_machine(), {}, {}, 2).transport, "host");
  EXPECT_HAS(describe(make_plan(r, cpu_machine(), {}, {}, 2)), "tensors travel through host memory by MPI");
  if (!probe_machine("cpu", 1).built_with_cuda) return;  // the other flavour knows no GPU to plan for
  Machine gpu = cpu_machine();
  gpu.backend = Backend::kCuda;
  gpu.arch = 90;
  for (const std::string transport : {"auto", "nccl", "host"}) {
    r.parallel.transport = transport;
    if (transport == "host") {
      EXPECT_EQ(make_plan(r, gpu, {}, {}, 2).transport, "host");
    } else if (built_with_nccl()) {
      EXPECT_EQ(make_plan(r, gpu, {}, {}, 2).transport, "nccl");
    } else {
      EXPECT_THROW(make_plan(r, gpu, {}, {}, 2), RecipeError);
    }
  }
}

TEST(PlanMake, what_does_not_fit_is_reported_all_at_once) {
  Recipe r = small_recipe();
  r.model.vocabulary = 100;
  r.model.max_positions = 100;
  r.run.device = "cuda";
  r.parallel.expert = 2;
  std::get<RlSpec>(r.stages[1]).objective.micro_tokens = 5;
  std::get<PretrainSpec>(r.stages[0]).eval.prompts = {std::string(100, 'x')};
  RuleSpec rule;
  rule.modules = {"mlp.*"};
  rule.path = "precision.pretrain.forward[0]";
  r.precision.tables[0] = {rule};
  const std::string e = error_of(r);
  EXPECT_HAS(e, "model.vocabulary: 100 is less than the 257");
  EXPECT_HAS(e, "run.device: cuda, and this program was built without CUDA");
  EXPECT_HAS(e, "parallel.expert: 2 needs 2 ranks");
  EXPECT_HAS(e, "stages[1].rl.objective.micro_tokens: 5 does not hold one sequence");
  EXPECT_HAS(e, "stages[0].pretrain.batch.length: 128 is more than model.max_positions 100");
  EXPECT_HAS(e, "stages[0].pretrain.eval.prompts[0]: prompts of up to 100 tokens");
  EXPECT_HAS(e, "precision.pretrain.forward[0]: this rule never wins");
}

// What the plan finds stands where the recipe says it, in the order of the file, whichever check found it.
TEST(PlanMake, problems_stand_in_the_order_of_the_recipe_with_their_places) {
  const std::string text = R"(run: {device: cuda}
model: {layers: 2, hidden: 64, heads: 2, kv_heads: 1, head_dim: 32, mlp_hidden: 64}
parallel: {expert: 1, data: 3}
precision:
  preset: quartet2
  override:
    pretrain.forward:
      - {module: mlp.down, operand: act, format: mxfp8}
      - {module: mlp.down, operand: act, format: bf16}
      - {layers: 0-2, format: bf16}
stages:
  - pretrain:
      steps: 4
      batch: {tokens: 64, length: 32}
      data: [{kind: sums}]
)";
  const LoadedRecipe loaded = parse_recipe(text, "r.yaml", {});
  std::string errors;
  try {
    make_plan(loaded.recipe, cpu_machine(), {}, loaded.places, 2);
  } catch (const RecipeError& e) {
    errors = e.what();
  }
  size_t at = 0;
  for (const char* part :
       {"r.yaml:1:15: run.device: cuda", "\nr.yaml:3:29: parallel.data: 3 x",
        "\nr.yaml:8:9: precision.override.pretrain.forward[0]: pretrain.forward layers.0 mlp.down fprop",
        "mxfp8 with nvfp4 in one GEMM",
        "\nr.yaml:9:9: precision.override.pretrain.forward[1]: this rule never wins",
        "\nr.yaml:10:18: precision.override.pretrain.forward[2].layers: found 0-2, and the model has layers "
        "0 to 1"}) {
    const size_t found = errors.find(part, at);
    ASSERT_NE(found, std::string::npos) << part << "\n in " << errors;
    at = found;
  }
  // Without a rule of its own, a cell stands where its preset is named.
  Recipe cut = loaded.recipe;
  auto& rules = cut.precision.tables[0];
  rules.erase(rules.begin(), rules.begin() + 3);
  cut.precision.tables[1].insert(cut.precision.tables[1].begin(), RuleSpec{});
  RuleSpec& bad = cut.precision.tables[1].front();
  bad.path = "preset quartet2, pretrain.backward[0]";
  bad.modules = {"mlp.down"};
  bad.operand = "grad";
  bad.spec.format = Format::kMxfp8;
  bad.from_preset = true;
  try {
    make_plan(cut, cpu_machine(), {}, loaded.places);
    FAIL();
  } catch (const RecipeError& e) {
    EXPECT_HAS(std::string(e.what()),
               "r.yaml:5:11: preset quartet2, pretrain.backward[0]: pretrain.backward layers.0");
  }
}

TEST(PlanMake, a_plan_larger_than_the_machine_is_refused) {
  Machine m = cpu_machine();
  m.memory_bytes = 1 << 20;
  const std::string text = error_of(small_recipe(), m);
  EXPECT_HAS(text, "cpu has 1 MiB");
  for (const char* key : {"stages[0].pretrain.batch.micro_sequences", "stages[1].rl.sampling.max_batch",
                          "parallel.recompute: block", "model.layers", "dtypes.moments: bf16"}) {
    EXPECT_HAS(text, key);
  }
  // The place is that of the key that decides.
  const auto places_error = [&](const Recipe& r) {
    FieldPlaces places;
    places["model"].value = {"r.yaml", 2, 1};
    places["stages[1].rl.objective.micro_tokens"].value = {"r.yaml", 9, 5};
    try {
      make_plan(r, m, {}, places);
    } catch (const RecipeError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  Recipe wide = small_recipe();
  std::get<RlSpec>(wide.stages[1]).objective.micro_tokens = 1 << 16;
  std::get<RlSpec>(wide.stages[1]).sampling.prompts = 4096;
  EXPECT_HAS(places_error(wide), "r.yaml:9:5: stages[1].rl.objective.micro_tokens: the plan needs");
  Recipe deep = small_recipe();
  deep.model.layers = 64;
  deep.parallel.recompute = "block";
  EXPECT_HAS(places_error(deep), "r.yaml:2:1: model.moe.experts: the plan needs");
  EXPECT_HAS(places_error(deep), "model.layers (64)");
}

TEST(PlanMake, the_fp32_reference_computes_in_fp32_throughout) {
  Recipe r = small_recipe();
  for (auto& table : r.precision.tables) {
    RuleSpec rule;
    rule.spec.format = Format::kFp32;
    table = {rule};
  }
  std::get<PretrainSpec>(r.stages[0]).batch.tokens = 2048;
  const Plan p = plan_of(r);
  EXPECT_EQ(p.act, DType::kF32);
  for (const ParamInfo& i : p.parameters) EXPECT_EQ(i.gradient, DType::kF32) << i.name;
  r.dtypes.masters = DType::kBf16;
  EXPECT_HAS(error_of(r), "dtypes.masters: bf16");
}

TEST(PlanMake, recorded_steps_keep_a_switch_in_place) {
  Recipe r = small_recipe();
  RuleSpec rule;
  rule.modules = {"*"};
  rule.spec.format = Format::kMxfp8;
  rule.steps = "0-50%";
  r.precision.tables[0] = {rule};
  std::get<PretrainSpec>(r.stages[0]).steps = 900;
  const Plan p = make_plan(r, cpu_machine(), {600, 60});
  EXPECT_EQ(p.stages[0].precision.forward.spans[0].end, 300);
}

TEST(PlanMake, generation_needs_no_more_than_its_prompt) {
  Plan p = plan_of(small_recipe());
  size_for_generation(p, 7, 27, 3);
  EXPECT_EQ(p.max_tokens, 7);
  EXPECT_EQ(p.max_cache_slots, 3);
  EXPECT_EQ(p.max_cache_length, 27);
  EXPECT_EQ(p.max_decode_tokens, 7);
}

TEST(PlanMake, the_text_says_what_will_happen) {
  const std::string text = describe(plan_of(small_recipe()));
  EXPECT_HAS(text, "4 layers, hidden 128");
  EXPECT_HAS(text, "8 experts of 128, top 2");
  EXPECT_HAS(text, "parameters 1,");
  EXPECT_HAS(text, "600 steps");
  EXPECT_HAS(text, "4,915,200 tokens in all");
  EXPECT_HAS(text, "rl.trainer.backward, steps 0 to 60");
  EXPECT_HAS(text, "sampler and trainer agree bit for bit");
  EXPECT_HAS(text, "run arena");
  EXPECT_HAS(text, "checkpoint ");
}

TEST(PlanMake, the_json_has_the_same_facts) {
  Recipe recipe = small_recipe();
  auto& data = std::get<PretrainSpec>(recipe.stages[0]).data;
  data.resize(1);
  data[0].kind = data[0].name = "random";
  const Plan p = plan_of(recipe);
  const auto j = nlohmann::json::parse(plan_json(p));
  EXPECT_EQ(j["parameters"]["total"], total_parameters(p.parameters));
  EXPECT_EQ(j["stages"][1]["kind"], "rl");
  EXPECT_EQ(j["stages"][1]["equal_bits"], true);
  const auto& table = j["stages"][0]["precision"][0];
  EXPECT_EQ(table["table"], "pretrain.forward");
  EXPECT_EQ(table["end"], 600);
  EXPECT_EQ(table["cells"][0]["module"], "attn.qkv");
  EXPECT_EQ(table["cells"][0]["cell"], "bf16");
  int64_t run = 0;
  for (const auto& block : j["memory"]["run"]["blocks"]) run += block["bytes"].get<int64_t>();
  EXPECT_EQ(run, p.memory.run_bytes);
}

TEST(PlanMake, prompt_bounds_cover_the_tasks_own_texts) {
  TaskSpec sums;
  sums.high = 99;
  EXPECT_EQ(longest_prompt(sums), 6);  // "99+99="
  TaskSpec countdown;
  countdown.kind = "countdown";
  countdown.numbers = 3;
  countdown.high = 99;
  EXPECT_GE(longest_prompt(countdown), static_cast<int64_t>(std::string("99,99,99:970299=").size()));
}

}  // namespace
}  // namespace fp4t
