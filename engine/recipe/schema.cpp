// JSON schema (draft 2020-12) of recipes, for editors. Conditions between keys are in the descriptions; the
// checks of load_recipe decide.
#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>

#include "engine/recipe/load.h"
#include "engine/recipe/scalars.h"
#include "engine/recipe/tables.h"
#include "engine/recipe/visit_path.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

const char* name_of(ResumeClass c) {
  switch (c) {
    case ResumeClass::kIdentity:
      return "identity";
    case ResumeClass::kCourse:
      return "course";
    case ResumeClass::kLayout:
      return "layout";
    case ResumeClass::kOutput:
      return "output";
  }
  return "?";
}

Json object() {
  return {{"type", "object"}, {"additionalProperties", false}, {"properties", Json::object()}};
}

// Walks a recipe that has one of everything. The conditions then see its default values: what they say is
// text, so they are collected by Field's words alone.
class SchemaVisitor : public FieldVisitor {
 public:
  SchemaVisitor() { stack_.push_back(&root_); }
  Json& root() { return root_; }

  void value(const Field& f, std::string& v) override {
    Json s = text(f);
    if (!f.choices.empty()) s = {{"enum", f.choices}};
    // A default that could not be written is that of a key left out.
    if (!f.is_required && (!v.empty() || *f.empty_means != '\0')) s["default"] = v;
    if (!f.examples.empty()) s["examples"] = f.examples;
    add(f, std::move(s));
  }
  void value(const Field& f, int64_t& v) override { number(f, "integer", v); }
  void value(const Field& f, uint64_t& v) override {
    Json s = {{"type", "integer"}, {"minimum", 0}, {"default", v}};
    add(f, std::move(s));
  }
  void value(const Field& f, double& v) override { number(f, "number", v); }
  void value(const Field& f, bool& v) override { add(f, {{"type", "boolean"}, {"default", v}}); }
  void value(const Field& f, std::vector<std::string>& v) override {
    Json s = {{"anyOf", {text(f), {{"type", "array"}, {"items", text(f)}}}}};
    if (!f.is_required) s["default"] = v;
    if (!f.examples.empty()) s["examples"] = f.examples;
    add(f, std::move(s));
  }
  void choice(const Field& f, size_t& index) override {
    Json names = Json::array();
    for (const std::string& name : f.choices) {
      // "16" is a number to a YAML reader.
      int64_t whole = 0;
      if (read_int(name, whole).empty()) {
        names.push_back(whole);
      } else {
        names.push_back(name);
      }
    }
    Json s = {{"enum", names}};
    if (!f.is_required) s["default"] = names[index];
    add(f, std::move(s));
  }

  bool enter(const Field& f) override {
    stack_.push_back(&add(f, object()));
    return true;
  }
  bool enter_optional(const Field& f, bool&) override { return enter(f); }
  size_t enter_list(const Field& f, size_t size) override {
    stack_.push_back(&add(f, {{"type", "array"}, {"items", Json::object()}})["items"]);
    return size;
  }
  bool enter_item(size_t) override {
    *stack_.back() = object();
    stack_.push_back(stack_.back());
    return true;
  }
  bool enter_kind(size_t, const std::vector<Field>& kinds, size_t& kind) override {
    Json& items = *stack_.back();
    if (!items.contains("oneOf")) items["oneOf"] = Json::array();
    Json one = object();
    items["oneOf"].push_back(std::move(one));
    Json& item = items["oneOf"].back();
    item["required"] = {kinds[kind].key};
    item["properties"][kinds[kind].key] = object();
    Json& inner = item["properties"][kinds[kind].key];
    inner["description"] = kinds[kind].help;
    stack_.push_back(&inner);
    return true;
  }
  void leave() override { stack_.pop_back(); }

  void precision(const Field& f, PrecisionSpec& v) override {
    enter(f);
    value(preset_field(), v.preset);
    value(expanded_from_field(), v.preset);
    tables();
    enter(override_field());
    tables();
    leave();
    Json& here = *stack_.back();
    for (const char* key : {"preset", "expanded_from"}) here["properties"][key].erase("default");
    leave();
  }

 private:
  void tables() {
    for (size_t t = 0; t < kNumRecipeTables; ++t) {
      enter_list(table_field(t), 1);
      enter_item(0);
      RuleSpec rule;
      visit_rule(*this, rule, t);
      for (const char* key : {"gemm", "operand"}) (*stack_.back())["properties"][key].erase("default");
      leave();
      leave();
    }
  }
  static Json text(const Field& f) {
    Json s = {{"type", "string"}};
    if (*f.empty_means == '\0') s["minLength"] = 1;
    if (*f.pattern == '\0') return s;
    s["pattern"] = f.pattern;
    // "5" of a text key may be written without quotes, as a number then.
    if (std::regex_match("5", std::regex(f.pattern)))
      s = {{"anyOf", {s, {{"type", "integer"}, {"minimum", 0}}}}};
    return s;
  }
  template <class T>
  void number(const Field& f, const char* type, T v) {
    Json s = {{"type", type}};
    if (std::isfinite(f.low)) s[f.low_open ? "exclusiveMinimum" : "minimum"] = limit(f.low);
    if (std::isfinite(f.high)) s["maximum"] = limit(f.high);
    if (!f.is_required) s["default"] = v;
    add(f, std::move(s));
  }
  static Json limit(double v) { return v == std::floor(v) ? Json(static_cast<int64_t>(v)) : Json(v); }

  Json& add(const Field& f, Json schema) {
    std::string help = f.help;
    if (*f.empty_means != '\0') help += std::string("; empty: ") + f.empty_means;
    if (*f.applies_when != '\0') help += std::string(". Only when ") + f.applies_when;
    schema["description"] = help;
    schema["x-resume"] = name_of(f.resume);
    Json& map = *stack_.back();
    // A key that is required only under a condition is left to the checks.
    if (f.is_required && *f.applies_when == '\0') map["required"].push_back(f.key);
    map["properties"][f.key] = std::move(schema);
    return map["properties"][f.key];
  }

  Json root_ = object();
  std::vector<Json*> stack_;
};

}  // namespace

std::string recipe_schema() {
  PretrainSpec pretrain;
  pretrain.data.emplace_back();
  pretrain.eval.task.emplace();
  RlSpec rl;
  rl.rewards.emplace_back();
  rl.eval.task.emplace();
  Recipe recipe;
  recipe.stages = {pretrain, rl};
  SchemaVisitor visitor;
  visit_recipe(visitor, recipe);
  Json schema = {{"$schema", "https://json-schema.org/draft/2020-12/schema"}, {"title", "fp4train recipe"}};
  schema.update(visitor.root());
  return schema.dump(2) + "\n";
}

}  // namespace fp4t
