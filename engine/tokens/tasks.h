// Problems with checkable answers: generated (sums and countdown), or rows of JSON lines. The split into
// training and held-out problems is a pure function of the task's own keys, shared by data, RL and
// evaluation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "kernels/base/philox.h"

namespace fp4t {

struct Problem {
  std::string prompt;         // "37+58="; of a conversation its messages (engine/tokens/conversation.h)
  std::string answer;         // "95": what a correct document continues with (of countdown, one answer)
  int64_t max_tokens = 0;     // of a completion; 0: as the recipe says
  bool conversation = false;  // several messages, which need tokenizer.chat
};

// What a verifier says of a completion.
enum class Verdict : uint8_t {
  kRight,
  kWrong,
  kUnverifiable,  // cannot be parsed as an answer; never counts as right, and is counted apart from wrong
};

class Task {
 public:
  virtual ~Task() = default;
  virtual std::string name() const = 0;
  // Training problem number i of an endless keyed stream (with repetition), never a held-out one.
  virtual Problem training(PhiloxKey key, int64_t i) const = 0;
  // All held-out problems, in a fixed order.
  virtual std::vector<Problem> held_out() const = 0;
  // XXH3 (16 hex digits) over the held-out list; compared with the recipe's.
  virtual std::string held_out_hash() const = 0;
  // Hash of all that decides problems, answers and split; of generated tasks that is their keys and the list.
  virtual std::string fingerprint() const { return held_out_hash(); }
  // Checks a completion, exactly and in bounded time; the completion excludes the prompt and includes the
  // text up to and without the end token. `finished` is false when it was cut at the length limit.
  virtual Verdict verify(const Problem& problem, const std::string& completion, bool finished) const = 0;
  // A whole document for pretraining: prompt, answer (wrong on purpose where `wrong`), newline.
  virtual std::string document(const Problem& problem, bool wrong, uint32_t bits) const = 0;
};

// Throws BadDataError when the recipe's held-out hash differs from the list's (both are named), or a row of a
// file is none (by file and line); MissingInputError when a file is not there.
std::unique_ptr<Task> make_task(const TaskSpec& spec);

class Tokenizer;
// What the model reads of a problem: its prompt in the task's template (a conversation's as it is), and that
// as tokens. The one place where prompts become tokens, in training and evaluation. Throws BadDataError for a
// conversation that the tokenizer has no form for.
std::string prompt_text(const TaskSpec& spec, const Problem& problem);
std::vector<int32_t> prompt_tokens(const TaskSpec& spec, const Tokenizer& tokenizer, const Problem& problem);
// Makes the tokens of every row of a jsonl task. Throws BadDataError naming file and line, of a prompt that
// is longer than max_prompt_tokens, too.
void check_rows(const TaskSpec& spec, const Tokenizer& tokenizer);
// What a source of generated problems draws from.
TaskSpec task_of(const DataSourceSpec& source);
// How the list differs from the one that the recipe means; "" when it does not.
std::string held_out_difference(const Task& task, const HeldOutSpec& spec);

}  // namespace fp4t
