#include "engine/recipe/problems.h"

#include <algorithm>

#include "engine/recipe/tables.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

std::string place_text(const SourcePlace& place) {
  const std::string file = printable(place.file);
  if (place.line == 0) return file.empty() ? "recipe" : file;
  return file + ":" + std::to_string(place.line) + ":" + std::to_string(place.column);
}

SourcePlace nearest_place(const FieldPlaces& places, const std::string& path) {
  std::string at = path;
  while (!places.count(at) && !at.empty()) at = parent_path(at);
  const auto found = places.find(at);
  return found == places.end() ? SourcePlace{} : found->second.value;
}

void Problems::add(const SourcePlace& place, const std::string& path, const std::string& message) {
  paths_.insert(path);
  if (is_full()) {
    ++num_dropped_;
    return;
  }
  constexpr size_t kMostShown = 4000;
  entries_.push_back({place, place_text(place) + ": " + (path.empty() ? "" : printable(path) + ": ") +
                                 printable(message, kMostShown)});
}

void Problems::add_at(const FieldPlaces& places, const std::string& path, const std::string& message) {
  add(nearest_place(places, path), path, message);
}

bool Problems::touches(const std::string& path) const {
  for (std::string at = path; !at.empty(); at = parent_path(at)) {
    if (paths_.count(at)) return true;
  }
  return false;
}

bool Problems::has_inside(const std::string& path) const {
  if (path.empty()) return !paths_.empty();
  for (auto it = paths_.lower_bound(path); it != paths_.end() && it->starts_with(path); ++it) {
    if (it->size() == path.size() || (*it)[path.size()] == '.' || (*it)[path.size()] == '[') return true;
  }
  return false;
}

void Problems::throw_if_any() const {
  if (entries_.empty()) return;
  std::vector<Entry> sorted = entries_;
  std::stable_sort(sorted.begin(), sorted.end(), [](const Entry& a, const Entry& b) {
    const bool a_override = a.place.line == 0, b_override = b.place.line == 0;
    if (a_override != b_override) return b_override;
    return std::pair(a.place.line, a.place.column) < std::pair(b.place.line, b.place.column);
  });
  std::string text;
  for (const Entry& entry : sorted) text += (text.empty() ? "" : "\n") + entry.text;
  if (num_dropped_ > 0) text += "\nand " + std::to_string(num_dropped_) + " more problems";
  throw RecipeError(text);
}

std::string parent_path(const std::string& path) {
  for (const char* table : kTableNames) {
    const std::string name = table;
    if (path.size() > name.size() && path.ends_with("." + name)) {
      return path.substr(0, path.size() - name.size() - 1);
    }
  }
  const size_t cut = path.find_last_of(".[");
  return cut == std::string::npos ? "" : path.substr(0, cut);
}

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      d[i][j] = std::min({change, d[i - 1][j] + 1, d[i][j - 1] + 1});
      const bool swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swap) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

std::string suggestion(const std::string& found, const std::vector<std::string>& known) {
  std::string best;
  size_t best_distance = 3;
  constexpr size_t kLongestKey =
      100;  // beyond it the text is no misspelt key, and the distance costs its square
  if (found.size() > kLongestKey) return known.empty() ? "" : "known: " + list_names(known);
  for (const std::string& name : known) {
    const size_t distance = edit_distance(found, name);
    // Two changes turn any short word into any other: they count only where half of the word stays.
    if (distance < best_distance && distance * 2 <= found.size()) {
      best = name;
      best_distance = distance;
    }
  }
  for (const std::string& name : known) {
    if (best.empty() && found.size() >= 3 && (name.starts_with(found) || found.starts_with(name + "_"))) {
      best = name;
    }
  }
  if (!best.empty()) return "did you mean " + best + "?";
  return known.empty() ? "" : "known: " + list_names(known);
}

std::string list_names(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += names[i];
  }
  return text;
}

}  // namespace fp4t
