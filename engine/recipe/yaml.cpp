#include "engine/recipe/yaml.h"

#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <sstream>
#include <unordered_set>

#include "kernels/base/text.h"

namespace fp4t {

namespace {

// Builds the tree from the parser's events: the only interface of yaml-cpp that shows duplicates, quotes
// and aliases as written.
class TreeBuilder : public YAML::EventHandler {
 public:
  // Aliases of aliases can stand for more values than memory holds; whoever walks the tree would visit all.
  static constexpr int64_t kMostNodes = 1'000'000;
  struct Expansion {
    SourcePlace place;
  };

  TreeBuilder(const std::string& file, Problems& problems) : file_(file), problems_(problems) {}

  YamlPtr root() const { return root_; }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++num_documents_ == 2) {
      problems_.add(place(mark), "",
                    "a second YAML document; a recipe is one document, without `---` inside");
    }
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    auto node = std::make_shared<YamlNode>();
    node->place = place(mark);
    finish(node, anchor);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto it = anchors_.find(anchor);
    if (it != anchors_.end()) return add(it->second, place(mark));
    problems_.add(place(mark), "", "an alias inside the value that it stands for");
    auto node = std::make_shared<YamlNode>();
    node->kind = YamlNode::Kind::kScalar;
    node->place = place(mark);
    node->text = "alias";  // stands in, so that the one problem starts no others
    add(node, node->place);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    check_tag(mark, tag);
    auto node = std::make_shared<YamlNode>();
    node->kind = YamlNode::Kind::kScalar;
    node->place = place(mark);
    node->text = value;
    node->quoted = tag == "!";
    finish(node, anchor);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, YamlNode::Kind::kList);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, YamlNode::Kind::kMap);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Frame {
    std::shared_ptr<YamlNode> node;
    YAML::anchor_t anchor = 0;
    bool has_key = false;
    std::string key;
    SourcePlace key_place;
    std::unordered_set<std::string> keys;  // of the map so far
  };

  SourcePlace place(const YAML::Mark& mark) const { return {file_, mark.line + 1, mark.column + 1}; }

  void check_tag(const YAML::Mark& mark, const std::string& tag) {
    if (!tag.empty() && tag != "?" && tag != "!") {
      problems_.add(place(mark), "",
                    "a YAML tag (" + tag + "); tags are not supported, write the value alone");
    }
  }
  void open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, YamlNode::Kind kind) {
    check_tag(mark, tag);
    Frame frame;
    frame.node = std::make_shared<YamlNode>();
    frame.node->kind = kind;
    frame.node->place = place(mark);
    frame.anchor = anchor;
    stack_.push_back(std::move(frame));
  }
  void close() {
    const Frame frame = std::move(stack_.back());
    stack_.pop_back();
    finish(frame.node, frame.anchor);
  }
  void finish(const std::shared_ptr<YamlNode>& node, YAML::anchor_t anchor) {
    if (anchor != 0) anchors_[anchor] = node;
    add(node, node->place);
  }

  void add(const YamlPtr& node, const SourcePlace& at) {
    if (stack_.empty()) {
      if (num_documents_ == 1) root_ = node;
      return;
    }
    Frame& frame = stack_.back();
    frame.node->num_nodes += node->num_nodes;
    if (frame.node->num_nodes > kMostNodes) throw Expansion{at};
    if (frame.node->kind == YamlNode::Kind::kList) {
      frame.node->items.push_back(node);
    } else if (!frame.has_key) {
      take_key(frame, *node, at);
    } else {
      frame.has_key = false;
      add_entry(frame, node);
    }
  }
  void take_key(Frame& frame, const YamlNode& node, const SourcePlace& at) {
    frame.has_key = true;
    frame.key_place = at;
    frame.key = node.text;
    if (node.kind != YamlNode::Kind::kScalar || node.text.empty()) {
      problems_.add(at, "", "found " + describe(node) + " as a key; keys are names");
      frame.key.clear();
    } else if (node.text == "<<" && !node.quoted) {
      problems_.add(at, "", "found a merge key (<<); merging maps is not supported, repeat the keys");
      frame.key.clear();
    }
  }
  void add_entry(Frame& frame, const YamlPtr& node) {
    if (frame.key.empty()) return;  // already a problem
    if (!frame.keys.insert(frame.key).second) {
      const std::string first = problems_.is_full() ? "" : place_text(frame.node->find(frame.key)->place);
      problems_.add(frame.key_place, "", "duplicate key " + frame.key + "; first at " + first);
      return;
    }
    if (node->kind == YamlNode::Kind::kNull) {
      // The parser places a missing value where it noticed, often in the next line.
      auto null = std::make_shared<YamlNode>();
      null->place = frame.key_place;
      frame.node->entries.push_back({frame.key, frame.key_place, null});
      return;
    }
    frame.node->entries.push_back({frame.key, frame.key_place, node});
  }

  std::string file_;
  Problems& problems_;
  int num_documents_ = 0;
  YamlPtr root_;
  std::vector<Frame> stack_;
  std::map<YAML::anchor_t, YamlPtr> anchors_;
};

