#include "engine/recipe/bind.h"

#include <algorithm>

#include "engine/recipe/fields.h"
#include "engine/recipe/presets.h"
#include "engine/recipe/scalars.h"
#include "engine/recipe/tables.h"
#include "engine/recipe/visit_path.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// Names that other trainers use, or that a section had before. Key: the end of the path.
struct Renamed {
  const char *map, *before, *now;
};
constexpr Renamed kRenamed[] = {
    {"optimizer", "lr", "learning_rate"},
    {"optimizer", "muon_lr", "muon_learning_rate"},
    {"optimizer", "grad_clip", "clip_norm"},
    {"optimizer", "max_grad_norm", "clip_norm"},
    {"model", "num_layers", "layers"},
    {"model", "hidden_size", "hidden"},
    {"model", "num_attention_heads", "heads"},
    {"model", "num_key_value_heads", "kv_heads"},
    {"model", "intermediate_size", "mlp_hidden"},
    {"model", "vocab_size", "vocabulary"},
    {"model", "max_position_embeddings", "max_positions"},
    {"model", "rope_theta", "rope.theta"},
    {"model", "tie_word_embeddings", "tied_head"},
    {"init", "path", "model.from"},
    {"moe", "num_experts", "experts"},
    {"sampling", "num_generations", "samples"},
    {"dtypes", "grads", "gradients"},
};

std::string last_name(const std::string& path) {
  std::string name = path.substr(path.rfind('.') == std::string::npos ? 0 : path.rfind('.') + 1);
  return name.substr(0, name.find('['));
}

class BindVisitor : public PathVisitor {
 public:
  BindVisitor(const YamlNode& root, std::map<std::string, FieldPlace>& places, Problems& problems)
      : places_(places), problems_(problems) {
    maps_.push_back({&root, {}});
  }

  void value(const Field& field, std::string& v) override {
    const YamlNode* node = scalar(field, allowed_texts(field));
    if (!node) return;
    if (!field.choices.empty() && std::ranges::find(field.choices, node->text) == field.choices.end()) {
      wrong(field, *node, suggest_choice(field, node->text));
    } else if (is_text(field, *node)) {
      v = node->text;
    }
  }
  void value(const Field& field, int64_t& v) override { number(field, v, read_int); }
  void value(const Field& field, uint64_t& v) override { number(field, v, read_uint); }
  void value(const Field& field, double& v) override { number(field, v, read_double); }
  void value(const Field& field, bool& v) override {
    const YamlNode* node = scalar(field, "true or false");
    if (!node) return;
    const std::string why = node->quoted ? "quoted, so it is a text" : read_bool(node->text, v);
    if (!why.empty()) wrong(field, *node, why, "true or false");
  }
  void value(const Field& field, std::vector<std::string>& v) override {
    const YamlNode* node = take(field);
    if (!node) return;
    if (node->kind == YamlNode::Kind::kScalar) {
      if (is_text(field, *node)) v = {node->text};
    } else if (node->kind == YamlNode::Kind::kList) {
      v.clear();
      for (const YamlPtr& item : node->items) {
        if (item->kind != YamlNode::Kind::kScalar) {
          wrong(field, *item, "", "a text, or a list of texts");
        } else if (is_text(field, *item)) {
          v.push_back(item->text);
        }
      }
    } else {
      wrong(field, *node, "", "a text, or a list of texts");
    }
  }
  void choice(const Field& field, size_t& index) override {
    const YamlNode* node = scalar(field, allowed_texts(field));
    if (!node) return;
    const auto it = std::ranges::find(field.choices, node->text);
    if (it == field.choices.end()) return wrong(field, *node, suggest_choice(field, node->text));
    index = static_cast<size_t>(it - field.choices.begin());
  }

