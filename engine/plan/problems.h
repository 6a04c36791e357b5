// Collects what is wrong with a precision table, so that the user reads all of it at once: the same reason
// from the same rule is one line, with the first cell and how many more.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/recipe/problems.h"
#include "engine/recipe/recipe.h"

namespace fp4t {

// "recipe.yaml:12:5: precision.pretrain.forward[2]"; without a position the path alone.
std::string place_of(const RuleSpec& rule);

class ProblemList {
 public:
  // `places` of a recipe's keys, where it came from a text.
  explicit ProblemList(FieldPlaces places = {}) : places_(std::move(places)) {}

  // About a rule as written.
  void rule(const RuleSpec& rule, const std::string& problem);
  // About a cell: `rule` supplied it, null where no rule did.
  void cell(const RuleSpec* rule, const std::string& cell, const std::string& problem);
  // About the key at a dotted path.
  void at(const std::string& path, const std::string& problem);
  void general(const std::string& problem);

  bool names(const RuleSpec& rule) const;
  void throw_if_any() const;

 private:
  struct Line {
    std::string place, first_cell, problem;
    std::vector<std::string> more_cells;
  };
  void add(const std::string& place, const std::string& cell, const std::string& problem);

  FieldPlaces places_;
  std::vector<Line> lines_;
  std::map<std::pair<std::string, std::string>, size_t> index_;  // (place, problem) to line
};

}  // namespace fp4t
