#include "engine/plan/match.h"

#include <algorithm>

#include "engine/recipe/tables.h"

namespace fp4t {

namespace {

// n * percent / 100, rounded down or up, exactly.
int64_t part_of(int64_t n, int64_t millionths, bool up) {
  const __int128 product = static_cast<__int128>(n) * millionths;
  return static_cast<int64_t>((product + (up ? kWholePercent - 1 : 0)) / kWholePercent);
}

}  // namespace

std::optional<Range> match_layers(const std::string& text, int64_t layers, std::string* problem) {
  const std::optional<LayersMatcher> m = read_layers(text, problem);
  if (!m) return std::nullopt;
  const int64_t count = m->is_percent ? part_of(layers, m->count, true) : m->count;
  const bool is_span = m->kind == LayersMatcher::Kind::kSpan;
  if ((is_span ? m->end : count) > layers) {
    *problem = "found " + text + ", and the model has layers 0 to " + std::to_string(layers - 1) +
               "; allowed: layers that it has";
    return std::nullopt;
  }
  if (is_span) return Range{m->begin, m->end};
  return m->kind == LayersMatcher::Kind::kFirst ? Range{0, count} : Range{layers - count, layers};
}

std::optional<Range> match_steps(const std::string& text, int64_t steps, int64_t percent_steps,
                                 std::string* problem) {
  const std::optional<StepsMatcher> m = read_steps(text, problem);
  if (!m) return std::nullopt;
  Range range{m->begin, m->end};
  if (m->is_percent) {
    range.begin = part_of(percent_steps, m->begin, false);
    range.end = m->end == kWholePercent ? steps : part_of(percent_steps, m->end, false);
  }
  return Range{std::min(range.begin, steps), std::min(range.end, steps)};
}

std::optional<std::array<bool, kNumModules>> match_modules(const std::vector<std::string>& patterns,
                                                           std::string* problem) {
  std::array<bool, kNumModules> matched{};
  if (patterns.empty()) std::fill_n(matched.begin(), kNumGemmModules, true);
  for (const std::string& pattern : patterns) {
    const bool glob = pattern.find_first_of("*?") != std::string::npos;
    bool any = false;
    for (int i = 0; i < (glob ? kNumGemmModules : kNumModules); ++i) {
      if (!glob_matches(pattern, name_of(static_cast<Module>(i)))) continue;
      matched[static_cast<size_t>(i)] = any = true;
    }
    if (!any) {
      *problem = unknown_module(pattern);
      return std::nullopt;
    }
  }
  return matched;
}

MatchedRule match_rule(const RuleSpec& rule, const ModelSpec& model, const StageShape& stage,
                       std::vector<RuleProblem>& problems) {
  MatchedRule matched;
  matched.rule = &rule;
  std::string problem;
  if (auto modules = match_modules(rule.modules, &problem)) {
    matched.modules = *modules;
  } else {
    problems.push_back({"module", problem});
  }
  if (!rule.layers.empty()) {
    matched.layers = match_layers(rule.layers, model.layers, &problem);
    if (!matched.layers) problems.push_back({"layers", problem});
  }
  matched.steps = {0, stage.steps};
  if (!rule.steps.empty()) {
    const int64_t percent_steps = stage.percent_steps > 0 ? stage.percent_steps : stage.steps;
    if (auto span = match_steps(rule.steps, stage.steps, percent_steps, &problem)) {
      matched.steps = *span;
    } else {
      problems.push_back({"steps", problem});
    }
  }
  for (const GemmRole g : {GemmRole::kFprop, GemmRole::kDgrad, GemmRole::kWgrad}) {
    if (rule.gemm == name_of(g)) matched.gemm = g;
  }
  if (!rule.gemm.empty() && !matched.gemm) {
    problems.push_back({"gemm", "found " + rule.gemm + "; allowed: fprop, dgrad or wgrad"});
  }
  for (const OperandRole o : {OperandRole::kAct, OperandRole::kWeight, OperandRole::kGrad}) {
    if (rule.operand == name_of(o)) matched.operand = o;
  }
  if (!rule.operand.empty() && !matched.operand) {
    problems.push_back({"operand", "found " + rule.operand + "; allowed: act, weight or grad"});
  }
  return matched;
}

int64_t largest_named_step(const RuleSpec& rule) {
  std::string ignored;
  const std::optional<StepsMatcher> m = read_steps(rule.steps, &ignored);
  return m && !m->is_percent ? m->end : 0;
}

}  // namespace fp4t