  bool enter(const Field& field) override {
    const YamlNode* node = take(field);
    if (!node) return false;
    return open_map(*node, path_of(field));
  }
  bool enter_optional(const Field& field, bool& present) override {
    const YamlNode* node = take(field);
    present = node && open_map(*node, path_of(field));
    return present;
  }
  size_t enter_list(const Field& field, size_t) override {
    const YamlNode* node = take(field);
    if (node && node->kind != YamlNode::Kind::kList) {
      wrong(field, *node, "", "a list");
      node = nullptr;
    }
    push(path_of(field));
    maps_.push_back({node, {}});
    return node ? node->items.size() : 0;
  }
  bool enter_item(size_t index) override { return open_map(*item(index), path_of_item(index)); }
  bool enter_kind(size_t index, const std::vector<Field>& kinds, size_t& kind) override {
    const YamlPtr node = item(index);
    const std::string path = path_of_item(index);
    std::vector<std::string> names;
    for (const Field& f : kinds) names.emplace_back(f.key);
    const std::string allowed = "; allowed: a map with one key, " + list_names(names);
    places_[path] = {node->place, node->place};
    if (node->kind != YamlNode::Kind::kMap || node->entries.size() != 1) {
      const std::string found = node->kind == YamlNode::Kind::kMap
                                    ? "a map of " + std::to_string(node->entries.size()) + " keys"
                                    : describe(*node);
      problems_.add(node->place, path, "found " + found + allowed);
      return false;
    }
    const YamlEntry& entry = node->entries[0];
    const auto it = std::ranges::find(names, entry.key);
    if (it == names.end()) {
      problems_.add(entry.place, path,
                    "unknown key " + entry.key + allowed + "; " + suggestion(entry.key, names));
      return false;
    }
    kind = static_cast<size_t>(it - names.begin());
    return open_map(*entry.value, path + "." + entry.key, entry.place);
  }
  void leave() override {
    const Open open = std::move(maps_.back());
    if (open.node && open.node->kind == YamlNode::Kind::kMap) report_unknown(open);
    maps_.pop_back();
    pop();
  }

  void precision(const Field& field, PrecisionSpec& v) override {
    if (!enter(field)) return;
    precision_map(v);
    leave();
  }

  // The keys of the map on top: tables, or a preset with overrides.
  void precision_map(PrecisionSpec& v) {
    value(preset_field(), v.preset);
    const bool preset = !v.preset.empty();
    std::string expanded;
    value(expanded_from_field(), expanded);
    tables(v);
    const YamlNode* given = peek(override_field());
    if (enter(override_field())) {
      if (!preset && !problems_.touches(path_of(preset_field()))) {
        problems_.add(given->place, path(),
                      "has no effect without preset; write the tables beside it instead");
      }
      tables(v);
      leave();
    }
    if (preset) {
      for (size_t t = 0; t < kNumRecipeTables; ++t) {
        const YamlNode* table = peek(table_field(t));
        if (!table) continue;
        problems_.add(table->place, path_of(table_field(t)),
                      "a table beside preset; rules in front of the preset's go under override");
      }
      if (!expanded.empty()) {
        problems_.add(maps_.back().node->place, path_of(expanded_from_field()),
                      "contradicts preset; print-config writes it in preset's stead");
      }
      append_preset(v.preset, v);
    } else {
      v.preset = expanded;
    }
  }

  // Keys of the map on top that no visit has asked for.
  void finish_root() { report_unknown(maps_.back()); }

 private:
  struct Open {
    const YamlNode* node;  // a map, or a list whose items are being visited; null when absent
    std::vector<std::string> known;
  };

  void tables(PrecisionSpec& v) {
    for (size_t t = 0; t < kNumRecipeTables; ++t) {
      const Field field = table_field(t);
      const size_t begin = v.tables[t].size();
      const size_t size = enter_list(field, 0);
      v.tables[t].resize(begin + size);
      for (size_t i = 0; i < size; ++i) {
        RuleSpec& rule = v.tables[t][begin + i];
        rule.place = item(i)->place;
        rule.path = path_of_item(i);
        if (!enter_item(i)) continue;
        rule.scale_scope_given = peek_key("scale_scope") != nullptr;
        visit_rule(*this, rule, t);
        leave();
      }
      leave();
    }
  }

