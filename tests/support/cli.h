// What tests of the commands from the outside start from: a small recipe with both stages, a finished run of
// it, and what they say of a command's answer.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/runs.h"

namespace fp4t::test {

inline const std::string kStages = R"(stages:
  - pretrain:
      steps: 4
      batch: {tokens: 64, micro_sequences: 2, length: 32}
      data: [{name: words, kind: text, paths: text, separator: "%", held_out: {fraction: 0.1, seed: 7}}]
      eval: {tokens: 64}
      checkpoint: {every: 2}
  - rl:
      steps: 2
      task: {kind: sums, low: 0, high: 4}
      sampling: {prompts: 2, samples: 2, max_tokens: 3}
      objective: {drop_zero_advantage: false}
      eval: {tokens: 64}
)";
inline const std::string kRecipe = std::string(kTinyModel) + kStages;

// A folder with a finished run, shared by the tests that only look, and one of the test's own.
class Cli : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    done_ = new ScratchFolder;
    write_inputs(done_->path(), kRecipe);
    train(done_->path());
  }
  static void TearDownTestSuite() {
    delete done_;
    done_ = nullptr;
  }
  void SetUp() override { write_inputs(folder_.path(), kRecipe); }

  Exit run(const std::vector<std::string>& args) { return run_binary(folder_.path(), args); }
  Exit look(const std::vector<std::string>& args) { return run_binary(done_->path(), args); }
  Exit validate(const std::string& text) {
    write_text(folder_ / "recipe.yaml", text);
    return run({"validate", "--config", "recipe.yaml"});
  }
  // A copy of the finished run to go on with.
  void copy_done() {
    std::filesystem::copy(
        *done_ / "run", run_,
        std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  }
  Exit go_on(const std::vector<std::string>& more) { return run_binary(folder_.path(), train_args(more)); }

  inline static ScratchFolder* done_ = nullptr;
  ScratchFolder folder_;
  std::string run_ = folder_ / "run";
};

inline std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  const size_t begin = text.rfind('\n', end);
  return text.substr(begin == std::string::npos ? 0 : begin + 1, end - begin);
}

#define EXPECT_ANSWER(exit, expected_code, words)                               \
  do {                                                                          \
    const Exit& answer_ = (exit);                                               \
    EXPECT_EQ(answer_.code, expected_code) << answer_.errors << answer_.output; \
    EXPECT_NE((answer_.errors + answer_.output).find(words), std::string::npos) \
        << "no '" << words << "' in\n"                                          \
        << answer_.errors << answer_.output;                                    \
  } while (false)

}  // namespace fp4t::test
