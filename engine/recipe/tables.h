// Names of the precision tables and of what their rules match, and the small grammar of the matchers
// (DESIGN.md section 4). Whoever checks, documents or resolves a matcher reads it here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fp4t {

inline constexpr size_t kNumRecipeTables = 5;
inline constexpr const char* kTableNames[kNumRecipeTables] = {
    "pretrain.forward", "pretrain.backward", "rl.sampler", "rl.trainer.forward", "rl.trainer.backward"};
inline constexpr size_t kSamplerTable = 2;
// Tables of fprop; the others hold dgrad and wgrad.
inline bool is_forward_table(size_t table) { return table == 0 || table == 2 || table == 3; }

// Modules with GEMMs, which globs match, and those that must be named.
const std::vector<std::string>& gemm_module_names();
const std::vector<std::string>& plain_module_names();
bool is_plain_module(std::string_view name);

// `*` stands for any run of characters, dots included; `?` for one.
bool glob_matches(std::string_view pattern, std::string_view name);

// What is wrong with a pattern of modules that matches none: "found X, which ...; did you mean Y?".
std::string unknown_module(const std::string& pattern);

// Numbers have up to twelve digits and no leading zero; a percentage is at most 100, with up to six decimals.
inline constexpr int64_t kWholePercent = 100'000'000;  // 100% in millionths of a percent

// "5", "0-3" (both ends included), "first 2", "last 2", "first 15%", "last 12.5%".
struct LayersMatcher {
  enum class Kind { kSpan, kFirst, kLast };
  Kind kind = Kind::kSpan;
  int64_t begin = 0, end = 0;  // of a span, half open
  int64_t count = 0;           // of first and last: above 0; layers, or millionths of a percent
  bool is_percent = false;
};
// "100-500", "0-90%": half open, in steps or millionths of a percent.
struct StepsMatcher {
  int64_t begin = 0, end = 0;
  bool is_percent = false;
};
// Nothing when the text is none; `refusal` then says what was found, why it is not, and what is allowed.
std::optional<LayersMatcher> read_layers(const std::string& text, std::string* refusal);
std::optional<StepsMatcher> read_steps(const std::string& text, std::string* refusal);

// The same as regular expressions of JSON schemas (ECMA 262), which cannot say that a span must rise.
inline constexpr const char* kLayersPattern =
    "^((0|[1-9][0-9]{0,11})(-(0|[1-9][0-9]{0,11}))?"
    "|(first|last) ([1-9][0-9]{0,11}|(?!0(\\.0+)?%)(100(\\.0{1,6})?|[1-9]?[0-9](\\.[0-9]{1,6})?)%))$";
inline constexpr const char* kStepsPattern =
    "^((0|[1-9][0-9]{0,11})-[1-9][0-9]{0,11}"
    "|(100(\\.0{1,6})?|[1-9]?[0-9](\\.[0-9]{1,6})?)-(100(\\.0{1,6})?|[1-9]?[0-9](\\.[0-9]{1,6})?)%)$";

}  // namespace fp4t
