// What is wrong with a recipe: every problem found, each with its place, reported together.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/recipe/recipe.h"

namespace fp4t {

// Where a key and its value stand.
struct FieldPlace {
  SourcePlace key, value;
};

using FieldPlaces = std::map<std::string, FieldPlace>;  // by dotted path

// Of the value at the path, or of the nearest map around it that the recipe has.
SourcePlace nearest_place(const FieldPlaces& places, const std::string& path);
// "recipe.yaml:12:5", or "--set", whose key is the problem's path; printable.
std::string place_text(const SourcePlace& place);

class Problems {
 public:
  // `path` is dotted ("model.moe.top_k"); `message` says what was found and what is allowed. Both may quote
  // the recipe as it is: a problem is one line, so control characters in it are written as escapes.
  void add(const SourcePlace& place, const std::string& path, const std::string& message);
  // At the path's own place, or at the nearest map around it that the recipe has.
  void add_at(const FieldPlaces& places, const std::string& path, const std::string& message);

  // Whether there is a problem at this path; in or below it; at it or around it (its value says nothing
  // then).
  bool has(const std::string& path) const { return paths_.count(path) > 0; }
  bool has_inside(const std::string& path) const;
  bool touches(const std::string& path) const;
  bool empty() const { return entries_.empty(); }
  // From here on problems are counted, not kept: their text need not be made.
  bool is_full() const { return entries_.size() >= kMostKept; }
  // Throws RecipeError with one line a problem, in the order of the file, when there are any.
  void throw_if_any() const;

 private:
  struct Entry {
    SourcePlace place;
    std::string text;
  };
  // Nobody reads more; a file that is no recipe at all makes as many as it has lines.
  static constexpr size_t kMostKept = 200;

  std::vector<Entry> entries_;
  size_t num_dropped_ = 0;
  std::set<std::string> paths_;
};

// The path of the map or list around `path`; "" at the top. Table names keep their dots.
std::string parent_path(const std::string& path);

// Insertions, deletions, changes and swaps of neighbours.
size_t edit_distance(const std::string& a, const std::string& b);
// ", did you mean learning_rate?" for a name within an edit distance of 2, or that it begins; else the names.
std::string suggestion(const std::string& found, const std::vector<std::string>& known);
// "a, b or c"
std::string list_names(const std::vector<std::string>& names);

}  // namespace fp4t
