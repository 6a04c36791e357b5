#include "engine/tokens/tokenizer_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "engine/metrics/json_line.h"
#include "engine/tokens/split_pattern.h"
#include "engine/tokens/utf8.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

using Json = nlohmann::json;

constexpr int64_t kMostTokens = 1 << 22;  // ten times any published vocabulary

// GPT-2's words: what the pre-tokenizer ByteLevel cuts by where it has no pattern beside it.
constexpr const char* kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

class FileReader {
 public:
  FileReader(const std::string& path, const Json& root) : path_(path), root_(root) {}

  TokenizerFile run() {
    if (!root_.is_object() || !root_.contains("model")) fail("", "no tokenizer.json: it has no 'model'");
    only_keys(root_, "",
              {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
               "post_processor", "decoder", "model"});
    model(at(root_, "", "model"));
    added_tokens();
    normalizer(part("normalizer"), "normalizer");
    pre_tokenizer(part("pre_tokenizer"), "pre_tokenizer", true);
    if (!ends_in_bytes_) fail("pre_tokenizer", "not byte-level: it must end in a ByteLevel");
    decoder(part("decoder"), "decoder");
    post_processor(part("post_processor"), "post_processor");
    return std::move(file_);
  }

 private:
  [[noreturn]] void fail(const std::string& where, const std::string& what) const {
    throw BadDataError(printable(path_ + ": " + where + (where.empty() ? "" : ": ") + what, 4000));
  }
  [[noreturn]] void refuse(const std::string& where, const std::string& what) const {
    fail(where, what + " is not supported");
  }

  const Json& part(const char* key) const {
    static const Json kNull;
    return root_.contains(key) ? root_[key] : kNull;
  }
  const Json& at(const Json& object, const std::string& where, const char* key) const {
    if (!object.is_object() || !object.contains(key)) fail(where, std::string("has no '") + key + "'");
    return object[key];
  }
  std::string text(const Json& object, const std::string& where, const char* key) const {
    const Json& value = at(object, where, key);
    if (!value.is_string()) fail(where + "." + key, "is no text");
    return value.get<std::string>();
  }
  bool flag(const Json& object, const std::string& where, const char* key, bool absent) const {
    if (!object.contains(key) || object[key].is_null()) return absent;
    if (!object[key].is_boolean()) fail(where + "." + key, "is neither true nor false");
    return object[key].get<bool>();
  }
  std::string type_of(const Json& object, const std::string& where) const {
    return text(object, where, "type");
  }
  const Json& list(const Json& object, const std::string& where, const char* key) const {
    const Json& value = at(object, where, key);
    if (!value.is_array()) fail(where + "." + key, "is no list");
    return value;
  }
  // A key that is not known here may change ids.
  void only_keys(const Json& object, const std::string& where, const std::set<std::string>& known) const {
    for (const auto& [key, value] : object.items()) {
      if (known.count(key) == 0) refuse(where + (where.empty() ? "" : ".") + key, "this key");
    }
  }
  int32_t id_of(const Json& value, const std::string& where) const {
    if (!value.is_number_integer()) fail(where, "is no whole number");
    const auto id = value.get<int64_t>();
    if (id < 0 || id >= kMostTokens)
      fail(where, detail::concat("is ", id, "; allowed: 0 to ", kMostTokens - 1));
    return static_cast<int32_t>(id);
  }

