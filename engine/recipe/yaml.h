// YAML text to a tree with positions, stricter than the parser below it (yaml-cpp): duplicate keys, merge
// keys, tags, several documents and tab indentation are problems with their place. Anchors and aliases
// work; a node may be shared, so nodes are never changed, only replaced.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/recipe/problems.h"
#include "engine/recipe/recipe.h"

namespace fp4t {

struct YamlNode;
using YamlPtr = std::shared_ptr<const YamlNode>;

struct YamlEntry {
  std::string key;
  SourcePlace place;
  YamlPtr value;
};

struct YamlNode {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  SourcePlace place;
  std::string text;  // scalar
  bool quoted = false;
  std::vector<YamlPtr> items;      // list
  std::vector<YamlEntry> entries;  // map, in the order of the text
  int64_t num_nodes = 1;           // with all below it, each as often as aliases repeat it

  const YamlEntry* find(const std::string& key) const;
};

// Null when the text holds no document or could not be parsed (a problem then). Text is UTF-8.
YamlPtr parse_yaml(const std::string& text, const std::string& file, Problems& problems);

// Applies "a.b.c=value": returns the changed tree. The value is YAML; its place is the override's.
YamlPtr apply_override(const YamlPtr& root, const std::string& assignment, Problems& problems);
// The same for a value that stands elsewhere.
YamlPtr apply_override(const YamlPtr& root, const std::string& assignment, const SourcePlace& place,
                       Problems& problems);

// What a node is, for messages: `"text"` in quotes, a list, a map, null.
std::string describe(const YamlNode& node);

}  // namespace fp4t
