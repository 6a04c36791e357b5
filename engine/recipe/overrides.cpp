// "a.b.c=value" on a tree. The path names keys and list indices ("stages.0.x" or "stages[0].x"); the names
// of precision tables keep their dots. Keys that the recipe lacks are made; whether they are known is found
// out when the tree is read, so a wrong name gives the same error from either side.
#include <cctype>

#include "engine/recipe/tables.h"
#include "engine/recipe/yaml.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

struct Step {
  std::string key;
  bool is_index = false;  // written in brackets
};

// Far beyond the deepest key, and few enough for the walk along them to recurse.
constexpr size_t kMostSteps = 32;

bool is_number(const std::string& s) {
  if (s.empty() || s.size() > 9) return false;
  for (const char c : s) {
    if (!std::isdigit(static_cast<unsigned char>(c))) return false;
  }
  return true;
}

// False when the path is malformed or too deep.
bool split_path(const std::string& path, std::vector<Step>& steps) {
  size_t at = 0;
  while (at < path.size()) {
    if (steps.size() == kMostSteps) return false;
    if (path[at] == '[') {
      const size_t close = path.find(']', at);
      if (close == std::string::npos || steps.empty()) return false;
      steps.push_back({path.substr(at + 1, close - at - 1), true});
      if (!is_number(steps.back().key)) return false;
      at = close + 1;
    } else {
      if (!steps.empty()) {
        if (path[at] != '.') return false;
        ++at;
      }
      size_t end = path.find_first_of(".[", at);
      if (end == std::string::npos) end = path.size();
      for (const char* table : kTableNames) {
        const size_t size = std::string_view(table).size();
        const bool whole = at + size == path.size() ||
                           (at + size < path.size() && (path[at + size] == '.' || path[at + size] == '['));
        if (whole && path.compare(at, size, table) == 0) end = at + size;
      }
      if (end == at) return false;
      steps.push_back({path.substr(at, end - at), false});
      at = end;
    }
  }
  return !steps.empty();
}

class Override {
 public:
  Override(const SourcePlace& place, YamlPtr value, Problems& problems)
      : place_(place), value_(std::move(value)), problems_(problems) {}

  // The tree as it was when the path leads nowhere.
  YamlPtr apply_to(const YamlPtr& root, const std::vector<Step>& steps) {
    const YamlPtr changed = apply(root, steps, 0, "");
    return refused_ ? root : changed;
  }

 private:
  YamlPtr apply(const YamlPtr& node, const std::vector<Step>& steps, size_t depth, const std::string& path) {
    if (depth == steps.size()) return value_;
    const Step& step = steps[depth];
    const bool absent = !node || node->kind == YamlNode::Kind::kNull;
    if (!absent && node->kind == YamlNode::Kind::kList) {
      return into_list(*node, steps, depth, path);
    }
    if (step.is_index) {
      return refuse(path, "there is no list to take element " + step.key + " of");
    }
    if (!absent && node->kind != YamlNode::Kind::kMap) {
      return refuse(path, "found " + describe(*node) + ", which has no key " + step.key);
    }
    auto copy = absent ? std::make_shared<YamlNode>() : std::make_shared<YamlNode>(*node);
    if (absent) copy->place = place_;
    copy->kind = YamlNode::Kind::kMap;
    const std::string inner = path.empty() ? step.key : path + "." + step.key;
    for (YamlEntry& entry : copy->entries) {
      if (entry.key != step.key) continue;
      entry.value = apply(entry.value, steps, depth + 1, inner);
      if (depth + 1 == steps.size()) entry.place = place_;
      return copy;
    }
    copy->entries.push_back({step.key, place_, apply(nullptr, steps, depth + 1, inner)});
    return copy;
  }
  YamlPtr into_list(const YamlNode& node, const std::vector<Step>& steps, size_t depth,
                    const std::string& path) {
    const Step& step = steps[depth];
    const size_t size = node.items.size();
    if (!is_number(step.key) || std::stoul(step.key) >= size) {
      const std::string allowed =
          size == 0 ? "the list is empty" : "allowed: 0 to " + std::to_string(size - 1);
      return refuse(path, "found the index " + step.key + "; " + allowed);
    }
    auto copy = std::make_shared<YamlNode>(node);
    YamlPtr& item = copy->items[std::stoul(step.key)];
    item = apply(item, steps, depth + 1, path + "[" + step.key + "]");
    return copy;
  }
  YamlPtr refuse(const std::string& path, const std::string& message) {
    problems_.add(place_, path, message);
    refused_ = true;
    return value_;
  }

  SourcePlace place_;
  YamlPtr value_;
  Problems& problems_;
  bool refused_ = false;
};

// Every node of the value stands at the override, whatever its place inside the value's text.
YamlPtr at_place(const YamlPtr& node, const SourcePlace& place) {
  auto copy = std::make_shared<YamlNode>(*node);
  copy->place = place;
  for (YamlPtr& item : copy->items) item = at_place(item, place);
  for (YamlEntry& entry : copy->entries) {
    entry.place = place;
    entry.value = at_place(entry.value, place);
  }
  return copy;
}

}  // namespace

YamlPtr apply_override(const YamlPtr& root, const std::string& assignment, Problems& problems) {
  return apply_override(root, assignment, {"--set", 0, 0}, problems);
}

YamlPtr apply_override(const YamlPtr& root, const std::string& assignment, const SourcePlace& place,
                       Problems& problems) {
  const size_t equals = assignment.find('=');
  const std::string path = assignment.substr(0, equals);
  std::vector<Step> steps;
  if (equals == std::string::npos || !split_path(path, steps)) {
    problems.add({"--set " + printable(assignment, 200), 0, 0}, "",
                 "allowed: a.b.c=value, list elements as a[0].b");
    return root;
  }
  Problems inner;
  YamlPtr value = parse_yaml(assignment.substr(equals + 1), place.file, inner);
  if (!inner.empty()) {
    YamlNode written;
    written.kind = YamlNode::Kind::kScalar;
    written.text = assignment.substr(equals + 1);
    problems.add(place, path, "found " + describe(written) + ", which is not a YAML value");
    return root;
  }
  if (!value) value = std::make_shared<YamlNode>();
  return Override(place, at_place(value, place), problems).apply_to(root, steps);
}

}  // namespace fp4t
