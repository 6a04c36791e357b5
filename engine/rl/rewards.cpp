#include "engine/rl/rewards.h"

#include <algorithm>

#include "engine/rl/scorer.h"
#include "engine/tokens/pattern.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

// One value a completion, by a function of it alone.
template <class Value>
class Each : public RewardPart {
 public:
  explicit Each(Value value) : value_(std::move(value)) {}
  std::vector<float> score(const std::vector<Judged>& completions) override {
    std::vector<float> out;
    for (const Judged& c : completions) out.push_back(value_(c));
    return out;
  }

 private:
  Value value_;
};

template <class Value>
std::unique_ptr<RewardPart> each(Value value) {
  return std::make_unique<Each<Value>>(std::move(value));
}

class FormatPart : public RewardPart {
 public:
  FormatPart(const std::string& name, const std::string& pattern, std::function<void(const std::string&)> log)
      : name_(name), pattern_(pattern), log_(std::move(log)) {}
  std::vector<float> score(const std::vector<Judged>& completions) override {
    std::vector<float> out;
    int64_t gave_up = 0;
    for (const Judged& c : completions) {
      const Pattern::Outcome outcome = pattern_.occurs(c.completion);
      gave_up += outcome == Pattern::Outcome::kGaveUp;
      out.push_back(outcome == Pattern::Outcome::kFound ? 1.0f : 0.0f);
    }
    if (gave_up > 0 && log_) {
      log_(detail::concat("reward ", name_, ": the search for its pattern gave up in ", gave_up, " of ",
                          completions.size(), " completions, which counts as not found"));
    }
    return out;
  }

 private:
  std::string name_;
  Pattern pattern_;
  std::function<void(const std::string&)> log_;
};

class ProcessPart : public RewardPart {
 public:
  ProcessPart(const RewardSpec& spec, const Rewards::Outlets& outlets)
      : scorer_({.name = spec.name,
                 .command = spec.command,
                 .timeout_seconds = spec.timeout_seconds,
                 .restarts = spec.restarts,
                 .cpu_seconds = spec.cpu_seconds,
                 .memory_mib = spec.memory_mib,
                 .file_mib = spec.file_mib,
                 .log = outlets.log,
                 .wait = outlets.wait}) {}
  std::vector<float> score(const std::vector<Judged>& completions) override {
    std::vector<ScoreRequest> requests;
    for (const Judged& c : completions)
      requests.push_back({c.id, c.prompt, c.completion, c.answer, c.finished});
    return scorer_.score(requests);
  }

 private:
  Scorer scorer_;
};

float length_penalty(int64_t tokens, int64_t free_tokens, int64_t max_tokens) {
  if (tokens <= free_tokens) return 0.0f;
  const auto over = static_cast<double>(std::min(tokens, max_tokens) - free_tokens);
  return static_cast<float>(-over / static_cast<double>(max_tokens - free_tokens));
}

std::unique_ptr<RewardPart> make_part(const RewardSpec& spec, int64_t max_tokens,
                                      const Rewards::Outlets& outlets) {
  if (spec.kind == "verifier") {
    return each([](const Judged& c) { return c.verdict == Verdict::kRight ? 1.0f : 0.0f; });
  }
  if (spec.kind == "length") {
    FP4T_CHECK(spec.free_tokens < max_tokens, "free_tokens ", spec.free_tokens, " of ", max_tokens);
    return each([=](const Judged& c) { return length_penalty(c.tokens, spec.free_tokens, max_tokens); });
  }
  if (spec.kind == "format") return std::make_unique<FormatPart>(spec.name, spec.pattern, outlets.log);
  if (spec.kind == "process") return std::make_unique<ProcessPart>(spec, outlets);
  throw RecipeError("rewards.kind: '" + spec.kind +
                    "' is not known; allowed are verifier, length, format, process");
}

}  // namespace

std::vector<std::string> reward_names(const std::vector<RewardSpec>& specs) {
  if (specs.empty()) return {"verifier"};
  std::vector<std::string> names;
  for (const RewardSpec& s : specs) names.push_back(s.name.empty() ? s.kind : s.name);
  return names;
}

Rewards::Rewards(std::vector<RewardSpec> specs, int64_t max_tokens, const Outlets& outlets)
    : specs_(std::move(specs)), names_(reward_names(specs_)) {
  if (specs_.empty()) specs_.emplace_back();
  for (size_t i = 0; i < specs_.size(); ++i) {
    specs_[i].name = names_[i];
    parts_.push_back(make_part(specs_[i], max_tokens, outlets));
  }
}

void check_rewards(const Recipe& recipe, const FieldPlaces& places) {
  Problems problems;
  const auto check = [&](const std::string& path, const RewardSpec& spec) {
    if (spec.kind == "process") {
      const std::string why = program_obstacle(spec.command.front());
      if (!why.empty()) problems.add_at(places, path + ".command", why);
    }
    if (spec.kind != "format") return;
    try {
      const Pattern compiled(spec.pattern);
    } catch (const RecipeError& e) {
      problems.add_at(places, path + ".pattern", e.what());
    }
  };
  for (size_t i = 0; i < recipe.stages.size(); ++i) {
    const auto* rl = std::get_if<RlSpec>(&recipe.stages[i]);
    for (size_t k = 0; rl && k < rl->rewards.size(); ++k) {
      check(detail::concat("stages[", i, "].rl.rewards[", k, "]"), rl->rewards[k]);
    }
  }
  problems.throw_if_any();
}

std::vector<std::vector<float>> Rewards::parts(const std::vector<Judged>& completions) {
  std::vector<std::vector<float>> all(completions.size());
  for (const auto& part : parts_) {
    const std::vector<float> values = part->score(completions);
    FP4T_CHECK_EQ(values.size(), completions.size());
    for (size_t i = 0; i < values.size(); ++i) all[i].push_back(values[i]);
  }
  return all;
}

float Rewards::total(const std::vector<float>& parts) const {
  FP4T_CHECK_EQ(parts.size(), specs_.size());
  double sum = 0;
  for (size_t k = 0; k < parts.size(); ++k) sum += specs_[k].weight * static_cast<double>(parts[k]);
  return static_cast<float>(sum);
}

}  // namespace fp4t
