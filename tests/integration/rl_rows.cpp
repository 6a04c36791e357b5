// RL on rows of JSON lines with a reward of several parts, one of them a program's: what reaches the metrics
// and the files of completions, and what a program that fails does to the run.
#include <cmath>
#include <filesystem>

#include "engine/stage/rollout_files.h"
#include "engine/tokens/tokenizer.h"
#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// What the program answers is checked below: the length of the text, and a half when it was cut.
const char* const kJudge = R"(import json, sys
print('judge is here', file=sys.stderr, flush=True)
for line in sys.stdin:
  r = json.loads(line)
  if r['prompt'] != 'Q ' + r['answer'] + '=': sys.exit('not the prompt: ' + line)
  print(json.dumps({'id': r['id'], 'reward': len(r['completion']) - 0.5 * (not r['finished'])}), flush=True)
)";

const std::string kRecipe = std::string(kTinyModel) + R"(stages:
  - rl:
      steps: 3
      task:
        kind: jsonl
        paths: rows.jsonl
        template: "Q {prompt}="
        limit_field: most
        max_prompt_tokens: 8
        held_out: &split {fraction: 0.5, seed: 2}
      rewards:
        - {kind: verifier, weight: 2}
        - {kind: process, name: judge, weight: 0.25, command: [python3, judge.py], timeout_seconds: 60}
      rollouts: {every: 1, keep: 2}
      sampling: {prompts: 4, samples: 3, max_tokens: 6, max_batch: 5}
      objective: {micro_tokens: 64}
      eval:
        max_tokens: 6
        tokens: 32
        task: {kind: jsonl, paths: rows.jsonl, template: "Q {prompt}=", limit_field: most, max_prompt_tokens: 8, held_out: *split}
)";

class RlRows : public ::testing::Test {
 protected:
  void SetUp() override {
    write_inputs(folder_.path(), kRecipe);
    write_text(folder_ / "judge.py", kJudge);
    std::string rows;
    for (int i = 0; i < 40; ++i) {
      rows += "{\"prompt\": \"" + std::to_string(i) + "\", \"answer\": " + std::to_string(i) +
              ", \"most\": " + std::to_string(1 + i % 6) + "}\n";
    }
    write_text(folder_ / "rows.jsonl", rows);
  }
  std::vector<json> lines_of(const std::string& name) {
    std::vector<json> lines;
    std::istringstream in(read_text(run_ + "/rollouts/" + name));
    for (std::string line; std::getline(in, line);) lines.push_back(json::parse(line));
    return lines;
  }
  ScratchFolder folder_;
  const std::string run_ = folder_ / "run";
};

TEST_F(RlRows, completions_are_written_with_all_that_made_them) {
  const Exit exit = train(folder_.path());
  EXPECT_NE(exit.output.find("reward judge: judge is here"), std::string::npos) << exit.output;
  EXPECT_FALSE(fs::exists(run_ + "/rollouts/stage-0-step-000001.jsonl"));  // keep: 2
  EXPECT_TRUE(fs::exists(run_ + "/rollouts/stage-0-step-000002.jsonl"));
  const std::vector<json> lines = lines_of("stage-0-step-000003.jsonl");
  ASSERT_EQ(lines.size(), 12u);
  double reward = 0, judged = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const json& l = lines[i];
    EXPECT_EQ(l["step"], 3);
    EXPECT_EQ(l["sample"], 24 + i);  // two steps of 12 before
    EXPECT_EQ(l["problem"], i / 3);
    const int answer = std::stoi(l["answer"].get<std::string>());
    EXPECT_EQ(l["prompt"], "Q " + std::to_string(answer) + "=");
    const std::vector<int> tokens = l["completion_tokens"];
    EXPECT_LE(tokens.size(), static_cast<size_t>(1 + answer % 6));  // the row's own limit
    if (!l["finished"]) {
      EXPECT_EQ(tokens.size(), static_cast<size_t>(1 + answer % 6));
      EXPECT_EQ(l["verdict"], "unverifiable");
    }
    EXPECT_EQ(l["sampler_log_probs"].size(), tokens.size());
    EXPECT_EQ(l["sampler_log_probs"], l["trainer_log_probs"]);
    const double parts =
        2 * l["rewards"]["verifier"].get<double>() + 0.25 * l["rewards"]["judge"].get<double>();
    EXPECT_EQ(l["reward"].get<double>(), parts);
    reward += parts;
    judged += l["rewards"]["judge"].get<double>();
    // Bytes are the tokens below 256: where they are UTF-8, the text is exactly they.
    std::string bytes;
    for (const int t : tokens) {
      if (t < 256) bytes += static_cast<char>(t);
    }
    if (!bytes.empty() && bytes.back() == '\n') bytes.pop_back();
    if (json(bytes).dump(-1, ' ', false, json::error_handler_t::ignore) ==
        json(bytes).dump(-1, ' ', false, json::error_handler_t::replace)) {
      EXPECT_EQ(l["completion"], bytes);
    }
  }
  EXPECT_NEAR(step_figures(run_, "rl", "reward").back(), reward / 12, 1e-6);
  EXPECT_NEAR(step_figures(run_, "rl", "reward.judge").back(), judged / 12, 1e-6);
  EXPECT_EQ(step_figures(run_, "rl", "logprob_equal_fraction"), (std::vector<double>{1, 1, 1}));
  const auto evals = metrics_of(run_, "eval");
  ASSERT_EQ(evals.size(), 2u);
  EXPECT_GT(evals[0]["problems"], 5);
  EXPECT_GT(evals[0]["unverifiable"], 0.5);
}

