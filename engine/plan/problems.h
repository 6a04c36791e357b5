// Collects what is wrong with a plan, so that the user reads all of it at once, each with its place in the
// recipe: the same reason from the same rule is one line, with the first cell and how many more.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/recipe/problems.h"
#include "engine/recipe/recipe.h"

namespace fp4t {

class ProblemList {
 public:
  // `places` of a recipe's keys, where it came from a text.
  explicit ProblemList(FieldPlaces places = {}) : places_(std::move(places)) {}

  // About a rule as written, and about the value of one of its keys.
  void rule(const RuleSpec& rule, const std::string& problem);
  void rule_key(const RuleSpec& rule, const std::string& key, const std::string& problem);
  // About a cell: `rule` supplied it, null where no rule did.
  void cell(const RuleSpec* rule, const std::string& cell, const std::string& problem);
  // About the key at a dotted path.
  void at(const std::string& path, const std::string& problem);

  // Whether something is wrong with this rule.
  bool names(const RuleSpec& rule) const { return named_.count(rule.path) > 0; }
  // Throws RecipeError with one line a problem, in the order of the file.
  void throw_if_any() const;

 private:
  struct Place {
    SourcePlace source;
    std::string path;
  };
  struct Line {
    Place place;
    std::string first_cell, problem;
    std::vector<std::string> more_cells;
  };
  // A rule that a preset brought stands where the recipe names the preset.
  Place place_of(const RuleSpec& rule) const;
  void add(const Place& place, const std::string& cell, const std::string& problem);

  FieldPlaces places_;
  std::vector<Line> lines_;
  std::map<std::pair<std::string, std::string>, size_t> index_;  // (path, problem) to line
  std::set<std::string> named_;                                  // paths of rules
};

}  // namespace fp4t
