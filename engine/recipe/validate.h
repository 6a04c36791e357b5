// Checks between keys: each rule is one function with one message. Limits of a single key stand in its field.
#pragma once

#include <initializer_list>
#include <string>

#include "engine/recipe/bind.h"
#include "engine/recipe/problems.h"

namespace fp4t {

// What the checks see: the recipe as bound, and which of its keys could not be read.
class Check {
 public:
  Check(const BoundRecipe& bound, Problems& problems)
      : bound_(bound), unread_(problems), problems_(problems) {}

  const Recipe& recipe() const { return bound_.recipe; }
  bool gave(const std::string& path) const { return bound_.gave(path); }
  // A problem at `path`, unless it, or another key that the finding rests on, could not be read.
  void fail(const std::string& path, const std::string& message,
            std::initializer_list<std::string> others = {}) {
    if (unread_.touches(path)) return;
    for (const std::string& other : others) {
      if (unread_.touches(other)) return;
    }
    problems_.add_at(bound_.places, path, message);
  }
  void fail_rule(const RuleSpec& rule, const std::string& message) {
    if (!unread_.has_inside(rule.path)) problems_.add(rule.place, rule.path, message);
  }

 private:
  const BoundRecipe& bound_;
  const Problems unread_;
  Problems& problems_;
};

// Fills in the defaults that follow from other keys (run.dir, names of sources, moe.shared_hidden, gradients
// under fp32).
void resolve_defaults(BoundRecipe& bound);

// All of the checks below.
void validate_recipe(const BoundRecipe& bound, Problems& problems);

void validate_model(Check& check);      // validate_model.cpp
void validate_precision(Check& check);  // validate_precision.cpp
void validate_stages(Check& check);     // validate_stages.cpp
// Of the stage at `path` ("stages[1].rl"): validate_objective.cpp
void validate_objective(Check& check, const std::string& path, const RlSpec& stage);
void validate_held_out(Check& check);  // validate_held_out.cpp

// Whether a rule of any table names the fp32 format.
bool uses_fp32(const PrecisionSpec& precision);

}  // namespace fp4t
