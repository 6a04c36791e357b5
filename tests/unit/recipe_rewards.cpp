// Keys of tasks from rows, of rewards and of files of completions: what goes together and what does not.
#include "tests/unit/recipe_text.h"

namespace fp4t {
namespace {

using test::errors_of;
using test::with_rl;
using Set = std::vector<std::string>;

TEST(recipe_rewards, rows_have_keys_of_their_own) {
  const auto task = [](const std::string& body) { return Set{"stages[1].rl.task=" + body}; };
  EXPECT_EQ(errors_of(with_rl(), task("{kind: jsonl, paths: rows}")), "");
  EXPECT_REFUSED(with_rl(), task("{kind: jsonl}"), "task.paths: missing");
  EXPECT_REFUSED(with_rl(), task("{kind: jsonl, paths: []}"), "task.paths: found an empty list");
  EXPECT_REFUSED(with_rl(), task("{kind: jsonl, paths: rows, low: 1}"), "task.low",
                 "kind is sums or countdown");
  EXPECT_REFUSED(with_rl(), task("{kind: sums, paths: rows}"), "task.paths", "kind is jsonl");
  EXPECT_REFUSED(with_rl(), task("{kind: sums, answer: {form: hash}}"), "task.answer", "kind is jsonl");
  EXPECT_REFUSED(with_rl(), task("{kind: jsonl, paths: rows, template: \"Q:\"}"), "task.template",
                 "{prompt}");
  EXPECT_REFUSED(with_rl(), task("{kind: jsonl, paths: rows, max_prompt_tokens: 2048}"),
                 "max_prompt_tokens: found 2048", "less than model.max_positions (2048)");
  EXPECT_REFUSED(with_rl(), task("{kind: jsonl, paths: rows, answer: {form: regex}}"),
                 "answer.pattern: missing");
  EXPECT_REFUSED(with_rl(), task("{kind: jsonl, paths: rows, answer: {pattern: x}}"), "answer.pattern",
                 "form is regex");
  // One file, two splits: training would see what is held out.
  const std::string rl = "stages[1].rl.task={kind: jsonl, paths: rows, held_out: {fraction: 0.1, seed: 1}}";
  const auto eval = [](const std::string& path, int seed) {
    return "stages[1].rl.eval.task={kind: jsonl, paths: " + path +
           ", held_out: {fraction: 0.1, seed: " + std::to_string(seed) + "}}";
  };
  EXPECT_EQ(errors_of(with_rl(), {rl, eval("rows", 1)}), "");
  EXPECT_EQ(errors_of(with_rl(), {rl, eval("other", 2)}), "");
  EXPECT_REFUSED(with_rl(), (Set{rl, eval("rows", 2)}), "another split of jsonl",
                 "held_out.seed 1 there, 2 here");
}

TEST(recipe_rewards, parts_have_names_weights_and_keys_of_their_kind) {
  const auto rewards = [](const std::string& list) { return Set{"stages[1].rl.rewards=[" + list + "]"}; };
  EXPECT_EQ(errors_of(with_rl(), rewards("{kind: verifier}, {kind: process, command: judge}")), "");
  EXPECT_REFUSED(with_rl(), rewards(""), "rewards: found an empty list");
  EXPECT_REFUSED(with_rl(), rewards("{kind: verifier}, {kind: verifier, weight: 2}"),
                 "rewards[1].name: found verifier");
  EXPECT_REFUSED(with_rl(), rewards("{kind: verifier, weight: 0}"), "only parts of weight 0");
  EXPECT_REFUSED(with_rl(), rewards("{kind: length, free_tokens: 16}"), "free_tokens: found 16",
                 "less than sampling.max_tokens (16)");
  EXPECT_REFUSED(with_rl(), rewards("{kind: format}"), "pattern: missing");
  EXPECT_REFUSED(with_rl(), rewards("{kind: process}"), "command: missing");
  EXPECT_REFUSED(with_rl(), rewards("{kind: process, command: []}"), "command: found no program");
  EXPECT_REFUSED(with_rl(), rewards("{kind: verifier, command: judge}"), "command", "kind is process");
  EXPECT_REFUSED(with_rl(), rewards("{kind: verifer}"), "did you mean verifier");
}

TEST(recipe_rewards, completions_are_written_only_if_asked_for) {
  EXPECT_EQ(errors_of(with_rl(), {"stages[1].rl.rollouts={every: 5, keep: 3}"}), "");
  EXPECT_REFUSED(with_rl(), Set{"stages[1].rl.rollouts={keep: 3}"}, "rollouts.keep", "every is above 0");
}

}  // namespace
}  // namespace fp4t
