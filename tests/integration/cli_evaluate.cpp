// `evaluate` and `report` of several runs from the outside, and the file for Prometheus.
#include <cmath>
#include <filesystem>

#include "tests/support/cli.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

class CliEvaluate : public Cli {
 protected:
  void SetUp() override {
    Cli::SetUp();
    write_text(*done_ / "words.txt", "the cat sat on the mat\n%\nso it was\n");
    write_text(*done_ / "questions.jsonl", R"({"question":"1+2=","choices":["3","4"],"answer":0})"
                                           "\n"
                                           R"({"ctx":"the cat","endings":["sat","qqqqq"],"label":"0"})"
                                           "\n");
    write_text(*done_ / "prompts.jsonl", R"({"prompt":"1+2="})"
                                         "\n"
                                         R"({"prompt":"the","max_tokens":2})"
                                         "\n");
  }
  static std::vector<std::string> all_three(const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {"evaluate",
                                     "--checkpoint",
                                     "run",
                                     "--text",
                                     "words.txt",
                                     "--separator",
                                     "%",
                                     "--context",
                                     "16",
                                     "--stride",
                                     "8",
                                     "--choices",
                                     "questions.jsonl",
                                     "--details",
                                     "--prompts",
                                     "prompts.jsonl",
                                     "--max-tokens",
                                     "5",
                                     "--stop",
                                     "\n"};
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
};

TEST_F(CliEvaluate, one_object_says_what_was_measured_of_what) {
  const Exit exit = look(all_three({"--out", "result.json"}));
  ASSERT_EQ(exit.code, 0) << exit.errors;
  EXPECT_EQ(read_text(*done_ / "result.json"), exit.output);
  auto j = nlohmann::json::parse(exit.output);
  EXPECT_EQ(j.at("kind"), "evaluation");
  EXPECT_EQ(j.at("checkpoint").at("content_hash"), summary_of(*done_ / "run").at("content_hash"));
  EXPECT_EQ(j.at("checkpoint").at("stage"), "rl");
  EXPECT_EQ(j.at("precision").at("table"), "pretrain.forward");
  EXPECT_EQ(j.at("tokenizer").at("kind"), "bytes");
  const auto& text = j.at("text");
  EXPECT_EQ(text.at("documents"), 2);
  EXPECT_EQ(text.at("tokens"), 33);
  EXPECT_EQ(text.at("scored_tokens"), 31);
  const double nats = text.at("nats_per_token");
  EXPECT_GT(nats, 0);
  EXPECT_NEAR(std::log(text.at("perplexity").get<double>()), nats, 1e-9);
  EXPECT_NEAR(text.at("bits_per_byte").get<double>(), nats / std::log(2.0), 1e-9);
  const auto& choices = j.at("choices");
  EXPECT_EQ(choices.at("questions"), 2);
  double right = 0;
  for (const auto& d : choices.at("details")) {
    const std::vector<double> p = d.at("log_probabilities");
    EXPECT_EQ(d.at("chosen"), p[0] >= p[1] ? 0 : 1);
    right += d.at("chosen") == d.at("answer");
  }
  EXPECT_EQ(choices.at("accuracy"), right / 2);
  const auto& completions = j.at("prompts").at("completions");
  ASSERT_EQ(completions.size(), 2u);
  EXPECT_LE(completions[1].at("tokens"), 2);
  EXPECT_EQ(completions[0].at("completion").get<std::string>().find('\n'), std::string::npos);

  // The same again is equal but for what `made` holds; other tables are other numbers, under their own names.
  auto again = nlohmann::json::parse(look(all_three()).output);
  EXPECT_TRUE(again.at("made").contains("date"));
  again.erase("made");
  j.erase("made");
  EXPECT_EQ(again, j);
  const auto sampler = nlohmann::json::parse(look(all_three({"--table", "rl.sampler"})).output);
  EXPECT_EQ(sampler.at("precision").at("table"), "rl.sampler");
}

TEST_F(CliEvaluate, what_cannot_be_evaluated_is_refused_with_its_place) {
  const auto evaluate = [&](std::vector<std::string> args) {
    args.insert(args.begin(), {"evaluate", "--checkpoint", "run"});
    return look(args);
  };
  EXPECT_ANSWER(evaluate({}), 2, "nothing to evaluate on");
  EXPECT_ANSWER(evaluate({"--text", "nowhere.txt"}), 66, "nowhere.txt");
  EXPECT_ANSWER(evaluate({"--choices", "nowhere.jsonl"}), 66, "nowhere.jsonl");
  EXPECT_ANSWER(evaluate({"--text", "words.txt", "--context", "33"}), 2, "model.max_positions 32");
  EXPECT_ANSWER(evaluate({"--text", "words.txt", "--context", "8", "--stride", "9"}), 2, "--stride 9");
  EXPECT_ANSWER(evaluate({"--text", "words.txt", "--table", "rl.trainer.backward"}), 2, "--table");
  EXPECT_ANSWER(evaluate({"--text", "words.txt", "--context", "0"}), 2, "--context");
  write_text(*done_ / "bad.jsonl", R"({"question":"q","choices":["a","b"],"answer":7})");
  EXPECT_ANSWER(evaluate({"--choices", "bad.jsonl"}), 65, "bad.jsonl:1: the answer 7");
  write_text(*done_ / "bad.jsonl", "{\"prompt\":\"" + std::string(40, 'x') + "\"}");
  EXPECT_ANSWER(evaluate({"--prompts", "bad.jsonl"}), 65, "bad.jsonl:1: a prompt of 40 tokens");
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  write_text(*done_ / "bad.jsonl", R"({"question":"q","choices":["a","b"],"answer":)" + deep + "}");
  EXPECT_ANSWER(evaluate({"--choices", "bad.jsonl"}), 65, "bad.jsonl:1: nested too deeply");
  write_text(*done_ / "bad.jsonl", R"({"prompt":"q","stop":)" + deep + "}");
  EXPECT_ANSWER(evaluate({"--prompts", "bad.jsonl"}), 65, "bad.jsonl:1: nested too deeply");
  EXPECT_ANSWER(evaluate({"--prompts", "prompts.jsonl", "--stop", ""}), 2, "--stop");
  EXPECT_ANSWER(evaluate({"--text", "words.txt", "--stop", "x"}), 2,
                "--stop has no effect without --prompts");
  EXPECT_ANSWER(evaluate({"--text", "words.txt", "--field", "x"}), 2, "--field has no effect");
  EXPECT_ANSWER(look({"evaluate", "--checkpoint", "nowhere", "--text", "words.txt"}), 66, "nowhere");
  EXPECT_ANSWER(look({"evaluate", "--text", "words.txt"}), 2, "--checkpoint");
}

TEST(CliEvaluateRl, a_run_without_pretraining_is_measured_with_its_trainers_table) {
  const ScratchFolder folder;
  write_inputs(folder.path(), std::string(kTinyModel) + R"(tokenizer: {kind: bytes}
stages:
  - rl:
      steps: 1
      task: {kind: sums, low: 0, high: 4}
      sampling: {prompts: 2, samples: 2, max_tokens: 2}
      objective: {drop_zero_advantage: false}
)");
  train(folder.path());
  write_text(folder / "words.txt", "the cat sat\n");
  const Exit exit = run_binary(folder.path(), {"evaluate", "--checkpoint", "run", "--text", "words.txt"});
  ASSERT_EQ(exit.code, 0) << exit.errors;
  EXPECT_EQ(nlohmann::json::parse(exit.output).at("precision").at("table"), "rl.trainer.forward");
}

TEST_F(CliEvaluate, a_result_is_not_lost_where_its_file_cannot_be_written) {
  const Exit exit =
      look({"evaluate", "--checkpoint", "run", "--text", "words.txt", "--out", "no folder/result.json"});
  EXPECT_EQ(exit.code, 73) << exit.errors;
  EXPECT_EQ(nlohmann::json::parse(exit.output).at("kind"), "evaluation");
}

TEST_F(CliEvaluate, runs_are_reported_beside_each_other) {
  EXPECT_ANSWER(look({"report", "run", "run", "--out", "both.html"}), 0, "both.html");
  EXPECT_NE(read_text(*done_ / "both.html").find("B tiny (run)"), std::string::npos);
  EXPECT_ANSWER(look({"report", "run", "nowhere", "--out", "both.html"}), 66, "nowhere/metrics.jsonl");
  EXPECT_ANSWER(look({"report", "run", "--out", "none/one.html"}), 73, "none/one.html");
  EXPECT_ANSWER(look({"report"}), 2, "dir");
}

TEST_F(CliEvaluate, a_place_for_prometheus_that_cannot_be_written_is_refused_before_anything_is_made) {
  fs::create_directory(folder_ / "taken");
  const auto with = [&](const std::string& path) {
    return run({"--config", "recipe.yaml", "--set", "run.prometheus=" + path});
  };
  EXPECT_ANSWER(with("none/run.prom"), 73,
                "run.prometheus: cannot write none/run.prom: No such file or directory");
  EXPECT_FALSE(fs::exists(run_));
  EXPECT_ANSWER(with("taken"), 73, "run.prometheus: cannot write taken: Is a directory");
  EXPECT_FALSE(fs::exists(run_));
  EXPECT_FALSE(fs::exists(folder_ / "taken.tmp"));
  EXPECT_ANSWER(with("run/run.prom"), 0, "done in");  // in the folder that the run makes
  EXPECT_NE(read_text(run_ + "/run.prom").find("fp4train_loss"), std::string::npos);
}

TEST_F(CliEvaluate, tokens_in_no_file_are_told) {
  EXPECT_ANSWER(look({"logits", "--checkpoint", "run", "--tokens", ".", "--to", "l"}), 65,
                ". is no regular file");
}

TEST_F(CliEvaluate, prometheus_is_told_of_every_step_and_left_out_of_the_checkpoint) {
  EXPECT_ANSWER(run({"--config", "recipe.yaml", "--set", "run.prometheus=run.prom"}), 0, "done in");
  const std::string text = read_text(folder_ / "run.prom");
  for (const char* line :
       {"# TYPE fp4train_loss gauge\n", "fp4train_steps_total{run=\"tiny\",stage=\"pretrain\"} 4\n",
        "fp4train_steps_total{run=\"tiny\",stage=\"rl\"} 2\n",
        "fp4train_eval_loss{run=\"tiny\",stage=\"rl\",of=\"words\"} "}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  }
  EXPECT_EQ(summary_of(run_).at("content_hash"), summary_of(*done_ / "run").at("content_hash"));
  EXPECT_EQ(stored_bytes_of(latest_checkpoint_of(run_)),
            stored_bytes_of(latest_checkpoint_of(*done_ / "run")));
}

}  // namespace
}  // namespace fp4t::test
