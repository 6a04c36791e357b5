// The command line itself: words that are not known, options in the wrong place, numbers out of range, and
// inputs that are looked for before anything begins.
#include <filesystem>

#include "kernels/base/text.h"
#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

const std::string kRecipe = std::string(kTinyModel) + R"(stages:
  - pretrain:
      steps: 1
      batch: {tokens: 64, micro_sequences: 2, length: 32}
      data: [{name: words, kind: text, paths: text, separator: "%"}]
  - pretrain:
      name: later
      steps: 1
      batch: {tokens: 64, micro_sequences: 2, length: 32}
      data: [{name: words, kind: text, paths: text, separator: "%"}]
)";

class CliOptions : public ::testing::Test {
 protected:
  void SetUp() override { write_inputs(folder_.path(), kRecipe); }
  Exit run(const std::vector<std::string>& args) { return run_binary(folder_.path(), args); }
  // Exit code and every word, on stderr.
  void expect_refused(const std::vector<std::string>& args, int code, const std::vector<std::string>& words) {
    const Exit exit = run(args);
    EXPECT_EQ(exit.code, code) << exit.errors;
    for (const std::string& word : words) {
      EXPECT_NE(exit.errors.find(word), std::string::npos) << "no '" << word << "' in\n" << exit.errors;
    }
  }
  ScratchFolder folder_;
};

TEST_F(CliOptions, unknown_words_get_the_nearest) {
  expect_refused({"validat"}, 2, {"unexpected validat", "did you mean validate?"});
  expect_refused({"--confg", "recipe.yaml"}, 2, {"did you mean --config?"});
  expect_refused({"inspect", "run", "--verfy"}, 2, {"did you mean --verify?"});
  expect_refused({"--config", "recipe.yaml", "run.seed=3"}, 2, {"--set run.seed=3"});
  expect_refused({"help"}, 2, {"--help"});
  expect_refused({"validate", "plan", "--config", "recipe.yaml"}, 2, {"plan"});
  expect_refused({"plan", "--config", "recipe.yaml", "--ranks", "1.5"}, 2,
                 {"--ranks: found 1.5 (not a whole number); allowed: a whole number from 1 to 100000"});
  expect_refused({"plan", "--config", "recipe.yaml", "validate"}, 2, {"validate"});
}

TEST_F(CliOptions, options_before_a_command_are_not_lost) {
  for (const char* command : {"validate", "plan", "print-config"}) {
    expect_refused({"--config", "recipe.yaml", command}, 2, {"--config before the command", command});
    expect_refused({"--set", "run.seed=3", command, "--config", "recipe.yaml"}, 2,
                   {"--set before the command"});
    expect_refused({command}, 2, {"--config is missing"});
  }
  expect_refused({"--dry-run", "schema"}, 2, {"--dry-run before the command schema"});
  expect_refused({"--accept-changes", "inspect", "run"}, 2, {"--accept-changes before the command inspect"});
}

// As an unset variable leaves it.
TEST_F(CliOptions, an_empty_name_is_not_no_name) {
  const std::vector<std::string> generate = {"generate", "--checkpoint", "x", "--prompt", "a"},
                                 evaluate = {"evaluate", "--checkpoint", "x", "--text", "text"},
                                 tokenize = {"tokenize", "--tokenizer", "bytes", "--in",
                                             "text",     "--out",       "t"},
                                 exported = {"export", "--checkpoint", "x", "--to", "y"};
  const std::pair<std::vector<std::string>, std::vector<std::string>> commands[] = {
      {{}, {"--config"}},
      {{"validate"}, {"--config"}},
      {{"plan", "--config", "recipe.yaml"}, {"--machine"}},
      {{"inspect"}, {""}},
      {{"report"}, {""}},
      {{"report", "run"}, {"--out"}},
      {{"selfcheck"}, {"--golden"}},
      {{"import", "--to", "y"}, {"--from"}},
      {generate, {"--tokenizer"}},
      {{"generate", "--prompt", "a"}, {"--checkpoint"}},
      {evaluate, {"--tokenizer", "--field", "--choices", "--prompts", "--out"}},
      {{"evaluate", "--checkpoint", "x"}, {"--text"}},
      {{"evaluate", "--text", "text"}, {"--checkpoint"}},
      {tokenize, {"--field"}},
      {{"tokenize", "--tokenizer", "bytes", "--in", "text"}, {"--out"}},
      {{"tokenize", "--tokenizer", "bytes", "--out", "t"}, {"--in"}},
      {{"tokenize", "--in", "text", "--out", "t"}, {"--tokenizer", "--config"}},
      {exported, {"--preset", "--tokenizer", "--calibrate"}},
      {{"logits", "--checkpoint", "x", "--to", "y"}, {"--tokens"}}};
  for (const auto& [command, options] : commands) {
    for (const std::string& option : options) {
      std::vector<std::string> args = command;
      if (!option.empty()) args.push_back(option);
      args.push_back("");
      expect_refused(args, 2,
                     {(option.empty() ? "dir" : option) + ": found an empty text, which names nothing"});
    }
  }
  expect_refused({"tokenize", "--tokenizer", "bytes", "--in", "text", "--out", "t", "--set", "run.seed=1"}, 2,
                 {"--set has no effect without --config"});
  EXPECT_FALSE(fs::exists(folder_ / "t.bin"));
}

