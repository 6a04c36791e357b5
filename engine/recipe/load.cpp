#include "engine/recipe/load.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "engine/recipe/bind.h"
#include "engine/recipe/validate.h"
#include "engine/recipe/yaml.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

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
  namespace fs = std::filesystem;
  const auto refuse = [&](const std::string& why) {
    throw MissingInputError(printable(path) + ": no recipe to read there: " + why);
  };
  // Asked before opening: to open a FIFO waits for a writer.
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) refuse(error.message());
  if (!fs::is_regular_file(status)) refuse(fs::is_directory(status) ? "it is a folder" : "it is no file");
  std::ifstream in(path, std::ios::binary);
  if (!in) refuse(std::strerror(errno));
  std::string text;
  std::vector<char> part(size_t{1} << 16);
  while (in.read(part.data(), static_cast<std::streamsize>(part.size())) || in.gcount() > 0) {
    text.append(part.data(), static_cast<size_t>(in.gcount()));
  }
  if (in.bad()) refuse(std::strerror(errno));
  return parse_recipe(text, path, overrides);
}

}  // namespace fp4t