  const YamlNode* peek_key(const std::string& key) const {
    const YamlNode* map = maps_.back().node;
    const YamlEntry* entry = map ? map->find(key) : nullptr;
    return entry ? entry->value.get() : nullptr;
  }
  const YamlNode* peek(const Field& field) const { return peek_key(field.key); }

  // The value of a key of the map on top, or null when it is not given (or is a problem).
  const YamlNode* take(const Field& field) {
    Open& open = maps_.back();
    open.known.emplace_back(field.key);
    if (!open.node) return nullptr;
    const YamlEntry* entry = open.node->find(field.key);
    if (!entry) return nullptr;
    places_[path_of(field)] = {entry->place, entry->value->place};
    if (entry->value->kind == YamlNode::Kind::kNull) {
      wrong(field, *entry->value, "",
            field.is_required ? "a value" : "a value; leave the key out for the default");
      return nullptr;
    }
    return entry->value.get();
  }
  const YamlNode* scalar(const Field& field, const std::string& allowed) {
    const YamlNode* node = take(field);
    if (!node || node->kind == YamlNode::Kind::kScalar) return node;
    wrong(field, *node, "", allowed);
    return nullptr;
  }
  YamlPtr item(size_t index) const { return maps_.back().node->items[index]; }

  template <class T>
  void number(const Field& field, T& v, std::string (*read)(const std::string&, T&)) {
    const std::string allowed = describe_numbers(field, !std::is_same_v<T, double>);
    const YamlNode* node = scalar(field, allowed);
    if (!node) return;
    if (node->quoted) return wrong(field, *node, "write the number without quotes", allowed);
    T parsed{};
    const std::string why = read(node->text, parsed);
    if (!why.empty()) return wrong(field, *node, why, allowed);
    const auto as_double = static_cast<double>(parsed);
    if (as_double < field.low || as_double > field.high || (field.low_open && as_double == field.low)) {
      return wrong(field, *node, "", allowed);
    }
    v = parsed;
  }

  bool open_map(const YamlNode& node, const std::string& path) { return open_map(node, path, node.place); }
  bool open_map(const YamlNode& node, const std::string& path, const SourcePlace& key) {
    places_.try_emplace(path, FieldPlace{key, node.place});
    if (node.kind != YamlNode::Kind::kMap) {
      problems_.add(node.place, path, "found " + describe(node) + "; allowed: a map of keys");
      return false;
    }
    push(path);
    maps_.push_back({&node, {}});
    return true;
  }

  // An empty text would be taken for a key that was left out.
  bool is_text(const Field& field, const YamlNode& node) {
    const std::string& text = node.text;
    const bool is_empty = text.empty() && *field.empty_means == '\0';
    const bool has_nul = text.find('\0') != std::string::npos;
    const bool is_broken = field.is_one_line && printable(text, std::string::npos) != text;
    if (is_empty) {
      wrong(field, node, "",
            "not empty, but " + allowed_texts(field) +
                (field.is_required ? "" : "; leave the key out for the default"));
    } else if (has_nul) {
      wrong(field, node, "with a NUL character");
    } else if (is_broken) {
      wrong(field, node, "with control characters", "a text of one line");
    }
    return !is_empty && !has_nul && !is_broken;
  }
  void wrong(const Field& field, const YamlNode& node, const std::string& why, const std::string& allowed) {
    problems_.add(
        node.place, path_of(field),
        "found " + describe(node) + (why.empty() ? "" : " (" + why + ")") + "; allowed: " + allowed);
  }
  void wrong(const Field& field, const YamlNode& node, const std::string& why) {
    wrong(field, node, why, allowed_texts(field));
  }
  static std::string allowed_texts(const Field& field) {
    if (!field.choices.empty()) return list_names(field.choices);
    return field.examples.empty() ? "a text" : "a text such as " + list_names(field.examples);
  }
  static std::string suggest_choice(const Field& field, const std::string& text) {
    const std::string hint = suggestion(text, field.choices);
    return hint.starts_with("did you mean") ? hint : "";
  }

