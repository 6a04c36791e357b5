#include "engine/recipe/tables.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <optional>

namespace fp4t {

namespace {

// A whole number without sign or leading zero.
std::optional<int64_t> whole(std::string_view text) {
  if (text.empty() || text.size() > 18 || (text.size() > 1 && text[0] == '0')) return std::nullopt;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text[0] == '-') return std::nullopt;
  return value;
}

constexpr int64_t kWholePercent = 100'000'000;  // 100% in millionths of a percent

// A percentage with up to six decimals, in millionths of a percent.
std::optional<int64_t> millionths(std::string_view text) {
  const size_t dot = text.find('.');
  const auto percent = whole(text.substr(0, dot));
  if (!percent || *percent > 100) return std::nullopt;
  int64_t value = *percent * 1'000'000;
  if (dot != std::string_view::npos) {
    const std::string_view digits = text.substr(dot + 1);
    if (digits.empty() || digits.size() > 6) return std::nullopt;
    int64_t unit = 100'000;
    for (const char c : digits) {
      if (c < '0' || c > '9') return std::nullopt;
      value += unit * (c - '0');
      unit /= 10;
    }
  }
  return value <= kWholePercent ? std::optional(value) : std::nullopt;
}

bool drop_suffix(std::string_view& text, std::string_view suffix) {
  if (!text.ends_with(suffix)) return false;
  text.remove_suffix(suffix.size());
  return true;
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

bool is_layers_matcher(std::string_view text) {
  for (const std::string_view word : {"first ", "last "}) {
    if (!text.starts_with(word)) continue;
    text.remove_prefix(word.size());
    const auto count = drop_suffix(text, "%") ? millionths(text) : whole(text);
    return count && *count > 0;
  }
  const size_t dash = text.find('-');
  if (dash == std::string_view::npos) return whole(text).has_value();
  const auto low = whole(text.substr(0, dash)), high = whole(text.substr(dash + 1));
  return low && high && *low <= *high;
}

bool is_steps_matcher(std::string_view text) {
  const bool percent = drop_suffix(text, "%");
  const size_t dash = text.find('-');
  if (dash == std::string_view::npos) return false;
  const auto read = percent ? millionths : whole;
  const auto low = read(text.substr(0, dash)), high = read(text.substr(dash + 1));
  return low && high && *low < *high;
}

}  // namespace fp4t