TEST_F(CliOptions, numbers_of_generate_are_checked) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> bad = {
      {"--max-tokens", {"0", "-1", "1e99", "9223372036854775807", "x", "nan", "1.5"}},
      {"--samples", {"0", "1e12", "1000001"}},
      {"--temperature", {"nan", "inf", "-1", "1e-300", "1e300"}},
      {"--top-p", {"0", "nan", "1.5", "1e-9"}},
      {"--seed", {"-1", "99999999999999999999", "1.5"}}};
  for (const auto& [option, values] : bad) {
    for (const std::string& value : values) {
      expect_refused({"generate", "--checkpoint", "run", "--prompt", "a", option, value}, 2, {option, value});
    }
  }
  // Good numbers go on to the next complaint: there is no checkpoint.
  for (const auto& [option, value] :
       std::vector<std::pair<std::string, std::string>>{{"--temperature", "0"},
                                                        {"--max-tokens", "1e3"},
                                                        {"--samples", "1_0"},
                                                        {"--temperature", "0.7"},
                                                        {"--top-p", "1"},
                                                        {"--seed", "18446744073709551615"}}) {
    expect_refused({"generate", "--checkpoint", "run", "--prompt", "a", option, value}, 66, {"run"});
  }
}

TEST_F(CliOptions, every_refusal_begins_with_the_programs_name) {
  const std::vector<std::vector<std::string>> lines = {
      {"generate", "--checkpoint", "x", "--prompt", "a", "--samples", "0"},
      {"generate", "--checkpoint", "x"},
      {"--config"},
      {"selfcheck", "--golden", "x", "--device", "tpu"},
      {"train"}};
  for (const auto& line : lines) {
    const Exit exit = run(line);
    EXPECT_EQ(exit.code, 2) << exit.errors;
    EXPECT_TRUE(exit.errors.starts_with("fp4train: ")) << exit.errors;
  }
}

// What is quoted neither moves the terminal's text nor looks like a line of its own.
TEST_F(CliOptions, quoted_arguments_files_and_recipes_are_printable) {
  const std::string evil = "no\nfp4train: all is well\x1b[2J\xff";
  const std::string shown = "no\\nfp4train: all is well\\x1b[2J\\xff";
  write_text(folder_ / "a\x1b[2J.yaml", "run: {\"\\e[2J\": 1}\n");
  fs::create_directory(folder_ / evil);
  const struct {
    std::vector<std::string> args;
    std::string word;
  } cases[] = {
      {{evil}, shown},
      {{"--" + evil}, shown},
      {{"validate", "--config", evil + ".yaml"}, shown + ".yaml"},
      {{"validate", "--config", evil}, "it is a folder"},
      {{"validate", "--config", "a\x1b[2J.yaml"}, "a\\x1b[2J.yaml:1:7: run.\\x1b[2J: unknown key"},
      {{"validate", "--config", "recipe.yaml", "--set", evil}, shown},
      {{"validate", "--config", "recipe.yaml", "--set", "run." + evil + "=1"}, shown},
      {{"validate", "--config", "recipe.yaml", "--set", "run.device=\x1b"}, "\\x1b"},
      {{"validate", "--config", "recipe.yaml", "--set", "stages[0].pretrain.data[0].paths=\"a\\e\\n\""},
       "a\\x1b\\n"},
      {{"--config", "recipe.yaml", "--set", "run.dir=\"text/words.txt/\\e\""}, "text/words.txt/\\x1b"},
      {{"inspect", evil}, shown},
      {{"generate", "--checkpoint", evil, "--prompt", "a"}, shown},
      {{"generate", "--checkpoint", "run", "--prompt", "a", "--seed", "\x1b"}, "\\x1b"},
      {{"report", evil + "/x"}, shown},
      {{"selfcheck", "--golden", evil}, shown}};
  for (const auto& c : cases) {
    const Exit exit = run(c.args);
    EXPECT_NE(exit.code, 0) << c.word;
    EXPECT_NE(exit.errors.find(c.word), std::string::npos) << "no '" << c.word << "' in\n"
                                                           << printable_lines(exit.errors);
    EXPECT_EQ(printable_lines(exit.errors + exit.output), exit.errors + exit.output);
    EXPECT_EQ(exit.errors.find("\nfp4train: all"), std::string::npos) << exit.errors;
  }
}

