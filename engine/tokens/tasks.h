// Problems with checkable answers, generated: sums and countdown. The split into training and held-out
// problems is a pure function of the task's own keys, shared by data, RL and evaluation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "kernels/base/philox.h"

namespace fp4t {

struct Problem {
  std::string prompt;  // "37+58="
  std::string answer;  // "95": what a correct document continues with (one of the answers for countdown)
};

// What a verifier says of a completion.
enum class Verdict : uint8_t {
  kRight,
  kWrong,
  kUnverifiable,  // cannot be parsed as an answer
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
  // Checks a completion, exactly and in bounded time; the completion excludes the prompt and includes the
  // text up to and without the end token. `finished` is false when it was cut at the length limit.
  virtual Verdict verify(const Problem& problem, const std::string& completion, bool finished) const = 0;
  // A whole document for pretraining: prompt, answer (wrong on purpose where `wrong`), newline.
  virtual std::string document(const Problem& problem, bool wrong, uint32_t bits) const = 0;
};

// Throws BadDataError when the recipe's held-out hash differs from the list's (both are named).
std::unique_ptr<Task> make_task(const TaskSpec& spec);
// What a source of generated problems draws from.
TaskSpec task_of(const DataSourceSpec& source);
// How the list differs from the one that the recipe means; "" when it does not.
std::string held_out_difference(const Task& task, const HeldOutSpec& spec);

}  // namespace fp4t
