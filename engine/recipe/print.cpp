#include "engine/recipe/print.h"

#include "engine/recipe/scalars.h"
#include "engine/recipe/tables.h"

namespace fp4t {

void TextVisitor::value(const Field& field, std::string& v) {
  if (field.applies) text(field, write_text(v));
}
void TextVisitor::value(const Field& field, int64_t& v) {
  if (field.applies) text(field, std::to_string(v));
}
void TextVisitor::value(const Field& field, uint64_t& v) {
  if (field.applies) text(field, std::to_string(v));
}
void TextVisitor::value(const Field& field, double& v) {
  if (field.applies) text(field, write_double(v));
}
void TextVisitor::value(const Field& field, bool& v) {
  if (field.applies) text(field, v ? "true" : "false");
}
void TextVisitor::value(const Field& field, std::vector<std::string>& v) {
  if (!field.applies) return;
  std::string list;
  for (const std::string& item : v) list += (list.empty() ? "" : ", ") + write_text(item);
  text(field, v.size() == 1 ? list : "[" + list + "]");
}
void TextVisitor::choice(const Field& field, size_t& index) {
  if (field.applies) text(field, field.choices[index]);
}

namespace {

class RulePrinter : public TextVisitor {
 public:
  explicit RulePrinter(bool keep_scope) : keep_scope_(keep_scope) {}
  std::string result() const { return "{" + text_ + "}"; }

  void value(const Field& field, std::string& v) override {
    if (!v.empty()) TextVisitor::value(field, v);
  }
  void value(const Field& field, bool& v) override {
    if (v) TextVisitor::value(field, v);
  }
  void value(const Field& field, std::vector<std::string>& v) override {
    if (!v.empty()) TextVisitor::value(field, v);
  }
  // A cell's defaults are the first choices; the scope's default depends on the table, so it is kept as
  // given.
  void choice(const Field& field, size_t& index) override {
    const std::string_view key = field.key;
    if (index != 0 || key == "format" || (key == "scale_scope" && keep_scope_))
      TextVisitor::choice(field, index);
  }
  void text(const Field& field, const std::string& value) override {
    text_ += (text_.empty() ? "" : ", ") + std::string(field.key) + ": " + value;
  }

 private:
  bool keep_scope_;
  std::string text_;
};

class RecipePrinter : public TextVisitor {
 public:
  const std::string& result() const { return out_; }

  void text(const Field& field, const std::string& value) override {
    line(std::string(field.key) + ": " + value);
  }
  bool enter(const Field& field) override { return TextVisitor::enter(field) && open(field.key, 1); }
  bool enter_optional(const Field& field, bool& present) override {
    return TextVisitor::enter_optional(field, present) && open(field.key, 1);
  }
  size_t enter_list(const Field& field, size_t size) override {
    open(field.key, 1);
    return TextVisitor::enter_list(field, size);
  }
  bool enter_item(size_t index) override {
    item();
    levels_.push_back({1, out_.size(), true});
    return TextVisitor::enter_item(index);
  }
  bool enter_kind(size_t index, const std::vector<Field>& kinds, size_t& kind) override {
    item();
    open(kinds[kind].key, 2);
    return TextVisitor::enter_kind(index, kinds, kind);
  }
  void leave() override {
    close();
    TextVisitor::leave();
  }
  void precision(const Field& field, PrecisionSpec& v) override {
    bool any_rule = false;
    for (const auto& table : v.tables) any_rule = any_rule || !table.empty();
    if (!any_rule) return;
    open(field.key, 1);
    if (!v.preset.empty()) line(std::string(expanded_from_field().key) + ": " + v.preset);
    for (size_t t = 0; t < kNumRecipeTables; ++t) {
      if (v.tables[t].empty()) continue;
      line(std::string(kTableNames[t]) + ":");
      for (const RuleSpec& rule : v.tables[t]) line("  - " + rule_text(rule, t));
    }
    close();
  }

 private:
  struct Level {
    int indents;   // that the open map or list added
    size_t begin;  // of its key's line in out_
    bool dash;     // that line was the first of a list item
  };

  void item() {
    ++depth_;
    dash_ = true;
  }
  bool open(const std::string& key, int indents) {
    levels_.push_back({indents, out_.size(), dash_});
    line(key + ":");
    ++depth_;
    return true;
  }
  // A key without anything below it would read back as null: it is left out, as the keys below it were.
  void close() {
    const Level level = levels_.back();
    levels_.pop_back();
    depth_ -= level.indents;
    const bool empty = level.begin < out_.size() && out_.find('\n', level.begin) + 1 == out_.size();
    if (!empty || out_[out_.size() - 2] != ':') return;
    out_.resize(level.begin);
    dash_ = level.dash;
  }
  void line(const std::string& content) {
    std::string indent(static_cast<size_t>(depth_) * 2, ' ');
    if (dash_) indent[indent.size() - 2] = '-';
    dash_ = false;
    out_ += indent + content + "\n";
  }

  int depth_ = 0;
  bool dash_ = false;  // the next line begins a list item
  std::vector<Level> levels_;
  std::string out_;
};

class Flattener : public TextVisitor {
 public:
  std::vector<FlatKey> keys;

  void text(const Field& field, const std::string& value) override {
    keys.push_back({path_of(field), value, field.resume});
  }
  // Where a rule came from does not matter, what it says does.
  void precision(const Field& field, PrecisionSpec& v) override {
    for (size_t t = 0; t < kNumRecipeTables; ++t) {
      for (size_t i = 0; i < v.tables[t].size(); ++i) {
        RuleSpec rule = v.tables[t][i];
        rule.from_preset = false;
        keys.push_back({path_of(field) + "." + kTableNames[t] + "[" + std::to_string(i) + "]",
                        rule_text(rule, t), field.resume});
      }
    }
  }
};

}  // namespace

std::string rule_text(const RuleSpec& rule, size_t table) {
  RuleSpec copy = rule;
  RulePrinter printer(rule.scale_scope_given);
  visit_rule(printer, copy, table);
  return printer.result();
}

std::string print_recipe(const Recipe& recipe) {
  Recipe copy = recipe;
  RecipePrinter printer;
  visit_recipe(printer, copy);
  return printer.result();
}

std::vector<FlatKey> flatten(const Recipe& recipe) {
  Recipe copy = recipe;
  Flattener flattener;
  visit_recipe(flattener, copy);
  return std::move(flattener.keys);
}

}  // namespace fp4t
