// What differs between two resolved recipes, key by key.
#include <map>

#include "engine/recipe/bind.h"
#include "engine/recipe/load.h"
#include "engine/recipe/print.h"
#include "engine/recipe/validate.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

// Without the checks between keys: a recipe that an earlier build accepted can still be compared.
std::vector<FlatKey> read(const std::string& text, const std::string& name) {
  Problems problems;
  const YamlPtr root = parse_yaml(text, name, problems);
  problems.throw_if_any();
  if (!root || root->kind != YamlNode::Kind::kMap) throw RecipeError(name + ": not a map of keys");
  BoundRecipe bound = bind_recipe(*root, problems);
  problems.throw_if_any();
  resolve_defaults(bound);
  return flatten(bound.recipe);
}

}  // namespace

std::vector<RecipeChange> compare_recipes(const std::string& before_yaml, const std::string& after_yaml) {
  const std::vector<FlatKey> before = read(before_yaml, "recipe before");
  const std::vector<FlatKey> after = read(after_yaml, "recipe after");
  std::map<std::string, const FlatKey*> now;
  for (const FlatKey& key : after) now[key.path] = &key;
  std::vector<RecipeChange> changes;
  for (const FlatKey& key : before) {
    const auto it = now.find(key.path);
    const std::string value = it == now.end() ? "" : it->second->value;
    if (it == now.end() || value != key.value)
      changes.push_back({key.path, key.value, value, key.resume_class});
    if (it != now.end()) now.erase(it);
  }
  for (const FlatKey& key : after) {
    if (now.count(key.path)) changes.push_back({key.path, "", key.value, key.resume_class});
  }
  return changes;
}

std::vector<std::pair<std::string, std::string>> recipe_keys(const std::string& yaml) {
  std::vector<std::pair<std::string, std::string>> keys;
  for (const FlatKey& key : read(yaml, "recipe")) keys.emplace_back(key.path, key.value);
  return keys;
}

}  // namespace fp4t
