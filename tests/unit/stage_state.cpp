// States that pass every hash and yet cannot be a run's, and what a recipe names to go on from.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "engine/stage/resume.h"
#include "kernels/base/check.h"
#include "tests/unit/store_fixture.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

const char* const kRecipe =
    R"(model: {layers: 1, hidden: 32, heads: 1, kv_heads: 1, head_dim: 32, mlp_hidden: 32, max_positions: 8}
stages:
  - rl:
      steps: 2
      task: {kind: sums, low: 0, high: 4}
      sampling: {prompts: 1, samples: 2, max_tokens: 4}
      objective: {mini_batches: 2}
)";

CheckpointInfo inside_a_step() {
  CheckpointInfo info;
  info.path = "step_0_0_1";
  info.state.recipe_yaml = kRecipe;
  info.state.update = 1;
  Rollout& r = info.state.rollout;
  r.samples_per_prompt = 2;
  r.problems = {{"1+2=", "3"}};
  r.prompts = {{49, 43, 50, 61}};
  r.completions = {{51, 10}, {256, 0, 1, 2, 3}};
  return info;
}

TEST(StageState, a_rollout_that_would_index_outside_the_model_is_refused) {
  EXPECT_EQ(error_of([] { check_state(inside_a_step()); }), "");
  const struct {
    const char* words;
    std::function<void(Rollout&)> change;
  } cases[] = {{"prompt 0 has token 257 of 257", [](Rollout& r) { r.prompts[0][3] = 257; }},
               {"prompt 0 has token -1", [](Rollout& r) { r.prompts[0][0] = -1; }},
               {"prompt 0 is empty", [](Rollout& r) { r.prompts[0].clear(); }},
               {"completion 1 has token 1000000", [](Rollout& r) { r.completions[1][0] = 1000000; }},
               {"completion 0 takes 9 positions of 8", [](Rollout& r) { r.completions[0].resize(6); }}};
  for (const auto& c : cases) {
    CheckpointInfo info = inside_a_step();
    c.change(info.state.rollout);
    const std::string text = error_of([&] { check_state(info); });
    EXPECT_NE(text.find("checkpoint 'step_0_0_1': rollout: " + std::string(c.words)), std::string::npos)
        << c.words << " in '" << text << "'";
  }
  // A model may have more rows than there are tokens.
  CheckpointInfo info = inside_a_step();
  info.state.recipe_yaml = std::string(kRecipe).insert(8, "vocabulary: 4000, ");
  info.state.rollout.completions[0][0] = 3999;
  EXPECT_EQ(error_of([&] { check_state(info); }), "");
}

TEST(StageState, what_a_recipe_goes_on_from_is_looked_for_and_nothing_is_made) {
  TempFolder dir;
  RunSpec run;
  run.dir = dir / "run";
  EXPECT_EQ(error_of([&] { check_origin(run, {}); }), "");
  for (const auto& [key, member] :
       {std::pair{"run.resume", &RunSpec::resume}, std::pair{"run.branch_from", &RunSpec::branch_from}}) {
    RunSpec other = run;
    other.*member = dir / "nowhere";
    const FieldPlaces places = {{key, {{"r.yaml", 3, 8}, {"r.yaml", 3, 15}}}};
    const std::string begin = "r.yaml:3:15: " + std::string(key) + ": '" + (dir / "nowhere");
    EXPECT_THROW(check_origin(other, places), MissingInputError);
    EXPECT_EQ(error_of([&] { check_origin(other, places); }).find(begin), 0u);
    EXPECT_EQ(error_of([&] { find_resume(other, places); }).find(begin), 0u);
  }
  run.resume = dir / "origin";
  EXPECT_FALSE(fs::exists(dir / "run/checkpoints/step_0_1_0"));
  SmallRun origin(1);
  Queue queue = Queue::cpu(1);
  CheckpointStore(dir / "origin").save(queue, origin.tensors(), origin.state(), 1);
  // A state that is none of a run's.
  const FieldPlaces places = {{"run.resume", {{"r.yaml", 3, 8}, {"r.yaml", 3, 15}}}};
  const std::string wrong = error_of([&] { check_origin(run, places); });
  EXPECT_NE(wrong.find("its recipe"), std::string::npos);
  EXPECT_EQ(wrong.find("r.yaml:3:15: run.resume: "), 0u);
  // A folder with a course of its own continues that.
  CheckpointStore(run.dir).save(queue, origin.tensors(), origin.state(), 1);
  run.resume = dir / "nowhere";
  EXPECT_EQ(error_of([&] { check_origin(run, {}); }), "");
  // A run that insists on a new folder would overlook it.
  RunState whole;
  whole.recipe_yaml = kRecipe;
  CheckpointStore(run.dir).save(queue, origin.tensors(), whole, 1);
  run.resume = "never";
  EXPECT_EQ(error_of([&] { find_resume(run, places); }).find("r.yaml:3:15: run.resume: never, but "), 0u);
}

}  // namespace
}  // namespace fp4t::test
