#include "engine/plan/problems.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace fp4t {

std::string place_of(const RuleSpec& rule) {
  return rule.place.file.empty() ? rule.path : place_text(rule.place) + ": " + rule.path;
}

void ProblemList::rule(const RuleSpec& rule, const std::string& problem) { add(place_of(rule), "", problem); }

void ProblemList::cell(const RuleSpec* rule, const std::string& cell, const std::string& problem) {
  add(rule ? place_of(*rule) : "precision", cell, problem);
}

void ProblemList::at(const std::string& path, const std::string& problem) {
  const SourcePlace place = nearest_place(places_, path);
  add(place.file.empty() ? path : place_text(place) + ": " + path, "", problem);
}

void ProblemList::general(const std::string& problem) { add("", "", problem); }

bool ProblemList::names(const RuleSpec& rule) const {
  const std::string place = place_of(rule);
  return std::any_of(lines_.begin(), lines_.end(), [&](const Line& l) { return l.place == place; });
}

void ProblemList::add(const std::string& place, const std::string& cell, const std::string& problem) {
  const auto [found, fresh] = index_.try_emplace({place, problem}, lines_.size());
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
  if (lines_.empty()) return;
  std::string text;
  for (const Line& line : lines_) {
    if (!text.empty()) text += "\n";
    if (!line.place.empty()) text += line.place + ": ";
    if (!line.first_cell.empty()) text += line.first_cell;
    if (!line.more_cells.empty()) {
      text += " (and " + std::to_string(line.more_cells.size()) + " more cells)";
    }
    if (!line.first_cell.empty()) text += ": ";
    text += line.problem;
  }
  throw RecipeError(text);
}

}  // namespace fp4t