TEST_F(CliOptions, inputs_of_later_stages_are_missed_before_the_first_begins) {
  const std::vector<std::string> gone = {"--set", "stages[1].pretrain.data[0].paths=gone/*.txt"};
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"validate", "--config", "recipe.yaml"},
        std::vector<std::string>{"--config", "recipe.yaml"}}) {
    std::vector<std::string> args = command;
    args.insert(args.end(), gone.begin(), gone.end());
    expect_refused(args, 66, {"stages[1].pretrain.data[0].paths", "gone/*.txt"});
  }
  EXPECT_FALSE(fs::exists(folder_ / "run"));
  // What a recipe would do can be asked where its data is not.
  EXPECT_EQ(run({"plan", "--config", "recipe.yaml", gone[0], gone[1]}).code, 0);
}

TEST_F(CliOptions, wrong_inputs_of_later_stages_are_found_before_the_first_begins) {
  fs::create_directory(folder_ / "bad");
  const std::string task =
      "{kind: sums, low: 0, high: 4, held_out: {fraction: 0.3, seed: 1, hash: 0011223344556677}}";
  const struct {
    std::string set, bad_text;
    std::vector<std::string> words;
  } cases[] = {
      {"stages[1]={rl: {steps: 1, task: " + task + "}}",
       "",
       {"stages[1].rl.task.held_out.hash", "0011223344556677"}},
      {"stages[1].pretrain.eval.task=" + task, "", {"stages[1].pretrain.eval.task.held_out.hash"}},
      {"stages[1].pretrain.data[0]={kind: sums, name: s, low: 0, high: 4, held_out: {fraction: 0.3, hash: "
       "0a1b2c3d4e5f6071}}",
       "",
       {"stages[1].pretrain.data[0].held_out.hash", "0a1b2c3d4e5f6071"}},
      {"stages[1].pretrain.data[0].paths=bad",
       "",
       {"stages[1].pretrain.data[0]: ", "holds no document", "bad/"}},
      {"stages[1].pretrain.data[0].paths=bad", std::string("a\n\0", 3), {"bad/words.txt:2: ", "NUL"}},
      {"stages[1].pretrain.data[0].held_out.fraction=0.999999999",
       "",
       {"data[0].held_out", "every document"}}};
  for (const auto& c : cases) {
    write_text(folder_ / "bad/words.txt", c.bad_text);
    expect_refused({"validate", "--config", "recipe.yaml", "--set", c.set}, 65, c.words);
    expect_refused({"--config", "recipe.yaml", "--set", c.set}, 65, c.words);
    EXPECT_FALSE(fs::exists(folder_ / "run")) << c.set;
  }
  // In the file itself, the line is named as well.
  write_text(folder_ / "recipe.yaml", kRecipe + "      eval:\n        task: " + task + "\n");
  expect_refused({"validate", "--config", "recipe.yaml"}, 65,
                 {"fp4train: recipe.yaml:21:", ": stages[1].pretrain.eval.task.held_out.hash: "});
}

// The binary under a shell: `how` has "$0" "$@" for the command line.
Exit run_under(const std::string& folder, const std::string& how, std::vector<std::string> args) {
  args.insert(args.begin(), {"/bin/sh", "-c", how, from_environment("FP4T_TEST_BINARY")});
  return Process(folder, Command{args}).wait();
}

