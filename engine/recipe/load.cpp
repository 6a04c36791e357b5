#include "engine/recipe/load.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "engine/recipe/bind.h"
#include "engine/recipe/validate.h"
#include "engine/recipe/yaml.h"
#include "kernels/base/check.h"

namespace fp4t {

LoadedRecipe parse_recipe(const std::string& text, const std::string& file_name,
                          const std::vector<std::string>& overrides) {
  Problems problems;
  YamlPtr root = parse_yaml(text, file_name, problems);
  if (problems.empty() && (!root || root->kind == YamlNode::Kind::kNull)) {
    problems.add({file_name, 1, 1}, "", "empty recipe; needed: model and stages");
  }
  if (!root || root->kind == YamlNode::Kind::kNull) problems.throw_if_any();
  for (const std::string& assignment : overrides) root = apply_override(root, assignment, problems);
  if (root->kind != YamlNode::Kind::kMap) {
    problems.add(root->place, "", "found " + describe(*root) + "; a recipe is a map of keys");
    problems.throw_if_any();
  }
  BoundRecipe bound = bind_recipe(*root, problems);
  resolve_defaults(bound);
  validate_recipe(bound, problems);
  problems.throw_if_any();
  return {std::move(bound.recipe), text, std::move(bound.places)};
}

LoadedRecipe load_recipe(const std::string& path, const std::vector<std::string>& overrides) {
  // Asked before opening: to open a FIFO waits for a writer.
  std::error_code ignored;
  const bool is_file = std::filesystem::is_regular_file(path, ignored);
  std::ifstream in;
  if (is_file) in.open(path, std::ios::binary);
  if (!is_file || !in) throw MissingInputError(path + ": no recipe to read there");
  std::ostringstream text;
  text << in.rdbuf();
  return parse_recipe(text.str(), path, overrides);
}

}  // namespace fp4t
