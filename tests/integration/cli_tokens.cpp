// Vocabularies and files of tokens, from the outside.
#include <filesystem>

#include "engine/stage/generate.h"
#include "engine/tokens/utf8.h"
#include "tests/support/cli.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

// A small vocabulary of the style of Llama 3, which puts a token in front of texts.
std::string recipe_with(const std::string& tokenizer) {
  return std::string(kTinyModel) + "tokenizer: {kind: json, path: " + tokenizer + "}\n" + R"(stages:
  - pretrain:
      steps: 2
      batch: {tokens: 64, micro_sequences: 2, length: 32}
      data: [{name: words, kind: text, paths: text, separator: "%", held_out: {fraction: 0.1, seed: 7}}]
      eval: {tokens: 64, prompts: ["caf\u00e9 \U0001F642"], max_tokens: 3}
  - rl:
      steps: 1
      task: {kind: sums, low: 0, high: 4}
      sampling: {prompts: 2, samples: 2, max_tokens: 3, end_tokens: ["<|end_of_text|>", "\n"]}
      objective: {drop_zero_advantage: false}
)";
}

class CliTokens : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::copy_file(from_environment("FP4T_TEST_SOURCE") + "/tests/golden/tokenizers/llama3.json",
                  folder_ / "t.json");
    write_inputs(folder_.path(), recipe_with("t.json"));
  }
  Exit run(const std::vector<std::string>& args) { return run_binary(folder_.path(), args); }
  Exit validate() { return run({"validate", "--config", "recipe.yaml"}); }

  ScratchFolder folder_;
};

TEST_F(CliTokens, a_run_with_a_vocabulary_file_trains_and_generates) {
  const Exit config = run({"print-config", "--config", "recipe.yaml"});
  EXPECT_ANSWER(config, 0, "begin_of_document: \"<|begin_of_text|>\"");
  EXPECT_ANSWER(config, 0, "end_of_document: \"<|end_of_text|>\"");
  EXPECT_ANSWER(config, 0, "vocabulary: 424");
  train(folder_.path());
  const std::vector<std::string> generate = {"generate", "--checkpoint", "run", "--prompt",
                                             "the cat",  "--max-tokens", "5"};
  const Exit text = run(generate);
  EXPECT_ANSWER(text, 0, "the cat");
  // As it is drawn, in whole characters.
  TextRequest request;
  request.checkpoint = folder_ / "run";
  request.tokenizer = folder_ / "t.json";
  request.prompt = "the cat";
  request.max_tokens = 20;
  request.samples = 2;
  std::vector<std::string> pieces;
  request.stream = [&](const std::string& piece) { pieces.push_back(piece); };
  const std::string first = generate_text(request)[0];
  std::string streamed;
  for (const std::string& piece : pieces) {
    EXPECT_TRUE(is_well_formed(piece)) << piece;
    streamed += piece;
  }
  EXPECT_EQ(streamed, first);
  EXPECT_GT(pieces.size(), 3u);
  // The checkpoint knows the vocabulary by its hash: the file may move, and may not change.
  fs::rename(folder_ / "t.json", folder_ / "moved.json");
  EXPECT_ANSWER(run(generate), 66,
                "t.json: No such file or directory; --tokenizer FILE says where it is now");
  std::vector<std::string> with_file = generate;
  with_file.insert(with_file.end(), {"--tokenizer", "moved.json"});
  const Exit moved = run(with_file);
  EXPECT_ANSWER(moved, 0, text.output);
  fs::create_directory(folder_ / "a #1: \u00e9");
  fs::copy_file(folder_ / "moved.json", folder_ / "a #1: \u00e9/t.json");
  std::vector<std::string> with_odd_name = generate;
  with_odd_name.insert(with_odd_name.end(), {"--tokenizer", "a #1: \u00e9/t.json"});
  EXPECT_ANSWER(run(with_odd_name), 0, text.output);
  EXPECT_ANSWER(run_binary(folder_.path(), train_args({"--set", "tokenizer.path=moved.json"})), 0,
                "already done");
  std::string file = read_text(folder_ / "moved.json");
  file.replace(file.find("\"ignore_merges\":true"), 20, "\"ignore_merges\":false");
  write_text(folder_ / "moved.json", file);
  EXPECT_ANSWER(run(with_file), 65, "another tokenizer");
  const Exit resumed = run_binary(folder_.path(), train_args({"--set", "tokenizer.path=moved.json"}));
  EXPECT_ANSWER(resumed, 2, "tokenizer.hash");
}

TEST_F(CliTokens, what_a_vocabulary_file_lacks_is_told_with_the_place_of_its_key) {
  write_text(folder_ / "recipe.yaml", recipe_with("none.json"));
  EXPECT_ANSWER(validate(), 66, "recipe.yaml:10:31: tokenizer.path: cannot open none.json");
  write_text(folder_ / "t.json", "{\"model\": {\"type\": \"Unigram\"}}");
  write_text(folder_ / "recipe.yaml", recipe_with("t.json"));
  EXPECT_ANSWER(validate(), 65, "t.json: model.type: Unigram is not supported");
}

