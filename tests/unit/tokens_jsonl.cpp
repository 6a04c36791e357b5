// The task of JSON lines: rows, split, order, verdicts, and how damaged files are answered.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "engine/recipe/load.h"
#include "engine/tokens/inputs.h"
#include "engine/tokens/tasks.h"
#include "engine/tokens/tokenizer.h"
#include "kernels/base/check.h"
#include "tests/support/process.h"

namespace fp4t {
namespace {

class Jsonl : public ::testing::Test {
 protected:
  TaskSpec spec_of(const std::string& text) {
    test::write_text(folder_ / "rows.jsonl", text);
    TaskSpec spec;
    spec.kind = "jsonl";
    spec.paths = {folder_ / "rows.jsonl"};
    return spec;
  }
  TaskSpec many(int rows) {
    std::string text;
    for (int i = 0; i < rows; ++i) {
      text += "{\"prompt\": \"question " + std::to_string(i) + "\", \"answer\": " + std::to_string(i) + "}\n";
    }
    TaskSpec spec = spec_of(text);
    spec.held_out = {0.25, 3, ""};
    return spec;
  }
  std::string refusal(const std::string& text) {
    try {
      make_task(spec_of(text));
    } catch (const BadDataError& e) {
      return e.what();
    }
    ADD_FAILURE() << "accepted: " << text;
    return "";
  }
  test::ScratchFolder folder_;
};

TEST_F(Jsonl, rows_are_split_by_their_prompts_and_visited_once_a_pass) {
  const TaskSpec spec = many(200);
  const auto task = make_task(spec);
  std::set<std::string> held_out;
  for (const Problem& p : task->held_out()) held_out.insert(p.prompt);
  EXPECT_GT(held_out.size(), 30u);
  EXPECT_LT(held_out.size(), 70u);
  const auto left = static_cast<int64_t>(200 - held_out.size());
  std::vector<std::string> first, second;
  for (int64_t i = 0; i < left; ++i) first.push_back(task->training({1, 2}, i).prompt);
  for (int64_t i = left; i < 2 * left; ++i) second.push_back(task->training({1, 2}, i).prompt);
  EXPECT_NE(first, second);
  const std::set<std::string> seen(first.begin(), first.end());
  EXPECT_EQ(static_cast<int64_t>(seen.size()), left);
  EXPECT_EQ(seen, std::set<std::string>(second.begin(), second.end()));
  for (const std::string& p : seen) EXPECT_EQ(held_out.count(p), 0u) << p;
}

TEST_F(Jsonl, the_split_does_not_depend_on_places_and_equal_prompts_share_a_side) {
  const std::string a = "{\"prompt\": \"a\", \"answer\": \"1\"}\n",
                    b = "{\"prompt\": \"b\", \"answer\": \"2\"}\n";
  for (uint64_t seed = 0; seed < 20; ++seed) {
    TaskSpec spec = spec_of(a + b + a);
    spec.held_out = {0.5, seed, ""};
    std::unique_ptr<Task> task;
    try {
      task = make_task(spec);
    } catch (const BadDataError&) {
      continue;  // all or nothing held out
    }
    const size_t count = task->held_out().size();
    EXPECT_EQ(count, task->held_out()[0].prompt == "a" ? 2u : 1u);
    const std::string before = task->fingerprint();
    spec = spec_of(b + a + a);
    spec.held_out = {0.5, seed, ""};
    EXPECT_EQ(make_task(spec)->held_out().size(), count);
    EXPECT_NE(make_task(spec)->fingerprint(), before);  // other bytes
  }
}

TEST_F(Jsonl, its_hash_is_checked) {
  TaskSpec spec = many(50);
  spec.held_out.hash = make_task(spec)->held_out_hash();
  EXPECT_NO_THROW(make_task(spec));
  spec.held_out.seed = 4;
  EXPECT_THROW(make_task(spec), BadDataError);
}

TEST_F(Jsonl, wrong_and_unverifiable_are_told_apart) {
  TaskSpec spec = spec_of("{\"q\": \"2 apples and 3?\", \"solution\": \"2 + 3 = 5\\n#### 5\", \"n\": 7}\n");
  spec.prompt_field = "q";
  spec.answer_field = "solution";
  spec.limit_field = "n";
  spec.prompt_template = "Q: {prompt}\nA:";
  spec.answer.form = "boxed";
  spec.answer.gold = "hash";
  const auto task = make_task(spec);
  const Problem p = task->training({1, 1}, 0);
  EXPECT_EQ(p.answer, "5");
  EXPECT_EQ(p.max_tokens, 7);
  EXPECT_EQ(prompt_text(spec, p), "Q: 2 apples and 3?\nA:");
  EXPECT_EQ(task->verify(p, "so \\boxed{5.0} apples", true), Verdict::kRight);
  EXPECT_EQ(task->verify(p, "so \\boxed{6}", true), Verdict::kWrong);
  EXPECT_EQ(task->verify(p, "so \\boxed{5", true), Verdict::kUnverifiable);
  EXPECT_EQ(task->verify(p, "so \\boxed{x+1}", true), Verdict::kUnverifiable);
  EXPECT_EQ(task->verify(p, "5", true), Verdict::kUnverifiable);
  EXPECT_EQ(task->verify(p, "so \\boxed{5}", false), Verdict::kUnverifiable);
}

TEST_F(Jsonl, damaged_rows_are_named_by_file_and_line) {
  const std::string good = "{\"prompt\": \"a\", \"answer\": \"1\"}\n";
  const std::string at = folder_ / "rows.jsonl:3: ";
  EXPECT_EQ(refusal(good + "\n{\"prompt\": \"b\"}\n"), at + "no key 'answer'");
  EXPECT_EQ(refusal(good + "\n[1]\n"), at + "no object");
  EXPECT_EQ(refusal(good + "\n{\"prompt\": \"b\", \"answer\": 1, \"prompt\": \"c\"}\n"),
            at + "key 'prompt' twice");
  EXPECT_NO_THROW(
      make_task(spec_of("{\"prompt\": \"b\", \"answer\": 1, \"x\": {\"prompt\": \"prompt\"}}\n")));
  EXPECT_EQ(refusal(good + "\n{\"prompt\": 5, \"answer\": \"1\"}\n"),
            at + "'prompt' is neither a text nor a list of messages");
  EXPECT_EQ(refusal(good + "\n{\"prompt\": \"\", \"answer\": \"1\"}\n"), at + "'prompt' is empty");
  EXPECT_EQ(refusal(good + "\n{\"prompt\": [], \"answer\": \"1\"}\n"),
            at + "'prompt': a conversation without messages");
  TaskSpec framed = spec_of("{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"answer\": \"1\"}\n");
  EXPECT_NO_THROW(make_task(framed));
  framed.prompt_template = "Q: {prompt}";
  EXPECT_THROW(make_task(framed), BadDataError);
  EXPECT_NE(refusal(good + "\n{\"prompt\": \"b\", \"answer\": null}\n").find("neither a text nor a number"),
            std::string::npos);
  EXPECT_NE(refusal(good + "\n{\"prompt\": \"b\", \"answer\": \"two\"}\n")
                .find(at + "the answer 'two' is no number"),
            std::string::npos);
  EXPECT_EQ(refusal(good + "\n{broken\n").find(at), 0u);
  EXPECT_EQ(refusal("\n"), "the task's files hold no row");
}

// Under another name, or copied into another file.
TEST_F(Jsonl, rows_that_are_measured_are_not_trained_on_from_any_file) {
  const auto row = [](const std::string& prompt) {
    return "{\"prompt\": \"" + prompt + "\", \"answer\": 1}\n";
  };
  RlSpec rl;
  rl.task = spec_of(row("a") + row("b"));
  rl.eval.task = rl.task;
  rl.eval.task->held_out = {1.0, 0, ""};
  const auto refusal_of = [&](const std::vector<std::string>& paths) -> std::string {
    Recipe recipe;
    rl.eval.task->paths = paths;
    recipe.stages = {rl};
    try {
      check_inputs(recipe);
      return "";
    } catch (const BadDataError& e) {
      return e.what();
    }
  };
  EXPECT_EQ(
      refusal_of({folder_.path() + "/./rows.jsonl"}),
      "stages[0].rl.eval.task: 2 of 2 prompts that accuracy is measured on are trained on, too; the first: " +
          folder_.path() + "/./rows.jsonl:1, trained on from " + (folder_ / "rows.jsonl:1"));
  test::write_text(folder_ / "test.jsonl", row("c") + row("b"));
  EXPECT_NE(refusal_of({folder_ / "test.jsonl"}).find("1 of 2 prompts"), std::string::npos);
  EXPECT_NE(refusal_of({folder_ / "test.jsonl"}).find("test.jsonl:2, trained on from"), std::string::npos);
  test::write_text(folder_ / "test.jsonl", row("c") + row("d"));
  EXPECT_EQ(refusal_of({folder_ / "test.jsonl"}), "");
}

// Without a form for them, messages are no prompt; the row is named.
TEST_F(Jsonl, messages_need_a_form_of_conversations) {
  Recipe recipe;
  RlSpec rl;
  rl.task = spec_of(
      "{\"prompt\": \"a\", \"answer\": 1}\n"
      "{\"prompt\": [{\"role\": \"user\", \"content\": \"b\"}], \"answer\": 2}\n");
  recipe.stages = {rl};
  try {
    check_inputs(recipe);
    FAIL() << "accepted";
  } catch (const BadDataError& e) {
    EXPECT_EQ(std::string(e.what()),
              "stages[0].rl.task: " + folder_ /
                                          "rows.jsonl:2: a prompt of messages, which "
                                          "needs a form of conversations (tokenizer.chat)");
  }
}

// One conversation is one prompt, however it is written; a text is another one.
TEST_F(Jsonl, equal_conversations_are_on_one_side) {
  std::string text;
  for (int i = 0; i < 40; ++i) {
    const std::string n = std::to_string(i);
    text += R"({"prompt": [{"role": "user", "content": ")" + n + R"("}], "answer": 1})" + "\n";
    text += R"({"prompt": [ {"content": ")" + n + R"(", "role": "user"} ], "answer": 2})" + "\n";
  }
  TaskSpec spec = spec_of(text);
  spec.held_out = {0.5, 3, ""};
  const auto task = make_task(spec);
  std::map<std::string, int> held_out;
  for (const Problem& p : task->held_out()) {
    EXPECT_TRUE(p.conversation);
    ++held_out[p.prompt];
  }
  EXPECT_GT(held_out.size(), 5u);
  for (const auto& [prompt, count] : held_out) EXPECT_EQ(count, 2) << prompt;
}

TEST_F(Jsonl, inputs_are_checked_before_a_run) {
  const TaskSpec spec =
      spec_of("{\"prompt\": \"a\", \"answer\": 1}\n{\"prompt\": \"too long a prompt\", \"answer\": 2}\n");
  Recipe recipe;
  RlSpec rl;
  rl.task = spec;
  rl.task.max_prompt_tokens = 8;
  recipe.stages = {rl};
  try {
    check_inputs(recipe);
    FAIL() << "accepted";
  } catch (const BadDataError& e) {
    EXPECT_EQ(std::string(e.what()), "stages[0].rl.task: " + folder_ /
                                                                 "rows.jsonl:2: a prompt of 17 tokens; "
                                                                 "max_prompt_tokens is 8");
  }
  std::get<RlSpec>(recipe.stages[0]).task.paths = {folder_ / "absent.jsonl"};
  EXPECT_THROW(check_inputs(recipe), MissingInputError);
  std::get<RlSpec>(recipe.stages[0]).task = spec;
  std::get<RlSpec>(recipe.stages[0]).task.answer.form = "regex";
  std::get<RlSpec>(recipe.stages[0]).task.answer.pattern = "(";
  EXPECT_THROW(check_inputs(recipe), RecipeError);
}

}  // namespace
}  // namespace fp4t
