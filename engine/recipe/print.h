// Recipes as text: values by visitor, for print-config and for comparing.
#pragma once

#include <string>
#include <vector>

#include "engine/recipe/recipe.h"
#include "engine/recipe/visit_path.h"

namespace fp4t {

// A walk in which every value that applies arrives as YAML text.
class TextVisitor : public WalkVisitor {
 public:
  virtual void text(const Field& field, const std::string& value) = 0;

  void any(const Field&) override {}
  void value(const Field& field, std::string& v) override;
  void value(const Field& field, int64_t& v) override;
  void value(const Field& field, uint64_t& v) override;
  void value(const Field& field, double& v) override;
  void value(const Field& field, bool& v) override;
  void value(const Field& field, std::vector<std::string>& v) override;
  void choice(const Field& field, size_t& index) override;
  bool enter(const Field& field) override { return field.applies && WalkVisitor::enter(field); }
};

// A rule in one line, "{module: experts.*, format: nvfp4}", keys at their defaults left out.
std::string rule_text(const RuleSpec& rule, size_t table);

// Every key that applies, with its value; a precision rule is one entry.
struct FlatKey {
  std::string path, value;
  ResumeClass resume_class;
};
std::vector<FlatKey> flatten(const Recipe& recipe);

}  // namespace fp4t
