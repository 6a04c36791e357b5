// Whole runs on the GPU: what must be equal bit for bit, and what must not grow with the work.
#include <csignal>
#include <thread>

#include "engine/stage/signals.h"
#include "tests/support/gpu_main.h"
#include "tests/support/runs_in_process.h"

namespace fp4t::test {
namespace {

class GpuRuns : public testing::Test {
 protected:
  void SetUp() override { write_corpus(folder_.path()); }

  QueueCounts run(const std::string& dir, const std::string& recipe, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"run.device=cuda", "run.dir=" + dir});
    return run_here(folder_.path(), recipe, more);
  }

  const ScratchFolder folder_;
};

TEST_F(GpuRuns, two_runs_leave_the_same_bytes) {
  run("one", kTinyRecipe);
  run("two", kTinyRecipe);
  expect_same_outcome(folder_ / "one", folder_ / "two");
}

TEST_F(GpuRuns, a_stopped_run_goes_on_to_the_same_bytes) {
  run("whole", kTinyRecipe);
  install_stop_handlers();
  for (const auto& [stage, steps] : {std::pair{"pretrain", 7}, std::pair{"rl", 4}}) {
    std::thread watcher([&] {
      wait_until([&] { return count_steps(folder_ / "stopped", stage) >= steps; });
      std::raise(SIGTERM);
    });
    EXPECT_THROW(run("stopped", kTinyRecipe), PreemptedError);
    watcher.join();
    clear_stop_request();
  }
  run("stopped", kTinyRecipe);
  expect_same_outcome(folder_ / "whole", folder_ / "stopped");
}

TEST_F(GpuRuns, recomputing_activations_changes_no_figure) {
  run("kept", kTinyRecipe, {"parallel.recompute=none"});
  run("again", kTinyRecipe);
  EXPECT_EQ(read_text(folder_ / "kept/metrics.jsonl"), read_text(folder_ / "again/metrics.jsonl"));
}

// The same rows for the sampler and the trainer's forward; the cache's format is the sampler's to say.
std::string equality_recipe(const std::string& rules, const std::string& cache = "") {
  return std::string(kTinyModel) + "precision:\n  rl.sampler:\n" + cache + rules + "  rl.trainer.forward:\n" +
         rules +
         R"(stages:
  - pretrain:
      steps: 10
      batch: {tokens: 256, micro_sequences: 8, length: 32}
      data: [{kind: sums, low: 0, high: 4, end_of_document: false}]
      optimizer: {learning_rate: 2e-2}
      eval: {tokens: 32}
  - rl:
      steps: 5
      task: {kind: sums, low: 0, high: 4}
      sampling: {prompts: 8, samples: 4, max_tokens: 5, max_batch: 12}
      objective: {kl: 0.1, mini_batches: 2, micro_tokens: 40, drop_zero_advantage: false}
      optimizer: {learning_rate: 2e-3}
      eval: {tokens: 32}
)";
}

TEST_F(GpuRuns, sampler_and_trainer_agree_bit_for_bit_in_every_step) {
  const char* const bf16 = "    - {module: \"*\", format: bf16}\n";
  // Experts wide enough for the products that read weights as codes.
  const std::vector<std::string> wide = {"model.hidden=128", "model.moe.hidden=256"};
  const char* const experts =
      "    - {module: \"experts.*\", operand: act, format: nvfp4, scale_rule: four_over_six, scale_scope: "
      "row, "
      "scale_round: pow2}\n"
      "    - {module: \"experts.*\", operand: weight, format: nvfp4, scale_rule: four_over_six, scale_round: "
      "pow2}\n"
      "    - {module: \"*\", format: bf16}\n";
  const struct {
    const char *name, *rules, *cache;
    std::vector<std::string> more = {};
  } policies[] = {{"experts_as_codes", experts, "", wide},
                  {"bf16", bf16, ""},
                  {"bf16_mxfp8_cache", bf16, "    - {module: kv_cache, format: mxfp8}\n"},
                  {"mxfp8", "    - {module: \"*\", format: mxfp8}\n", ""},
                  {"nvfp4",
                   "    - {module: head, format: bf16}\n"
                   "    - {module: \"experts.*\", operand: act, format: nvfp4, scale_rule: four_over_six, "
                   "scale_scope: row}\n"
                   "    - {module: \"*\", format: nvfp4, scale_rule: four_over_six}\n",
                   ""}};
  for (const auto& policy : policies) {
    SCOPED_TRACE(policy.name);
    run(policy.name, equality_recipe(policy.rules, policy.cache), policy.more);
    const std::string dir = folder_ / policy.name;
    const auto norms = step_figures(dir, "rl", "grad_norm");
    ASSERT_EQ(norms.size(), 5u);
    for (const double norm : norms) EXPECT_GT(norm, 0);
    EXPECT_EQ(step_figures(dir, "rl", "logprob_equal_fraction"), std::vector<double>(5, 1.0));
    EXPECT_EQ(step_figures(dir, "rl", "logprob_difference_max"), std::vector<double>(5, 0.0));
  }
}

