#include "engine/plan/problems.h"

#include <algorithm>

namespace fp4t {

ProblemList::Place ProblemList::place_of(const RuleSpec& rule) const {
  if (!rule.place.file.empty()) return {rule.place, rule.path};
  return {nearest_place(places_, "precision.preset"), rule.path};
}

void ProblemList::rule(const RuleSpec& rule, const std::string& problem) {
  named_.insert(rule.path);
  add(place_of(rule), "", problem);
}

void ProblemList::rule_key(const RuleSpec& rule, const std::string& key, const std::string& problem) {
  named_.insert(rule.path);
  Place place = place_of(rule);
  place.path += "." + key;
  const auto written = places_.find(place.path);
  if (written != places_.end()) place.source = written->second.value;
  add(place, "", problem);
}

void ProblemList::cell(const RuleSpec* rule, const std::string& cell, const std::string& problem) {
  if (rule) named_.insert(rule->path);
  add(rule ? place_of(*rule) : Place{nearest_place(places_, "precision"), "precision"}, cell, problem);
}

void ProblemList::at(const std::string& path, const std::string& problem) {
  add({nearest_place(places_, path), path}, "", problem);
}

void ProblemList::add(const Place& place, const std::string& cell, const std::string& problem) {
  const auto [found, fresh] = index_.try_emplace({place.path, problem}, lines_.size());
  if (fresh) {
    lines_.push_back({place, cell, problem, {}});
    return;
  }
  Line& line = lines_[found->second];
  const bool seen = cell == line.first_cell ||
                    std::find(line.more_cells.begin(), line.more_cells.end(), cell) != line.more_cells.end();
  if (!seen) line.more_cells.push_back(cell);
}

void ProblemList::throw_if_any() const {
  Problems problems;
  for (const Line& line : lines_) {
    std::string text = line.first_cell;
    if (!line.more_cells.empty()) text += " (and " + std::to_string(line.more_cells.size()) + " more cells)";
    problems.add(line.place.source, line.place.path, text + (text.empty() ? "" : ": ") + line.problem);
  }
  problems.throw_if_any();
}

}  // namespace fp4t