TEST_F(CliOptions, output_that_cannot_be_written_is_a_failure) {
  const std::vector<std::vector<std::string>> commands = {{"schema"},
                                                          {"plan", "--config", "recipe.yaml"},
                                                          {"--config", "recipe.yaml", "--dry-run"},
                                                          {"print-config", "--config", "recipe.yaml"},
                                                          {"validate", "--config", "recipe.yaml"},
                                                          {"--version"},
                                                          {"--help"}};
  for (const auto& args : commands) {
    const Exit exit = run_under(folder_.path(), "exec \"$0\" \"$@\" > /dev/full", args);
    EXPECT_EQ(exit.code, 73) << args[0] << exit.errors;
    EXPECT_NE(exit.errors.find("fp4train: cannot write the output: "), std::string::npos) << exit.errors;
  }
  // A run is not for the screen.
  EXPECT_EQ(run_under(folder_.path(), "exec \"$0\" \"$@\" > /dev/full", {"--config", "recipe.yaml"}).code, 0);
  // Neither does it need a reader: `fp4train ... | head`.
  run_under(folder_.path(), "{ \"$0\" \"$@\"; echo $? > code; } | true",
            {"--config", "recipe.yaml", "--set", "run.dir=unread"});
  EXPECT_EQ(read_text(folder_ / "code"), "0\n");
  for (const auto& args : {std::vector<std::string>{"generate", "--checkpoint", "run", "--prompt", "a"},
                           {"inspect", "run"},
                           {"report", "run"}}) {
    EXPECT_EQ(run(args).code, 0);
    EXPECT_EQ(run_under(folder_.path(), "exec \"$0\" \"$@\" > /dev/full", args).code, 73) << args[0];
  }
}

TEST_F(CliOptions, why_a_recipe_cannot_be_read_is_told) {
  fs::create_symlink("round.yaml", folder_ / "round.yaml");
  expect_refused({"validate", "--config", "round.yaml"}, 66, {"round.yaml: ", "Too many levels"});
  expect_refused({"validate", "--config", "nowhere.yaml"}, 66, {"nowhere.yaml: ", "No such file"});
  expect_refused({"validate", "--config", "text"}, 66, {"text: ", "it is a folder"});
  expect_refused({"validate", "--config", std::string(5000, 'x')}, 66, {"too long"});
}

#if !defined(__SANITIZE_ADDRESS__)  // its shadow memory does not fit under the limit
TEST_F(CliOptions, too_little_memory_is_told_with_the_keys_that_need_less) {
  const std::string limited = "ulimit -v 1000000 && exec \"$0\" \"$@\"";
  const std::vector<std::string> train = {"--config", "recipe.yaml", "--set", "run.device=cpu"};
  ASSERT_EQ(run_under(folder_.path(), limited, train).code, 0);
  fs::remove_all(folder_ / "run");
  // Fits into the machine, as the plan sees it, and not into what it gives.
  std::vector<std::string> wide = train;
  wide.insert(wide.end(), {"--set", "model.hidden=2048", "--set", "model.moe.hidden=2048"});
  ASSERT_EQ(run_under(folder_.path(), "exec \"$0\" validate \"$@\"", wide).code, 0);
  const Exit refused = run_under(folder_.path(), limited, wide);
  EXPECT_EQ(refused.code, 2) << refused.errors;
  // A file of data alone can be too much.
  write_text(folder_ / "text/words.txt", "words\n");
  fs::resize_file(folder_ / "text/words.txt", uint64_t{2} << 30);
  const Exit too_large = run_under(folder_.path(), limited, {"validate", "--config", "recipe.yaml"});
  EXPECT_EQ(too_large.code, 2) << too_large.errors;
  EXPECT_TRUE(refused.errors.starts_with("fp4train: recipe.yaml:9:")) << refused.errors;
  for (const Exit& exit : {refused, too_large}) {
    for (const char* word : {"out of memory: ", "batch.micro_sequences", "parallel.recompute"}) {
      EXPECT_NE(exit.errors.find(word), std::string::npos) << word << " in\n" << exit.errors;
    }
  }
}
#endif

TEST_F(CliOptions, a_vocabulary_wider_than_the_tokens_samples_and_trains) {
  write_text(folder_ / "recipe.yaml", std::string(kTinyModel) + R"(stages:
  - rl:
      steps: 2
      task: {kind: sums, low: 0, high: 4, held_out: &split {fraction: 0.3, seed: 1}}
      sampling: {prompts: 8, samples: 8, max_tokens: 6}
      objective: {drop_zero_advantage: false}
      eval: {task: {kind: sums, low: 0, high: 4, held_out: *split}, prompts: ["1+1="], max_tokens: 8}
)");
  const Exit exit = run({"--config", "recipe.yaml", "--set", "model.vocabulary=4000"});
  EXPECT_EQ(exit.code, 0) << exit.errors;
}

TEST_F(CliOptions, more_threads_than_there_are_is_an_answer) {
  expect_refused({"validate", "--config", "recipe.yaml", "--set", "run.threads=1e9"}, 2,
                 {"run.threads", "1024"});
}

}  // namespace
}  // namespace fp4t::test