// The parser's own words for a tab ("illegal map value") help nobody.
void find_tabs(const std::string& text, const std::string& file, Problems& problems) {
  std::istringstream in(text);
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const size_t content = line.find_first_not_of(" \t\r");
    const size_t tab = line.find('\t');
    if (content == std::string::npos || line[content] == '#' || tab >= content) continue;
    problems.add({file, number, static_cast<int>(tab) + 1}, "",
                 "a tab in the indentation; indent with spaces");
    return;  // one is enough: the file is indented with tabs
  }
}

// The column of the first byte that UTF-8 or YAML does not allow in a line, from 1; 0: none.
int first_bad_byte(const std::string& line) {
  for (size_t i = 0; i < line.size();) {
    const size_t size = utf8_length(line, i);
    const auto first = static_cast<unsigned char>(line[i]);
    const bool ends_line = first == '\r' && i + 1 == line.size();
    if (size == 0 || (first < 0x20 && first != '\t' && !ends_line) || first == 0x7F) {
      return static_cast<int>(i) + 1;
    }
    i += size;
  }
  return 0;
}

void find_binary(const std::string& text, const std::string& file, Problems& problems) {
  std::istringstream in(text);
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const int column = first_bad_byte(line);
    if (column == 0) continue;
    char shown[8];
    std::snprintf(shown, sizeof shown, "0x%02x",
                  static_cast<unsigned>(static_cast<unsigned char>(line[static_cast<size_t>(column) - 1])));
    problems.add(
        {file, number, column}, "",
        std::string("found the byte ") + shown + "; a recipe is UTF-8 text, its lines end in LF or CR LF");
    return;  // one is enough: the file is something else
  }
}

}  // namespace

const YamlEntry* YamlNode::find(const std::string& key) const {
  for (const YamlEntry& entry : entries) {
    if (entry.key == key) return &entry;
  }
  return nullptr;
}

YamlPtr parse_yaml(const std::string& text, const std::string& file, Problems& problems) {
  find_binary(text, file, problems);
  if (problems.empty()) find_tabs(text, file, problems);
  if (!problems.empty()) return nullptr;
  std::istringstream in(text);
  TreeBuilder builder(file, problems);
  try {
    YAML::Parser parser(in);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const TreeBuilder::Expansion& e) {
    problems.add(e.place, "",
                 "aliases make more than " + std::to_string(TreeBuilder::kMostNodes) + " values of the text");
    return nullptr;
  } catch (const YAML::DeepRecursion& e) {
    problems.add({file, e.mark.line + 1, e.mark.column + 1}, "", "lists or maps nested too deeply");
    return nullptr;
  } catch (const YAML::Exception& e) {
    const SourcePlace place =
        e.mark.is_null() ? SourcePlace{file, 1, 1} : SourcePlace{file, e.mark.line + 1, e.mark.column + 1};
    problems.add(place, "", "not YAML: " + e.msg);
    return nullptr;
  }
  return builder.root();
}

std::string describe(const YamlNode& node) {
  switch (node.kind) {
    case YamlNode::Kind::kNull:
      return "no value (null)";
    case YamlNode::Kind::kScalar: {
      const std::string shown = printable(node.text, 60);
      return node.quoted ? "the text \"" + shown + "\" in quotes" : shown;
    }
    case YamlNode::Kind::kList:
      return "a list of " + std::to_string(node.items.size());
    case YamlNode::Kind::kMap:
      return "a map";
  }
  return "?";
}

}  // namespace fp4t