TEST_F(RlRows, a_program_that_fails_ends_the_run_with_its_last_words) {
  write_text(folder_ / "judge.py", "import sys\nsys.exit('out of luck')\n");
  const Exit exit = run_binary(folder_.path(), train_args({"--set", "stages[0].rl.rewards[1].restarts=1"}));
  EXPECT_EQ(exit.code, 65) << exit.errors;
  EXPECT_NE(exit.errors.find("out of luck"), std::string::npos) << exit.errors;
  EXPECT_NE(exit.errors.find("given up after 1 restarts"), std::string::npos) << exit.errors;
}

TEST_F(RlRows, damaged_rows_end_it_before_the_first_step) {
  write_text(folder_ / "rows.jsonl", "{\"prompt\": \"1\", \"answer\": 1}\n{\"prompt\": \"2\"}\n");
  const Exit exit = run_binary(folder_.path(), train_args());
  EXPECT_EQ(exit.code, 65) << exit.errors;
  EXPECT_NE(exit.errors.find("rows.jsonl:2: no key 'answer'"), std::string::npos) << exit.errors;
  write_text(folder_ / "rows.jsonl",
             "{\"prompt\": \"1\", \"answer\": 1}\n{\"prompt\": \"\", \"answer\": 1}\n");
  const Exit empty = run_binary(folder_.path(), train_args());
  EXPECT_EQ(empty.code, 65) << empty.errors;
  EXPECT_NE(empty.errors.find("rows.jsonl:2: 'prompt' is empty"), std::string::npos) << empty.errors;
  EXPECT_FALSE(fs::exists(run_ + "/metrics.jsonl"));
}

