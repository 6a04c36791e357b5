// The presets of NUMERICS.md section 0.0, as rules. configs/precision/ holds the same rules as files.
#pragma once

#include <string>
#include <vector>

#include "engine/recipe/recipe.h"

namespace fp4t {

const std::vector<std::string>& preset_names();

// Appends the preset's rules to each table, marked as the preset's.
void append_preset(const std::string& name, PrecisionSpec& precision);

}  // namespace fp4t
