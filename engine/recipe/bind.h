// The tree of a recipe into its structs: types, limits, names and required keys, with the place of each
// value kept for the checks between keys (validate.h).
#pragma once

#include <functional>
#include <string>

#include "engine/recipe/problems.h"
#include "engine/recipe/recipe.h"
#include "engine/recipe/yaml.h"

namespace fp4t {

class FieldVisitor;

struct BoundRecipe {
  Recipe recipe;
  FieldPlaces places;  // of every key that the text gives
  bool gave(const std::string& path) const { return places.count(path) > 0; }
};

BoundRecipe bind_recipe(const YamlNode& root, Problems& problems);

// Any document whose keys visit functions declare, as strictly; `visit` is called once for each of two
// visitors.
void bind_document(const YamlNode& root, const std::function<void(FieldVisitor&)>& visit, FieldPlaces& places,
                   Problems& problems);

// The rules of one table, at a path of their own; for presets and files that hold a precision table alone.
PrecisionSpec bind_precision(const YamlNode& root, Problems& problems);

}  // namespace fp4t
