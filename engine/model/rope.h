// Rotary tables: cos and sin of position * inverse frequency, F32 [max_positions, head_dim / 2] each,
// computed in FP64. Scalings as in the Hugging Face library: linear (Chen 2023, arXiv 2306.15595), llama3
// (Llama 3.1), yarn (Peng 2023, arXiv 2309.00071; its attention factor is folded into the tables).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/recipe/recipe.h"

namespace fp4t {

// head_dim / 2 inverse frequencies, highest first.
std::vector<double> rope_frequencies(const RopeSpec& spec, int64_t head_dim);
// Factor of cos and sin: 1 but for yarn.
double rope_amplitude(const RopeSpec& spec);

struct RopeTables {
  std::vector<float> cos, sin;
};
RopeTables rope_tables(const RopeSpec& spec, int64_t head_dim, int64_t max_positions);

}  // namespace fp4t
