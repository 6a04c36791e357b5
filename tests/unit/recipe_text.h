// A small recipe for tests, and how its errors are read.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/recipe/load.h"
#include "kernels/base/check.h"

namespace fp4t::test {

inline const char* const kModel = R"(model:
  layers: 4
  hidden: 128
  heads: 4
  kv_heads: 2
  head_dim: 32
  moe: {experts: 8, top_k: 2, hidden: 128}
)";

inline const char* const kPretrain = R"(  - pretrain:
      steps: 600
      batch: {tokens: 8192, micro_sequences: 16, length: 128}
      data: [{kind: text, paths: corpus}]
)";

inline const char* const kRl = R"(  - rl:
      steps: 60
      task: {kind: sums}
)";

inline std::string minimal() { return std::string(kModel) + "stages:\n" + kPretrain; }
inline std::string with_rl() { return std::string(kModel) + "stages:\n" + kPretrain + kRl; }

// All messages of a recipe that is refused; "" when it is accepted.
inline std::string errors_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    parse_recipe(text, "r.yaml", overrides);
    return "";
  } catch (const RecipeError& e) {
    return e.what();
  }
}

inline int count_lines(const std::string& text) {
  int lines = text.empty() ? 0 : 1;
  for (const char c : text) lines += c == '\n' ? 1 : 0;
  return lines;
}

}  // namespace fp4t::test

// The recipe is refused with exactly one message, which contains every part.
#define EXPECT_REFUSED(text, overrides, ...)                                           \
  do {                                                                                 \
    const std::string refusal = ::fp4t::test::errors_of(text, overrides);              \
    EXPECT_EQ(::fp4t::test::count_lines(refusal), 1) << refusal;                       \
    for (const char* part : {__VA_ARGS__}) {                                           \
      EXPECT_NE(refusal.find(part), std::string::npos) << part << "\n in " << refusal; \
    }                                                                                  \
  } while (false)
