// YAML text to Recipe: strict (RELIABILITY.md B6), every error at once, each with file:line:column,
// dotted path, what was found, what is allowed and the nearest known key.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "engine/recipe/problems.h"
#include "engine/recipe/recipe.h"

namespace fp4t {

struct LoadedRecipe {
  Recipe recipe;
  std::string source_text;  // as read
  FieldPlaces places;       // of every key that text and overrides give
};

// Reads, overrides ("a.b.c=value", stages as "stages.0.pretrain.steps=10" or "stages[0].pretrain.steps=10"),
// binds and validates. Throws RecipeError with all messages, MissingInputError when the file is not there.
// Where model.from names a folder, its config.json fills in the model keys that are not given, and those that
// are must agree with it; MissingInputError or BadDataError when it cannot be read. Its tokenizer.model or
// tokenizer.json is the tokenizer where the recipe names none.
LoadedRecipe load_recipe(const std::string& path, const std::vector<std::string>& overrides);
// The same of a text that says all by itself, as print_recipe writes it: model.from is a name and no more.
LoadedRecipe parse_recipe(const std::string& text, const std::string& file_name,
                          const std::vector<std::string>& overrides);

// The resolved recipe as YAML: every key with its value, presets expanded into rules; parses back to an
// equal recipe.
std::string print_recipe(const Recipe& recipe);

// JSON schema (draft 2020-12) of a recipe, with the help text of every key.
std::string recipe_schema();

// Resume classes of keys (DESIGN.md section 8).
enum class ResumeClass { kIdentity, kCourse, kLayout, kOutput };
struct RecipeChange {
  std::string path, before, after;
  ResumeClass resume_class;
};
// What differs between two resolved recipes, as print_recipe writes them.
std::vector<RecipeChange> compare_recipes(const std::string& before_yaml, const std::string& after_yaml);

// Every key of a resolved recipe that applies, with its value as text; a precision rule is one entry.
std::vector<std::pair<std::string, std::string>> recipe_keys(const std::string& yaml);

}  // namespace fp4t