  void model(const Json& m) {
    if (!m.is_object()) fail("model", "is no map");
    const std::string type = m.contains("type") ? text(m, "model", "type") : "BPE";  // old files do not say
    if (type != "BPE") refuse("model.type", type);
    only_keys(m, "model",
              {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
               "byte_fallback", "ignore_merges", "vocab", "merges"});
    if (m.contains("dropout") && !m["dropout"].is_null() && m["dropout"] != 0)
      refuse("model.dropout", m["dropout"].dump());
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (m.contains(key) && !m[key].is_null() && m[key] != "")
        refuse(std::string("model.") + key, m[key].dump());
    }
    if (flag(m, "model", "byte_fallback", false)) {
      refuse("model.byte_fallback",
             "true (a SentencePiece vocabulary; its .model file is read by tokenizer.kind "
             "sentencepiece)");
    }
    file_.ignore_merges = flag(m, "model", "ignore_merges", false);
    vocabulary(at(m, "model", "vocab"));
    merges(list(m, "model", "merges"));
  }

  void place(int32_t id, const std::string& token, const std::string& where) {
    const auto i = static_cast<size_t>(id);
    if (file_.tokens.size() <= i) {
      file_.tokens.resize(i + 1);
      file_.spelling.resize(i + 1);
    }
    if (!file_.tokens[i].empty() && file_.tokens[i] != token) {
      fail(where, detail::concat("has the id ", id, ", which another token has"));
    }
    file_.tokens[i] = token;
  }

  void vocabulary(const Json& vocab) {
    if (!vocab.is_object()) fail("model.vocab", "is no map");
    ids_.reserve(vocab.size());
    for (const auto& [token, value] : vocab.items()) {
      const std::string where = "model.vocab['" + token + "']";
      const int32_t id = id_of(value, where);
      if (token.empty()) continue;
      std::string bytes;
      const bool spelt = bytes_of_alphabet(token, bytes);
      place(id, spelt ? bytes : token, where);
      if (spelt) file_.spelling[static_cast<size_t>(id)] = bytes;
      ids_.emplace(token, id);
    }
  }

  void merges(const Json& all) {
    file_.merges.reserve(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      const Json& item = all[i];
      std::string left, right;
      if (item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string()) {
        left = item[0].get<std::string>();
        right = item[1].get<std::string>();
      } else if (item.is_string()) {
        const std::string& pair = item.get_ref<const std::string&>();
        const size_t space = pair.find(' ');
        if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos) {
          fail(merge(i), "is '" + pair + "', not two tokens with a space between");
        }
        left = pair.substr(0, space);
        right = pair.substr(space + 1);
      } else {
        fail(merge(i), "is neither a text nor a pair of texts");
      }
      file_.merges.push_back({merged(left, i), merged(right, i), merged(left + right, i)});
    }
  }
  static std::string merge(size_t i) { return detail::concat("model.merges[", i, "]"); }
  int32_t merged(const std::string& token, size_t i) const {
    const auto found = ids_.find(token);
    if (found == ids_.end()) fail(merge(i), "names '" + token + "', which is not in model.vocab");
    return found->second;
  }

  void added_tokens() {
    if (part("added_tokens").is_null()) return;
    const Json& all = list(root_, "", "added_tokens");
    for (size_t i = 0; i < all.size(); ++i) {
      const std::string where = detail::concat("added_tokens[", i, "]");
      const Json& item = all[i];
      AddedToken token;
      token.content = text(item, where, "content");
      only_keys(item, where, {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      token.id = id_of(at(item, where, "id"), where + ".id");
      token.special = flag(item, where, "special", false);
      token.single_word = flag(item, where, "single_word", false);
      token.lstrip = flag(item, where, "lstrip", false);
      token.rstrip = flag(item, where, "rstrip", false);
      token.normalized = flag(item, where, "normalized", !token.special);
      if (token.content.empty()) continue;
      const auto known = ids_.find(token.content);
      if (known != ids_.end() && known->second != token.id) {
        fail(where, detail::concat("'", token.content, "' has the id ", token.id, " here and ", known->second,
                                   " in model.vocab"));
      }
      const auto id = static_cast<size_t>(token.id);
      if (known != ids_.end()) file_.tokens[id].clear();  // it stands for its content, not for a spelling
      place(token.id, token.content, where);
      if (token.special) file_.spelling[id].clear();
      file_.added.push_back(std::move(token));
    }
  }

  void normalizer(const Json& n, const std::string& where) {
    if (n.is_null()) return;
    const std::string type = type_of(n, where);
    if (type == "NFC") {
      file_.composes = true;
    } else if (type == "Sequence") {
      const Json& all = list(n, where, "normalizers");
      for (size_t i = 0; i < all.size(); ++i)
        normalizer(all[i], detail::concat(where, ".normalizers[", i, "]"));
    } else {
      refuse(where + ".type", type);
    }
  }

  void pre_tokenizer(const Json& p, const std::string& where, bool is_last) {
    if (p.is_null()) return;
    const std::string type = type_of(p, where);
    if (type == "Sequence") {
      const Json& all = list(p, where, "pretokenizers");
      for (size_t i = 0; i < all.size(); ++i) {
        pre_tokenizer(all[i], detail::concat(where, ".pretokenizers[", i, "]"),
                      is_last && i + 1 == all.size());
      }
    } else if (type == "Split") {
      split(p, where);
    } else if (type == "Digits") {
      only_keys(p, where, {"type", "individual_digits"});
      add_split(flag(p, where, "individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)", where, true);
    } else if (type == "ByteLevel") {
      only_keys(p, where, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
      if (!is_last) refuse(where, "a ByteLevel before other steps");
      if (flag(p, where, "add_prefix_space", true))
        file_.steps.push_back({CutStep::Kind::kPrefixSpace, "", true});
      if (flag(p, where, "use_regex", true)) add_split(kGpt2Words, where, true);
      ends_in_bytes_ = true;
    } else {
      refuse(where + ".type", type);
    }
  }

  void split(const Json& p, const std::string& where) {
    only_keys(p, where, {"type", "pattern", "behavior", "invert"});
    const Json& pattern = at(p, where, "pattern");
    const std::string behavior = text(p, where, "behavior");
    const bool invert = flag(p, where, "invert", false);
    // Inverted, the matches are what stays: the same pieces as Isolated, or without those between them.
    if (behavior != "Isolated" && !(behavior == "Removed" && invert)) {
      refuse(where + ".behavior", behavior + (invert ? " with invert" : ""));
    }
    if (pattern.is_object() && pattern.contains("Regex")) {
      add_split(text(pattern, where + ".pattern", "Regex"), where + ".pattern.Regex", behavior == "Isolated");
    } else if (pattern.is_object() && pattern.contains("String")) {
      const std::string literal = text(pattern, where + ".pattern", "String");
      if (literal.empty()) fail(where + ".pattern.String", "is empty");
      file_.steps.push_back({CutStep::Kind::kSplit, literal_pattern(literal), behavior == "Isolated"});
    } else {
      fail(where + ".pattern", "is neither a Regex nor a String");
    }
  }

  void add_split(const std::string& pattern, const std::string& where, bool keeps_gaps) {
    try {
      file_.steps.push_back({CutStep::Kind::kSplit, translate_pattern(pattern), keeps_gaps});
      SplitPattern compiled(file_.steps.back().pattern);
    } catch (const BadDataError& e) {
      fail(where, e.what());
    }
  }

  void decoder(const Json& d, const std::string& where) const {
    if (d.is_null()) return;
    const std::string type = type_of(d, where);
    if (type == "Sequence") {
      const Json& all = list(d, where, "decoders");
      for (size_t i = 0; i < all.size(); ++i) decoder(all[i], detail::concat(where, ".decoders[", i, "]"));
    } else if (type != "ByteLevel") {
      refuse(where + ".type", type);
    }
  }

  void post_processor(const Json& p, const std::string& where) {
    if (p.is_null()) return;
    const std::string type = type_of(p, where);
    if (type == "Sequence") {
      const Json& all = list(p, where, "processors");
      for (size_t i = 0; i < all.size(); ++i)
        post_processor(all[i], detail::concat(where, ".processors[", i, "]"));
    } else if (type == "TemplateProcessing") {
      const Json& single = list(p, where, "single");
      for (size_t i = 0; i < single.size() && single[i].is_object() && !single[i].contains("Sequence"); ++i) {
        const std::string item = detail::concat(where, ".single[", i, "]");
        file_.prefix.push_back(special_id(text(at(single[i], item, "SpecialToken"), item, "id"), item));
      }
    } else if (type != "ByteLevel") {  // which trims offsets
      refuse(where + ".type", type);
    }
  }
  int32_t special_id(const std::string& content, const std::string& where) const {
    for (const AddedToken& token : file_.added) {
      if (token.content == content) return token.id;
    }
    fail(where, "names '" + content + "', which is not among the added_tokens");
  }

  std::string path_;
  const Json& root_;
  TokenizerFile file_;
  std::unordered_map<std::string, int32_t> ids_;  // of model.vocab, as spelt there
  bool ends_in_bytes_ = false;
};

}  // namespace

TokenizerFile read_tokenizer_file(const std::string& path) {
  const Json root = parse_json(read_text_file(path), printable(path));
  return FileReader(path, root).run();
}

}  // namespace fp4t
