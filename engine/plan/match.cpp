#include "engine/plan/match.h"

#include <algorithm>
#include <string_view>

#include "engine/recipe/problems.h"
#include "engine/recipe/tables.h"

namespace fp4t {

namespace {

constexpr int64_t kPercentDigits = 1'000'000;  // of a percent: "33.333333%"

// Reads digits at the front of `text` and drops them. Fails on none, and beyond twelve.
bool take_number(std::string_view& text, int64_t* value) {
  size_t n = 0;
  *value = 0;
  while (n < text.size() && n <= 12 && text[n] >= '0' && text[n] <= '9')
    *value = *value * 10 + (text[n++] - '0');
  if (n == 0 || n > 12) return false;
  text.remove_prefix(n);
  return true;
}

// A decimal number in millionths: "12.5" is 12'500'000.
bool take_decimal(std::string_view& text, int64_t* millionths) {
  int64_t whole = 0;
  if (!take_number(text, &whole)) return false;
  *millionths = whole * kPercentDigits;
  if (text.empty() || text.front() != '.') return true;
  text.remove_prefix(1);
  int64_t unit = kPercentDigits;
  size_t n = 0;
  while (n < text.size() && text[n] >= '0' && text[n] <= '9') {
    unit /= 10;
    *millionths += unit * (text[n++] - '0');
  }
  text.remove_prefix(n);
  return n > 0 && n <= 6;
}

// n * percent / 100, rounded down or up, exactly.
int64_t part_of(int64_t n, int64_t millionths, bool up) {
  const __int128 whole = static_cast<__int128>(100) * kPercentDigits;
  const __int128 product = static_cast<__int128>(n) * millionths;
  return static_cast<int64_t>((product + (up ? whole - 1 : 0)) / whole);
}

bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// What follows "first " or "last ": a count or a share of the layers.
std::optional<int64_t> layer_count(std::string_view rest, int64_t layers) {
  const bool percent = !rest.empty() && rest.back() == '%';
  if (percent) rest.remove_suffix(1);
  int64_t value = 0;
  if (percent) {
    if (!take_decimal(rest, &value) || !rest.empty() || value > 100 * kPercentDigits) return std::nullopt;
    return part_of(layers, value, true);
  }
  if (!take_number(rest, &value) || !rest.empty()) return std::nullopt;
  return value;
}

std::string unknown_module(const std::string& pattern) {
  std::string known, nearest;
  size_t best = pattern.size();
  for (int i = 0; i < kNumModules; ++i) {
    const std::string name = name_of(static_cast<Module>(i));
    known += (known.empty() ? "" : ", ") + name;
    const size_t distance = edit_distance(pattern, name);
    if (distance < best) {
      best = distance;
      nearest = name;
    }
  }
  std::string message = "module: '" + pattern + "' matches no module; known: " + known;
  if (!nearest.empty()) message += "; did you mean '" + nearest + "'?";
  return message;
}

}  // namespace

std::optional<Range> match_layers(const std::string& text, int64_t layers, std::string* problem) {
  const std::string has = " of a model with layers 0-" + std::to_string(layers - 1);
  std::string_view rest = text;
  const bool first = take_prefix(rest, "first ");
  const bool last = !first && take_prefix(rest, "last ");
  if (first || last) {
    const std::optional<int64_t> count = layer_count(rest, layers);
    if (count && *count <= layers) return first ? Range{0, *count} : Range{layers - *count, layers};
    *problem = "layers: '" + text + "'" +
               (count ? " asks for more than the " + std::to_string(layers) + " there are"
                      : ": after first or last comes a count or a percentage up to 100%");
    return std::nullopt;
  }
  Range range;
  bool good = take_number(rest, &range.begin);
  range.end = range.begin;
  if (good && !rest.empty()) good = take_prefix(rest, "-") && take_number(rest, &range.end) && rest.empty();
  if (!good) {
    *problem = "layers: '" + text + "' is none of '5', '0-3', 'first 2', 'last 15%'";
  } else if (range.end < range.begin) {
    *problem = "layers: '" + text + "' runs backwards";
  } else if (range.end >= layers) {
    *problem = "layers: '" + text + "' names layer " + std::to_string(range.end) + has;
  } else {
    ++range.end;
    return range;
  }
  return std::nullopt;
}

std::optional<Range> match_steps(const std::string& text, int64_t steps, int64_t percent_steps,
                                 std::string* problem) {
  std::string_view rest = text;
  const bool percent = !rest.empty() && rest.back() == '%';
  if (percent) rest.remove_suffix(1);
  int64_t a = 0, b = 0;
  const bool good =
      percent ? take_decimal(rest, &a) && (take_prefix(rest, "%-") || take_prefix(rest, "-")) &&
                    take_decimal(rest, &b) && rest.empty() && b <= 100 * kPercentDigits
              : take_number(rest, &a) && take_prefix(rest, "-") && take_number(rest, &b) && rest.empty();
  if (!good) {
    *problem = "steps: '" + text + "' is neither 'a-b' nor 'a-b%' (up to 100%)";
    return std::nullopt;
  }
  if (b <= a) {
    *problem = "steps: '" + text + "' is empty: the end is not part of the span";
    return std::nullopt;
  }
  if (percent) {
    const int64_t begin = part_of(percent_steps, a, false);
    const int64_t end = b == 100 * kPercentDigits ? steps : part_of(percent_steps, b, false);
    return Range{std::min(begin, steps), std::min(end, steps)};
  }
  return Range{std::min(a, steps), std::min(b, steps)};
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
                       std::vector<std::string>& problems) {
  MatchedRule matched;
  matched.rule = &rule;
  std::string problem;
  if (auto modules = match_modules(rule.modules, &problem)) {
    matched.modules = *modules;
  } else {
    problems.push_back(problem);
  }
  if (!rule.layers.empty()) {
    matched.layers = match_layers(rule.layers, model.layers, &problem);
    if (!matched.layers) problems.push_back(problem);
  }
  matched.steps = {0, stage.steps};
  if (!rule.steps.empty()) {
    const int64_t percent_steps = stage.percent_steps > 0 ? stage.percent_steps : stage.steps;
    if (auto span = match_steps(rule.steps, stage.steps, percent_steps, &problem)) {
      matched.steps = *span;
    } else {
      problems.push_back(problem);
    }
  }
  for (const GemmRole g : {GemmRole::kFprop, GemmRole::kDgrad, GemmRole::kWgrad}) {
    if (rule.gemm == name_of(g)) matched.gemm = g;
  }
  if (!rule.gemm.empty() && !matched.gemm) {
    problems.push_back("gemm: '" + rule.gemm + "' is none of fprop, dgrad, wgrad");
  }
  for (const OperandRole o : {OperandRole::kAct, OperandRole::kWeight, OperandRole::kGrad}) {
    if (rule.operand == name_of(o)) matched.operand = o;
  }
  if (!rule.operand.empty() && !matched.operand) {
    problems.push_back("operand: '" + rule.operand + "' is none of act, weight, grad");
  }
  return matched;
}

int64_t largest_named_step(const RuleSpec& rule) {
  std::string_view rest = rule.steps;
  int64_t a = 0, b = 0;
  const bool absolute =
      take_number(rest, &a) && take_prefix(rest, "-") && take_number(rest, &b) && rest.empty();
  return absolute ? b : 0;
}

}  // namespace fp4t
