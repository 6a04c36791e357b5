// The reward of a completion: the sum of weight * part over a list of parts, in FP64 and list order.
//   verifier  1 when the task's verdict is "right", else 0
//   length    0 up to free_tokens, then falling in a line to -1 at sampling.max_tokens (the soft overlong
//             punishment of DAPO, arXiv 2503.14476 equation 13)
//   format    1 when a regular expression occurs in the completion, else 0; also 0, and counted, when the
//   search
//             gave up
//   process   what a program of the user's answers (engine/rl/scorer.h)
// Each rank rewards the completions that it sampled, with a process of its own: no rank waits for another
// one's texts, and programs work side by side.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/recipe/problems.h"
#include "engine/recipe/recipe.h"
#include "engine/tokens/tasks.h"

namespace fp4t {

// A completion as its judges see it.
struct Judged {
  int64_t id = 0;  // global sample number
  std::string prompt, completion, answer;
  int64_t tokens = 0;  // end token included
  bool finished = false;
  Verdict verdict = Verdict::kUnverifiable;
};

class RewardPart {
 public:
  virtual ~RewardPart() = default;
  virtual std::vector<float> score(const std::vector<Judged>& completions) = 0;
};

class Rewards {
 public:
  struct Outlets {
    std::function<void(const std::string&)> log;
    std::function<void()> wait;  // of a scorer's ScorerOptions
  };
  // `specs` empty: the verifier alone. Throws RecipeError for a pattern that is none.
  Rewards(std::vector<RewardSpec> specs, int64_t max_tokens, const Outlets& outlets);

  const std::vector<std::string>& names() const { return names_; }
  // [completion][part].
  std::vector<std::vector<float>> parts(const std::vector<Judged>& completions);
  float total(const std::vector<float>& parts) const;

 private:
  std::vector<RewardSpec> specs_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<RewardPart>> parts_;
};

// Names of the parts of a list, as Rewards has them.
std::vector<std::string> reward_names(const std::vector<RewardSpec>& specs);

// Whether the patterns and programs of all stages can be used: what would end the run where the stage begins,
// or later. Throws RecipeError with the place of each that cannot.
void check_rewards(const Recipe& recipe, const FieldPlaces& places);

}  // namespace fp4t