  void report_unknown(const Open& open) {
    for (const YamlEntry& entry : open.node->entries) {
      if (std::ranges::find(open.known, entry.key) != open.known.end()) continue;
      const std::string inner = path().empty() ? entry.key : path() + "." + entry.key;
      if (problems_.is_full()) {
        problems_.add(entry.place, inner, "unknown key");
        continue;
      }
      std::string hint = suggestion(entry.key, open.known);
      for (const Renamed& r : kRenamed) {
        if (entry.key == r.before && last_name(path()) == r.map) hint = std::string("renamed to ") + r.now;
      }
      problems_.add(entry.place, inner, "unknown key; " + hint);
    }
  }

  std::vector<Open> maps_;
  std::map<std::string, FieldPlace>& places_;
  Problems& problems_;
};

// After binding, when all values are known: required keys that are missing, and keys that have no effect
// beside the others.
class PresenceVisitor : public WalkVisitor {
 public:
  PresenceVisitor(const std::map<std::string, FieldPlace>& places, Problems& problems)
      : places_(places), unread_(problems), problems_(problems) {}

  void any(const Field& field) override { check(field); }
  bool enter(const Field& field) override { return check(field) && WalkVisitor::enter(field); }
  bool enter_optional(const Field& field, bool& present) override {
    return check(field) && WalkVisitor::enter_optional(field, present);
  }
  size_t enter_list(const Field& field, size_t size) override {
    check(field);
    return WalkVisitor::enter_list(field, size);
  }
  bool enter_kind(size_t index, const std::vector<Field>& kinds, size_t& kind) override {
    return !unread_.has(path_of_item(index)) && WalkVisitor::enter_kind(index, kinds, kind);
  }
  void precision(const Field& field, PrecisionSpec& v) override {
    PrecisionSpec written = v;
    for (auto& table : written.tables) {
      std::erase_if(table, [this](const RuleSpec& rule) { return !places_.count(rule.path); });
    }
    WalkVisitor::precision(field, written);
  }

 private:
  // Whether to descend.
  bool check(const Field& field) {
    const std::string path = path_of(field);
    const bool given = places_.count(path) > 0;
    const bool conditional = *field.applies_when != '\0';
    if (unread_.has(path)) return false;
    // A neighbour that could not be read may be the one that the condition speaks of.
    if (conditional && unread_.has_inside(parent_path(path))) return true;
    if (given && !field.applies) {
      problems_.add(places_.at(path).key, path,
                    std::string("has no effect: it applies only when ") + field.applies_when);
      return false;
    }
    if (!given && field.applies && field.is_required) {
      problems_.add_at(places_, path, std::string("missing: ") + field.help);
      return false;
    }
    return field.applies;
  }

  const std::map<std::string, FieldPlace>& places_;
  const Problems unread_;  // as binding left them
  Problems& problems_;
};

}  // namespace

void bind_document(const YamlNode& root, const std::function<void(FieldVisitor&)>& visit, FieldPlaces& places,
                   Problems& problems) {
  places[""] = {root.place, root.place};
  BindVisitor bind(root, places, problems);
  visit(bind);
  bind.finish_root();
  PresenceVisitor presence(places, problems);
  visit(presence);
}

BoundRecipe bind_recipe(const YamlNode& root, Problems& problems) {
  BoundRecipe bound;
  bind_document(
      root, [&](FieldVisitor& v) { visit_recipe(v, bound.recipe); }, bound.places, problems);
  return bound;
}

PrecisionSpec bind_precision(const YamlNode& root, Problems& problems) {
  PrecisionSpec precision;
  std::map<std::string, FieldPlace> places;
  BindVisitor bind(root, places, problems);
  bind.precision_map(precision);
  bind.finish_root();
  return precision;
}

}  // namespace fp4t
