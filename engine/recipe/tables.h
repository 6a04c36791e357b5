// Names of the precision tables and of what their rules match, and the small grammar of the matchers
// (DESIGN.md section 4). The plan resolves them; here they are checked for being well formed.
#pragma once

#include <cstddef>
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

// "5", "0-3" (both ends included), "first 2", "last 2", "first 15%", "last 12.5%".
bool is_layers_matcher(std::string_view text);
// "0-90%", "0-87.5%" or "100-500": half open.
bool is_steps_matcher(std::string_view text);

}  // namespace fp4t
