#include "engine/recipe/load.h"
#include "engine/recipe/scalars.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "engine/recipe/bind.h"
#include "engine/recipe/huggingface_config.h"
#include "engine/recipe/print.h"
#include "engine/recipe/scalars.h"
#include "engine/recipe/validate.h"
#include "engine/recipe/yaml.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

// The value of model.from; null without one.
const YamlNode* folder_of(const YamlNode& root) {
  const YamlEntry* model = root.find("model");
  if (!model || model->value->kind != YamlNode::Kind::kMap) return nullptr;
  const YamlEntry* from = model->value->find("from");
  const bool given = from && from->value->kind == YamlNode::Kind::kScalar && !from->value->text.empty();
  return given ? from->value.get() : nullptr;
}

// What the folder says of the model.
std::vector<ImpliedKey> keys_of_folder(const YamlNode& folder) {
  const auto placed = [&](const Error& error) {
    return place_text(folder.place) + ": model.from: " + error.what();
  };
  try {
    return implied_keys(model_from_config(folder.text));
  } catch (const MissingInputError& error) {
    throw MissingInputError(placed(error));
  } catch (const BadDataError& error) {
    throw BadDataError(placed(error));
  }
}

// Whether the tree has a value at a dotted path without lists.
bool has_value(const YamlNode& root, const std::string& path) {
  const YamlNode* node = &root;
  for (size_t at = 0; at <= path.size();) {
    if (node->kind != YamlNode::Kind::kMap) return true;  // of a kind that binding will refuse
    const size_t end = std::min(path.find('.', at), path.size());
    const YamlEntry* entry = node->find(path.substr(at, end - at));
    if (!entry) return false;
    node = entry->value.get();
    at = end + 1;
  }
  return true;
}

// Keys that the recipe gives must be the folder's.
void compare_with_folder(const BoundRecipe& bound, const std::vector<ImpliedKey>& implied,
                         Problems& problems) {
  const Problems unread = problems;
  std::map<std::string, std::string> now;
  for (const FlatKey& key : flatten(bound.recipe)) now[key.path] = key.value;
  for (const ImpliedKey& key : implied) {
    const auto it = now.find(key.path);
    if (!key.must_agree || it == now.end() || it->second == key.value || unread.touches(key.path)) continue;
    problems.add_at(bound.places, key.path,
                    "found " + printable(it->second) + "; the model of '" +
                        printable(bound.recipe.model.from) + "' (model.from) has " + key.value);
  }
}

LoadedRecipe parse(const std::string& text, const std::string& file_name,
                   const std::vector<std::string>& overrides, bool with_folder) {
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
  std::vector<ImpliedKey> implied;
  if (const YamlNode* folder = with_folder ? folder_of(*root) : nullptr) {
    const SourcePlace place = folder->place;
    implied = keys_of_folder(*folder);
    for (const ImpliedKey& key : implied) {
      if (has_value(*root, key.path)) continue;
      root = apply_override(root, key.path + "=" + key.value, place, problems);
    }
    const FolderTokenizer tokenizer = tokenizer_of_folder(folder->text);
    const bool names_one = has_value(*root, "tokenizer.kind") || has_value(*root, "tokenizer.path");
    if (!tokenizer.kind.empty() && !names_one) {
      root = apply_override(root, "tokenizer.kind=" + tokenizer.kind, place, problems);
      root = apply_override(root, "tokenizer.path=" + write_text(tokenizer.path), place, problems);
    }
  }
  BoundRecipe bound = bind_recipe(*root, problems);
  resolve_defaults(bound);
  compare_with_folder(bound, implied, problems);
  validate_recipe(bound, problems);
  problems.throw_if_any();
  return {std::move(bound.recipe), text, std::move(bound.places)};
}

}  // namespace

LoadedRecipe parse_recipe(const std::string& text, const std::string& file_name,
                          const std::vector<std::string>& overrides) {
  return parse(text, file_name, overrides, false);
}

LoadedRecipe load_recipe(const std::string& path, const std::vector<std::string>& overrides) {
  namespace fs = std::filesystem;
  const auto refuse = [&](const std::string& why) {
    throw MissingInputError(printable(path) + ": no recipe to read there: " + why);
  };
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) refuse(error.message());
  if (!fs::is_regular_file(status)) refuse(fs::is_directory(status) ? "it is a folder" : "it is no file");
  return parse(read_text_file(path), path, overrides, true);
}

}  // namespace fp4t