TEST_F(CliTokens, end_tokens_and_vocabulary_must_fit_the_file) {
  std::string text = recipe_with("t.json");
  text.replace(text.find("<|end_of_text|>"), 15, "two tokens here");
  write_text(folder_ / "recipe.yaml", text);
  EXPECT_ANSWER(validate(), 2, "stages[1].rl.sampling.end_tokens[0]: 'two tokens here' is");
  write_text(folder_ / "recipe.yaml", recipe_with("t.json"));
  EXPECT_ANSWER(run({"validate", "--config", "recipe.yaml", "--set", "model.vocabulary=300"}), 2,
                "model.vocabulary: 300 is less than the 424 tokens");
}

TEST_F(CliTokens, tokenised_files_train_as_their_text_does) {
  const Exit made =
      run({"tokenize", "--tokenizer", "t.json", "--in", "text", "--separator", "%", "--out", "words"});
  EXPECT_ANSWER(made, 0, "words.bin: ");
  train(folder_.path());
  std::string text = recipe_with("t.json");
  const std::string source = "kind: text, paths: text, separator: \"%\"";
  text.replace(text.find(source), source.size(), "kind: megatron, paths: words");
  write_text(folder_ / "recipe.yaml", text);
  train(folder_.path(), {"--set", "run.dir=run2"});
  const auto steps = [&](const char* dir) {
    std::vector<double> losses;
    for (const auto& line : metrics_of(folder_ / dir, "step", "pretrain"))
      losses.push_back(line["loss"].get<double>());
    return losses;
  };
  EXPECT_EQ(steps("run"), steps("run2"));
  EXPECT_EQ(steps("run").size(), 2u);
  // By the recipe, the same files; with another tokenizer they are refused.
  EXPECT_ANSWER(
      run({"tokenize", "--config", "recipe.yaml", "--in", "text", "--separator", "%", "--out", "again"}), 0,
      "");
  EXPECT_EQ(read_text(folder_ / "again.bin"), read_text(folder_ / "words.bin"));
  EXPECT_ANSWER(run({"validate", "--config", "recipe.yaml", "--set", "tokenizer={kind: bytes}", "--set",
                     "stages.1.rl.sampling.end_tokens=<eod>"}),
                65, "words.tokens.json: made with the tokenizer json-");
}

TEST_F(CliTokens, tokenize_refuses_what_it_cannot_do) {
  EXPECT_ANSWER(run({"tokenize", "--in", "text", "--out", "o"}), 2, "found neither");
  auto nameless = nlohmann::json::parse(read_text(folder_ / "t.json"));
  for (auto& token : nameless["added_tokens"]) {
    if (token["content"] == "<|end_of_text|>") token["content"] = "<|that was it|>";
  }
  write_text(folder_ / "nameless.json", nameless.dump());
  EXPECT_ANSWER(run({"tokenize", "--tokenizer", "nameless.json", "--in", "text", "--out", "o"}), 2,
                "tokenizer.end_of_document: missing, and nameless.json has no token with a usual name");
  EXPECT_ANSWER(run({"tokenize", "--tokenizer", "nameless.json", "--in", "text", "--out", "o"}), 2,
                "--config takes a recipe with such a key");
  EXPECT_ANSWER(run({"tokenize", "--tokenizer", "none", "--in", "text", "--out", "o"}), 66, "none");
  EXPECT_ANSWER(run({"tokenize", "--tokenizer", "t.json", "--in", "nowhere", "--out", "o"}), 66, "nowhere");
  EXPECT_ANSWER(run({"tokenize", "--tokenizer", "t.json", "--in", "text", "--out", "none/o"}), 73,
                "none/o.bin");
  EXPECT_ANSWER(run({"tokenize", "--tokenizer", "t.json", "--in", "text", "--out", "o", "--kind", "html"}), 2,
                "--kind");
  EXPECT_ANSWER(run({"tokenize", "--tokenizer", "t.json", "--in", "text", "--out", "o", "--field", "x"}), 2,
                "--field has no effect");
  EXPECT_ANSWER(run({"tokenize", "--tokenizer", "t.json", "--in", "text", "--out", "o", "--kind", "jsonl",
                     "--separator", "%"}),
                2, "--separator has no effect");
  EXPECT_ANSWER(run({"tokenize", "--tokenizer", "t.json", "--in", "text", "--out", "text/"}), 2,
                "names no file");
  EXPECT_ANSWER(run({"tokenize", "--tokenizer", "t.json", "--in", "text", "--out", ""}), 2,
                "--out: found an");
  EXPECT_FALSE(fs::exists(folder_ / ".bin"));
}

}  // namespace
}  // namespace fp4t::test
