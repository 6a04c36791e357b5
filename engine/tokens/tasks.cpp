#include "engine/tokens/tasks.h"

#include <string_view>

#include "engine/tokens/chat.h"
#include "engine/tokens/conversation.h"
#include "engine/tokens/generated_tasks.h"
#include "engine/tokens/tokenizer.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

std::unique_ptr<Task> make_task(const TaskSpec& spec) {
  std::unique_ptr<Task> task;
  if (spec.kind == "sums") task = make_sums(spec);
  if (spec.kind == "countdown") task = make_countdown(spec);
  if (spec.kind == "jsonl") task = make_jsonl_task(spec);
  if (!task) {
    throw RecipeError("task.kind: '" + printable(spec.kind) +
                      "' is not known; allowed are sums, countdown, jsonl");
  }
  const std::string difference = held_out_difference(*task, spec.held_out);
  if (!difference.empty()) throw BadDataError("held_out.hash: " + difference);
  return task;
}

std::string prompt_text(const TaskSpec& spec, const Problem& problem) {
  if (spec.kind != "jsonl" || problem.conversation) return problem.prompt;
  constexpr std::string_view kPlace = "{prompt}";
  std::string text;
  size_t from = 0;
  for (size_t at; (at = spec.prompt_template.find(kPlace, from)) != std::string::npos;
       from = at + kPlace.size()) {
    text += spec.prompt_template.substr(from, at - from) + problem.prompt;
  }
  return text + spec.prompt_template.substr(from);
}

std::vector<int32_t> prompt_tokens(const TaskSpec& spec, const Tokenizer& tokenizer, const Problem& problem) {
  if (problem.conversation) {
    if (tokenizer.chat().empty()) {
      throw BadDataError("a prompt of messages, which needs a form of conversations (tokenizer.chat)");
    }
    return Chat(tokenizer.chat(), tokenizer).tokens(read_conversation(problem.prompt), true);
  }
  const std::string text = prompt_text(spec, problem);
  if (tokenizer.chat().empty()) return tokenizer.prompt(text);
  return Chat(tokenizer.chat(), tokenizer).tokens({{"user", text}}, true);
}

TaskSpec task_of(const DataSourceSpec& source) {
  TaskSpec task;
  task.kind = source.kind;
  task.low = source.low;
  task.high = source.high;
  task.numbers = source.numbers;
  task.held_out = source.held_out;
  return task;
}

std::string held_out_difference(const Task& task, const HeldOutSpec& spec) {
  const std::string found = task.held_out_hash();
  if (spec.hash.empty() || spec.hash == found) return "";
  return detail::concat("the recipe says ", spec.hash, ", the held-out ", task.name(), " have ", found,
                        "; the split is not the one that was meant");
}

}  // namespace fp4t
