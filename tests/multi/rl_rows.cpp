// Rows, rewards by a program and limits of their own on several ranks: each rank has a program for what it
// sampled, and completions, rewards and files are those of one rank.
#include <sstream>

#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

const char* const kJudge = R"(import json, os, sys
open('judges', 'a').write('x')
for line in sys.stdin:
  r = json.loads(line)
  print(json.dumps({'id': r['id'], 'reward': (r['id'] * 7 + len(r['completion'])) % 5}), flush=True)
)";

const std::string kRecipe =
    tiny_model("name: rows, dir: run, seed: 5", "  max_positions: 64\n  init: {std: 0.3}\n") +
    R"(precision: {preset: fp32}
stages:
  - rl:
      steps: 2
      task: {kind: jsonl, paths: rows.jsonl, template: "{prompt} A long frame of words, so that pages fill: ", limit_field: most, max_prompt_tokens: 50}
      rewards: [{kind: verifier}, {kind: process, command: [python3, judge.py]}, {kind: length, free_tokens: 2}]
      rollouts: {every: 1}
      sampling: {prompts: 5, samples: 3, max_tokens: 6, max_batch: 4}
      objective: {micro_tokens: 64, drop_zero_advantage: false}
      optimizer: {learning_rate: 0}
      eval: {tokens: 32}
)";

TEST(RlRowsOnRanks, completions_and_rewards_are_those_of_one_rank) {
  ScratchFolder folder;
  write_inputs(folder.path(), kRecipe);
  write_text(folder / "judge.py", kJudge);
  std::string rows;
  for (int i = 0; i < 20; ++i) {
    rows += "{\"prompt\": \"" + std::to_string(i) +
            "\", \"answer\": 1, \"most\": " + std::to_string(1 + i % 6) + "}\n";
  }
  write_text(folder / "rows.jsonl", rows);
  train(folder.path(), {"--set", "run.dir=one"});
  EXPECT_EQ(read_text(folder / "judges"), "x");
  train_on(2, folder.path(), "two");
  EXPECT_EQ(read_text(folder / "judges"), "xxx");
  for (const char* name : {"stage-0-step-000001.jsonl", "stage-0-step-000002.jsonl"}) {
    const std::string one = read_text(folder / ("one/rollouts/" + std::string(name)));
    EXPECT_FALSE(one.empty());
    EXPECT_EQ(one, read_text(folder / ("two/rollouts/" + std::string(name)))) << name;
  }
  EXPECT_EQ(step_figures(folder / "one", "rl", "reward.process"),
            step_figures(folder / "two", "rl", "reward.process"));
}

TEST(RlRowsOnRanks, a_program_that_fails_on_one_rank_ends_all) {
  ScratchFolder folder;
  write_inputs(folder.path(), kRecipe);
  // The second to start gives up: which rank that is does not matter.
  write_text(folder / "judge.py",
             std::string(kJudge).replace(std::string(kJudge).find("for line"), 0,
                                         "if os.path.getsize('judges') > 1: sys.exit('no more')\n"));
  write_text(folder / "rows.jsonl", "{\"prompt\": \"1\", \"answer\": 1}\n");
  const Exit exit = run_ranks(2, folder.path(), train_args({"--set", "stages[0].rl.rewards[1].restarts=0"}));
  EXPECT_EQ(exit.code, 65) << exit.output << exit.errors;
  EXPECT_NE((exit.output + exit.errors).find("no more"), std::string::npos) << exit.output << exit.errors;
}

}  // namespace
}  // namespace fp4t::test
