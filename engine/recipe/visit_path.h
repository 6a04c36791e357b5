// Bases of visitors: one that knows the dotted path of where it is, one that also walks structs as they are.
#pragma once

#include <string>
#include <vector>

#include "engine/recipe/fields.h"

namespace fp4t {

class PathVisitor : public FieldVisitor {
 protected:
  // Of the map or list being visited; "" at the top.
  const std::string& path() const { return paths_.back(); }
  std::string path_of(const Field& field) const { return join(path(), field.key); }
  std::string path_of_item(size_t index) const { return path() + "[" + std::to_string(index) + "]"; }
  static std::string join(const std::string& map, const std::string& key) {
    return map.empty() ? key : map + "." + key;
  }
  void push(const std::string& path) { paths_.push_back(path); }
  void pop() { paths_.pop_back(); }

 private:
  std::vector<std::string> paths_ = {""};
};

// Descends into everything that is there; every value goes to any().
class WalkVisitor : public PathVisitor {
 public:
  virtual void any(const Field& field) = 0;

  void value(const Field& field, std::string&) override { any(field); }
  void value(const Field& field, int64_t&) override { any(field); }
  void value(const Field& field, uint64_t&) override { any(field); }
  void value(const Field& field, double&) override { any(field); }
  void value(const Field& field, bool&) override { any(field); }
  void value(const Field& field, std::vector<std::string>&) override { any(field); }
  void choice(const Field& field, size_t&) override { any(field); }
  bool enter(const Field& field) override { return push(path_of(field)), true; }
  bool enter_optional(const Field& field, bool& present) override {
    if (present) push(path_of(field));
    return present;
  }
  size_t enter_list(const Field& field, size_t size) override { return push(path_of(field)), size; }
  bool enter_item(size_t index) override { return push(path_of_item(index)), true; }
  bool enter_kind(size_t index, const std::vector<Field>& kinds, size_t& kind) override {
    return push(join(path_of_item(index), kinds[kind].key)), true;
  }
  void leave() override { pop(); }
  // Rules are visited at the paths that they were read from.
  void precision(const Field&, PrecisionSpec& v) override {
    for (size_t t = 0; t < std::size(v.tables); ++t) {
      for (RuleSpec& rule : v.tables[t]) {
        push(rule.path);
        visit_rule(*this, rule, t);
        pop();
      }
    }
  }
};

// "a whole number, at least 1", for messages.
std::string describe_numbers(const Field& field, bool whole);

}  // namespace fp4t
