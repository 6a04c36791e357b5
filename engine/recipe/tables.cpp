#include "engine/recipe/tables.h"

#include <algorithm>

#include "engine/recipe/problems.h"

namespace fp4t {

namespace {

constexpr const char* kLayersForms = "5, 0-3, first 2, last 2, first 15% or last 12.5%";
constexpr const char* kStepsForms = "100-500 or 0-90%, which leave the end out";

// Reads one matcher; the first thing that is wrong stays as the reason.
class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) {}

  const char* why() const { return why_; }
  bool failed() const { return why_ != nullptr; }
  bool ends_with(char c) const { return rest_.ends_with(c); }
  bool is_done() const { return rest_.empty(); }
  void fail(const char* why) { why_ = failed() ? why_ : why; }

  bool take(std::string_view word) {
    if (failed() || !rest_.starts_with(word)) return false;
    rest_.remove_prefix(word.size());
    return true;
  }

  int64_t number() {
    size_t n = 0;
    int64_t value = 0;
    while (n < rest_.size() && n <= kMostDigits && is_digit(rest_[n]))
      value = value * 10 + (rest_[n++] - '0');
    if (n == 0) fail("a number is missing, or not a whole one");
    if (n > kMostDigits) fail("a number has more than twelve digits");
    if (n > 1 && rest_[0] == '0') fail("a number has a leading zero");
    if (!failed()) rest_.remove_prefix(n);
    return value;
  }

  // In millionths of a percent.
  int64_t percent() {
    int64_t value = number();
    if (value > 100) fail("a percentage is above 100");
    if (failed()) return 0;
    value *= kWholePercent / 100;
    if (!take(".")) return value;
    int64_t unit = kWholePercent / 100;
    size_t n = 0;
    while (n < rest_.size() && n <= kMostDecimals && is_digit(rest_[n])) {
      unit /= 10;
      value += unit * (rest_[n++] - '0');
    }
    if (n == 0 || n > kMostDecimals) fail("a percentage has one to six decimals");
    if (value > kWholePercent) fail("a percentage is above 100");
    if (!failed()) rest_.remove_prefix(n);
    return value;
  }

  void end() {
    if (!rest_.empty()) fail("it goes on where it should end");
  }

 private:
  static constexpr size_t kMostDigits = 12, kMostDecimals = 6;
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  std::string_view rest_;
  const char* why_ = nullptr;
};

std::string refusal_of(const std::string& text, const Reader& reader, const char* forms) {
  return "found " + text + " (" + reader.why() + "); allowed: " + forms;
}

}  // namespace

const std::vector<std::string>& gemm_module_names() {
  static const std::vector<std::string> names = {"attn.qkv",       "attn.out",        "mlp.gate_up",
                                                 "mlp.down",       "experts.gate_up", "experts.down",
                                                 "shared.gate_up", "shared.down",     "head"};
  return names;
}

const std::vector<std::string>& plain_module_names() {
  static const std::vector<std::string> names = {"embed", "kv_cache", "dispatch"};
  return names;
}

bool is_plain_module(std::string_view name) {
  return std::ranges::find(plain_module_names(), name) != plain_module_names().end();
}

bool glob_matches(std::string_view pattern, std::string_view name) {
  size_t p = 0, n = 0;
  size_t star = std::string_view::npos, resume = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && (pattern[p] == name[n] || pattern[p] == '?')) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::string unknown_module(const std::string& pattern) {
  std::vector<std::string> known = gemm_module_names();
  known.insert(known.end(), plain_module_names().begin(), plain_module_names().end());
  return "found " + pattern + ", which matches no module; " + suggestion(pattern, known);
}

std::optional<LayersMatcher> read_layers(const std::string& text, std::string* refusal) {
  Reader reader(text);
  LayersMatcher m;
  const bool first = reader.take("first ");
  if (first || reader.take("last ")) {
    m.kind = first ? LayersMatcher::Kind::kFirst : LayersMatcher::Kind::kLast;
    m.is_percent = reader.ends_with('%');
    m.count = m.is_percent ? reader.percent() : reader.number();
    if (m.is_percent && !reader.take("%")) reader.fail("it goes on where it should end");
    if (m.count == 0) reader.fail("it asks for no layer");
  } else {
    m.begin = reader.number();
    m.end = (reader.take("-") ? reader.number() : m.begin) + 1;
    if (m.end <= m.begin) reader.fail("it runs backwards");
  }
  reader.end();
  if (!reader.failed()) return m;
  *refusal = refusal_of(text, reader, kLayersForms);
  return std::nullopt;
}

std::optional<StepsMatcher> read_steps(const std::string& text, std::string* refusal) {
  Reader reader(text);
  StepsMatcher m;
  m.is_percent = reader.ends_with('%');
  m.begin = m.is_percent ? reader.percent() : reader.number();
  if (!reader.take("-")) reader.fail("it is no span");
  m.end = m.is_percent ? reader.percent() : reader.number();
  if (m.is_percent && !reader.take("%")) reader.fail("it goes on where it should end");
  if (m.end <= m.begin) reader.fail(m.end == m.begin ? "it holds no step" : "it runs backwards");
  reader.end();
  if (!reader.failed()) return m;
  *refusal = refusal_of(text, reader, kStepsForms);
  return std::nullopt;
}

}  // namespace fp4t
