// The keys of a recipe, each declared once: its name, help, resume class, limits and when it applies
// stand in the visit functions (fields.cpp, fields_stages.cpp); parsing, printing, documenting and comparing
// are visitors over them. A key exists if and only if a visit function names it.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "engine/recipe/load.h"
#include "engine/recipe/recipe.h"

namespace fp4t {

// Upper limits. Far beyond any use, yet low enough that the products of sizes that the plan forms, and the
// conversions to FP32 and to Philox's 32-bit words, stay in range; validate.h's checks bound the rest.
constexpr double kMostLayers = 4096, kMostHeads = 65536, kMostWidth = 1 << 24;
constexpr double kMostCount = 1e9;      // steps, tokens, operands of tasks
constexpr double kMostSequences = 1e6;  // sequences of one kind
constexpr double kMostNumbers = 8;      // of a countdown problem
constexpr double kMostFactor = 1e6;     // coefficients of losses
constexpr double kMostReal = 1e30;

// One key. Built in place: course("steps", "...").at_least(1).required().
struct Field {
  const char* key;
  const char* help;
  ResumeClass resume;
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;              // low itself is not allowed
  bool is_required = false;           // when it applies
  bool applies = true;                // with the other keys as they are; else giving it is an error
  const char* applies_when = "";      // the condition in words; "" when there is none
  std::vector<std::string> choices;   // names that are allowed; empty: any
  std::vector<std::string> examples;  // spellings for messages and schema, where free text has a form
  const char* pattern = "";           // of that form, for the schema
  const char* empty_means = "";       // what an empty text says; "": it is refused
  bool is_one_line = false;           // a name: no control characters

  Field(const char* k, const char* h, ResumeClass r) : key(k), help(h), resume(r) {}
  Field& at_least(double v) { return low = v, *this; }
  Field& at_most(double v) { return high = v, *this; }
  Field& above(double v) { return low = v, low_open = true, *this; }
  Field& one_of(std::vector<std::string> names) { return choices = std::move(names), *this; }
  Field& like(std::vector<std::string> forms) { return examples = std::move(forms), *this; }
  Field& matching(const char* regular_expression) { return pattern = regular_expression, *this; }
  Field& or_empty(const char* meaning) { return empty_means = meaning, *this; }
  Field& one_line() { return is_one_line = true, *this; }
  Field& required() { return is_required = true, *this; }
  // Conditions add up. The words are those of the first that fails, or of the last when none does.
  Field& only_if(bool condition, const char* words) {
    if (applies) applies_when = words;
    applies = applies && condition;
    return *this;
  }
};

inline Field identity(const char* key, const char* help) { return {key, help, ResumeClass::kIdentity}; }
inline Field course(const char* key, const char* help) { return {key, help, ResumeClass::kCourse}; }
inline Field layout(const char* key, const char* help) { return {key, help, ResumeClass::kLayout}; }
inline Field output(const char* key, const char* help) { return {key, help, ResumeClass::kOutput}; }

class FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;

  virtual void value(const Field& field, std::string& v) = 0;
  virtual void value(const Field& field, int64_t& v) = 0;
  virtual void value(const Field& field, uint64_t& v) = 0;
  virtual void value(const Field& field, double& v) = 0;
  virtual void value(const Field& field, bool& v) = 0;
  virtual void value(const Field& field, std::vector<std::string>& v) = 0;
  // One of field.choices, by index.
  virtual void choice(const Field& field, size_t& index) = 0;

  // A nested map; false: do not descend. Every enter that returned true is closed by leave().
  virtual bool enter(const Field& field) = 0;
  // As enter, for a map that may be absent: `present` says whether it is, and becomes whether it shall be.
  virtual bool enter_optional(const Field& field, bool& present) = 0;
  // A list of maps with `size` items now; returns the size that it shall have. Closed by leave().
  virtual size_t enter_list(const Field& field, size_t size) = 0;
  virtual bool enter_item(size_t index) = 0;
  // A map with exactly one key out of `kinds` (field's help describes it); `kind` becomes the chosen index.
  // False: do not descend. Closed by leave().
  virtual bool enter_kind(size_t index, const std::vector<Field>& kinds, size_t& kind) = 0;
  virtual void leave() = 0;

  // Precision tables have a syntax of their own; their rules' keys are visit_rule's.
  virtual void precision(const Field& field, PrecisionSpec& v) = 0;
};

void visit_recipe(FieldVisitor& v, Recipe& r);
void visit_run(FieldVisitor& v, RunSpec& s);
void visit_model(FieldVisitor& v, ModelSpec& s);
void visit_rule(FieldVisitor& v, RuleSpec& s, size_t table);
void visit_pretrain(FieldVisitor& v, PretrainSpec& s);
void visit_rl(FieldVisitor& v, RlSpec& s);
// `max_tokens`: sampling.max_tokens, which some kinds' defaults follow.
void visit_objective(FieldVisitor& v, ObjectiveSpec& s, int64_t max_tokens);

// Keys of `precision` besides the tables.
Field preset_field();
Field override_field();
Field expanded_from_field();
Field table_field(size_t table);

}  // namespace fp4t
