// The experts that the sampler's routers chose, as a rollout keeps them: rows of [MoE layers][k] experts, of
// one byte each for up to 256 experts and of two (the lower one first) for more. A completion has a row for
// each token that was fed to the model: its prompt, and all of its own tokens but the last.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/recipe/recipe.h"

namespace fp4t {

struct RoutingShape {
  int64_t layers = 0, top_k = 0, experts = 0;  // layers: those with experts

  static RoutingShape of(const ModelSpec& model);
  int64_t expert_bytes() const { return experts > 256 ? 2 : 1; }
  int64_t row_bytes() const { return layers * top_k * expert_bytes(); }
};

// Appends row `row` of a decode call's record, [layers][rows][k].
void append_routing(const RoutingShape& shape, const std::vector<int32_t>& record, int64_t rows, int64_t row,
                    std::vector<uint8_t>& bytes);

// The rows of several completions, one after another, as TokenBatch::router, [layers][rows][k]. Throws
// BadDataError where an expert is not one of the model's.
std::vector<int32_t> joined_routing(const RoutingShape& shape,
                                    const std::vector<const std::vector<uint8_t>*>& parts);

// By layer, in how many of `rows` rows two routings [layers][rows][k] chose different sets of experts.
std::vector<int64_t> rows_that_differ(const RoutingShape& shape, const std::vector<int32_t>& a,
                                      const std::vector<int32_t>& b, int64_t rows);

}  // namespace fp4t