// Messages in the form of a family, answers that end with its token: in training, in evaluation and in what
// is written down.
TEST_F(RlRows, conversations_are_read_in_their_form_and_end_with_their_token) {
  fs::copy_file(from_environment("FP4T_TEST_SOURCE") + "/tests/golden/tokenizers/qwen.json",
                folder_ / "t.json");
  std::string rows, text = kRecipe;
  for (int i = 0; i < 20; ++i) {
    rows += R"({"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": ")" +
            std::to_string(i) + "\"}], \"answer\": " + std::to_string(i) + "}\n";
  }
  write_text(folder_ / "rows.jsonl", rows);
  for (size_t at; (at = text.find("template: \"Q {prompt}=\"")) != std::string::npos;) {
    text.replace(at, 23, "prompt_field: prompt");
  }
  for (size_t at; (at = text.find("max_prompt_tokens: 8")) != std::string::npos;) {
    text.replace(at, 20, "max_prompt_tokens: 64");
  }
  text.replace(text.find("stages:"), 0, "tokenizer: {kind: json, path: t.json, chat: chatml}\n");
  write_text(folder_ / "recipe.yaml", text);
  write_text(folder_ / "judge.py", R"(import json, sys
for line in sys.stdin:
  r = json.loads(line)
  roles = [m['role'] for m in json.loads(r['prompt'])]
  print(json.dumps({'id': r['id'], 'reward': int(roles == ['system', 'user'])}), flush=True)
)");
  const Exit config = run_binary(
      folder_.path(), {"print-config", "--config", "recipe.yaml", "--set", "model.max_positions=128"});
  EXPECT_NE(config.output.find("end_tokens: [\"<|im_end|>\", \"<eod>\"]"), std::string::npos)
      << config.output;
  // max_prompt_tokens counts the form's marks: one position is left for an answer.
  const Exit tight =
      run_binary(folder_.path(), {"validate", "--config", "recipe.yaml", "--set", "model.max_positions=65",
                                  "--set", "stages[0].rl.objective.micro_tokens=65"});
  EXPECT_EQ(tight.code, 0) << tight.errors;
  // Untrained, it draws evenly enough that some answers end.
  train(folder_.path(), {"--set", "model.max_positions=128", "--set",
                         "stages[0].rl.sampling={prompts: 8, samples: 8, max_tokens: 12, max_batch: 9}",
                         "--set", "stages[0].rl.objective.micro_tokens=256"});
  EXPECT_EQ(step_figures(run_, "rl", "reward.judge"), (std::vector<double>{1, 1, 1}));
  TokenizerSpec spec;
  spec.kind = "json";
  spec.path = folder_ / "t.json";
  const auto tokenizer = make_tokenizer(spec);
  const int32_t end = tokenizer->single_token("<|im_end|>");
  int finished = 0;
  for (const char* name : {"stage-0-step-000002.jsonl", "stage-0-step-000003.jsonl"}) {
    for (const json& l : lines_of(name)) {
      const std::string answer = l["answer"];
      EXPECT_EQ(l["prompt_tokens"].get<std::vector<int32_t>>(),
                tokenizer->encode_marked("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n" + answer +
                                         "<|im_end|>\n<|im_start|>assistant\n"));
      EXPECT_EQ(l["prompt"],
                R"([{"role":"system","content":"Add."},{"role":"user","content":")" + answer + "\"}]");
      const auto tokens = l["completion_tokens"].get<std::vector<int32_t>>();
      const bool ends = tokens.back() == end || tokens.back() == tokenizer->end_of_document();
      EXPECT_EQ(l["finished"].get<bool>(), ends);
      finished += tokens.back() == end ? 1 : 0;
    }
  }
  EXPECT_GT(finished, 0);
}

// The rows may change under an unchanged recipe: a checkpoint is not continued on others.
TEST_F(RlRows, other_rows_are_refused_on_resume_and_files_of_later_steps_go) {
  train(folder_.path(),
        {"--set", "stages[0].rl.checkpoint.every=1", "--set", "stages[0].rl.checkpoint.keep=5"});
  const std::string stray = run_ + "/rollouts/stage-0-step-000004.jsonl";
  write_text(stray, "{}\n");
  write_text(run_ + "/rollouts/notes.txt", "mine\n");
  cut_rollouts(run_, 0, 2);
  EXPECT_FALSE(fs::exists(stray));
  EXPECT_FALSE(fs::exists(run_ + "/rollouts/stage-0-step-000003.jsonl"));
  EXPECT_TRUE(fs::exists(run_ + "/rollouts/stage-0-step-000002.jsonl"));
  EXPECT_TRUE(fs::exists(run_ + "/rollouts/notes.txt"));
  // As if the run had ended after step 2.
  fs::remove_all(run_ + "/checkpoints/" + checkpoints_of(run_).back());
  write_text(run_ + "/checkpoints/latest", checkpoints_of(run_).back() + "\n");
  write_text(folder_ / "rows.jsonl",
             read_text(folder_ / "rows.jsonl") + "{\"prompt\": \"x\", \"answer\": 1}\n");
  const Exit exit = run_binary(folder_.path(), train_args({"--set", "stages[0].rl.checkpoint.every=1",
                                                           "--set", "stages[0].rl.checkpoint.keep=5"}));
  EXPECT_EQ(exit.code, 65) << exit.output << exit.errors;
  EXPECT_NE(exit.errors.find("the data of stage 'rl' is not what the checkpoint was made with"),
            std::string::npos)
      << exit.errors;
}

}  // namespace
}  // namespace fp4t::test
