// Matchers of precision rules as data: text of the recipe to sets of modules, layers and steps. All
// arithmetic is on integers, so that "15%" of 20 layers is 3 on every machine.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/plan/modules.h"

namespace fp4t {

// Half-open.
struct Range {
  int64_t begin = 0, end = 0;
  bool contains(int64_t i) const { return i >= begin && i < end; }
};

// The texts are those of engine/recipe/tables.h; a share of the layers is rounded up. On text that is none,
// and for layers that the model lacks, returns nothing and `problem` says what is wrong.
std::optional<Range> match_layers(const std::string& text, int64_t layers, std::string* problem);

// Percents of `percent_steps` are rounded down, 100% is the end of the stage whatever its length; clipped to
// [0, steps).
std::optional<Range> match_steps(const std::string& text, int64_t steps, int64_t percent_steps,
                                 std::string* problem);

// Globs over module names: `*` any characters, dots too, `?` one. Patterns with either match GEMM modules
// alone; embed, kv_cache and dispatch must be named. No patterns: every GEMM module.
std::optional<std::array<bool, kNumModules>> match_modules(const std::vector<std::string>& patterns,
                                                           std::string* problem);

// A rule with its matchers resolved for one model and one number of steps.
struct MatchedRule {
  const RuleSpec* rule = nullptr;
  std::array<bool, kNumModules> modules{};
  std::optional<Range> layers;  // given: modules outside the layers do not match
  Range steps;
  std::optional<GemmRole> gemm;
  std::optional<OperandRole> operand;

  bool matches(Module m, int64_t layer, GemmRole g, OperandRole o) const {
    return modules[static_cast<size_t>(m)] && (!layers || (in_layers(m) && layers->contains(layer))) &&
           (!gemm || *gemm == g) && (!operand || *operand == o);
  }
};

// What is wrong with the value of one key of a rule.
struct RuleProblem {
  const char* key;
  std::string message;
};

// Appends what is wrong with the rule's matchers to `problems`.
MatchedRule match_rule(const RuleSpec& rule, const ModelSpec& model, const StageShape& stage,
                       std::vector<RuleProblem>& problems);

// The largest step that a rule names in absolute numbers; 0 when none.
int64_t largest_named_step(const RuleSpec& rule);

}  // namespace fp4t