// With equal bits the recorded routing is the trainer's own, so replaying it changes nothing, as measuring it
// never does; decode calls are recorded graphs with padding rows.
TEST_F(GpuRuns, replayed_routing_is_the_samplers) {
  const std::string recipe = equality_recipe(
      "    - {module: head, format: bf16}\n"
      "    - {module: \"experts.*\", operand: act, format: nvfp4, scale_rule: four_over_six, scale_scope: "
      "row}\n"
      "    - {module: \"*\", format: nvfp4, scale_rule: four_over_six}\n");
  const std::string one_update = "stages[1].rl.objective.mini_batches=1";
  run("own", recipe, {one_update});
  run("replayed", recipe, {one_update, "stages[1].rl.objective.router_replay=sampler"});
  run("measured", recipe, {one_update, "stages[1].rl.objective.router_replay=measure"});
  const auto tensors = [&](const std::string& dir) {
    return stored_bytes_of(latest_checkpoint_of(folder_ / dir)).at("tensors-00001.safetensors");
  };
  for (const char* name : {"replayed", "measured"}) {
    EXPECT_TRUE(tensors(name) == tensors("own")) << name;
    EXPECT_EQ(step_figures(folder_ / name, "rl", "router_disagreement"), std::vector<double>(5, 0.0)) << name;
    EXPECT_EQ(step_figures(folder_ / name, "rl", "logprob_equal_fraction"), std::vector<double>(5, 1.0))
        << name;
  }
}

TEST_F(GpuRuns, every_objective_trains) {
  const std::string recipe = equality_recipe("    - {module: \"*\", format: bf16}\n");
  for (const char* kind : {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"}) {
    SCOPED_TRACE(kind);
    run(kind, recipe,
        {std::string("stages[1].rl.objective={kind: ") + kind +
         ", kl: 0.1, entropy: 0.01, mini_batches: 2, micro_tokens: 40, drop_zero_advantage: false}"});
    for (const double norm : step_figures(folder_ / kind, "rl", "grad_norm")) EXPECT_GT(norm, 0);
    EXPECT_EQ(step_figures(folder_ / kind, "rl", "applied"), std::vector<double>(5, 2.0));
  }
}

TEST_F(GpuRuns, completions_do_not_depend_on_how_many_are_decoded_together) {
  const std::string recipe = equality_recipe("    - {module: \"*\", format: bf16}\n");
  for (const char* batch : {"1", "5", "32"}) {
    run(std::string("batch") + batch, recipe, {std::string("stages[1].rl.sampling.max_batch=") + batch});
  }
  const std::string expected = read_text(folder_ / "batch1/metrics.jsonl");
  EXPECT_EQ(read_text(folder_ / "batch5/metrics.jsonl"), expected);
  EXPECT_EQ(read_text(folder_ / "batch32/metrics.jsonl"), expected);
}

// Pretraining alone, of `steps` steps of so many micro-batches.
QueueCounts pretrain_counts(const std::string& folder, int steps, int micro_batches) {
  const std::string recipe = std::string(kTinyModel) + R"(precision: {preset: nvidia_nvfp4}
stages:
  - pretrain:
      steps: )" + std::to_string(steps) +
                             R"(
      batch: {tokens: 512, micro_sequences: )" +
                             std::to_string(16 / micro_batches) + R"(, length: 32}
      data: [{kind: sums, low: 0, high: 4, end_of_document: false}]
      optimizer: {learning_rate: 1e-3}
      eval: {tokens: 32}
)";
  const std::string dir = "run_" + std::to_string(steps) + "_" + std::to_string(micro_batches);
  return run_here(folder, recipe, {"run.device=cuda", "run.dir=" + dir});
}

TEST_F(GpuRuns, a_step_waits_for_the_device_twice_however_many_micro_batches_it_has) {
  for (const int micro_batches : {1, 4, 16}) {
    const int64_t five = pretrain_counts(folder_.path(), 5, micro_batches).waits;
    const int64_t nine = pretrain_counts(folder_.path(), 9, micro_batches).waits;
    EXPECT_EQ(nine - five, 4 * 2) << micro_batches << " micro-batches";
  }
}

TEST_F(GpuRuns, scratch_is_what_the_plan_priced_and_never_grows) {
  EXPECT_EQ(pretrain_counts(folder_.path(), 6, 4).workspace_allocations, 1);
  const QueueCounts counts = run("run", kTinyRecipe);
  EXPECT_EQ(counts.workspace_allocations, 1);
  const Recipe recipe = parse_recipe(kTinyRecipe, "recipe.yaml", {"run.device=cuda"}).recipe;
  EXPECT_EQ(counts.workspace_bytes, make_plan(recipe, probe_machine("cuda", 1), {}).memory.workspace_bytes);
}

TEST_F(GpuRuns, the_list_of_kernels_names_those_of_the_gpu) {
  run("run", kTinyRecipe);
  const std::string kernels = read_text(folder_ / "run/kernels.txt");
  EXPECT_NE(kernels.find("layers.0 experts.gate_up fprop nvfp4 x nvfp4: cuda "), std::string::npos)
      << kernels;
  EXPECT_EQ(kernels.find("cpu"), std::string::npos) << kernels;
}

TEST_F(GpuRuns, the_plan_prices_memory_against_what_is_free) {
  const Machine machine = probe_machine("cuda", 1);
  EXPECT_EQ(machine.backend, Backend::kCuda);
  EXPECT_GT(machine.free_bytes, 0);
  EXPECT_LE(machine.free_bytes, machine.memory_bytes);
  const Recipe recipe = parse_recipe(kTinyRecipe, "recipe.yaml", {"run.device=cuda"}).recipe;
  Machine full = machine;
  full.free_bytes = 1 << 20;
  EXPECT_THROW(make_plan(recipe, full, {}), RecipeError);
  EXPECT_NO_THROW(make_plan(recipe, machine, {}));
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
