// Largest magnitudes of activations, for layouts with static scales: the model runs in BF16 over some
// sequences.
#pragma once

#include <string>
#include <vector>

#include "engine/store/checkpoint.h"
#include "engine/store/export_model.h"

namespace fp4t {

// Over the lines of `text` (encoded by the recipe's tokenizer), or over the first samples of the recipe's
// last pretraining up to the checkpoint's stage where `text` is "". `overrides` are keys of the recipe. Fills
// model.set_act_amax and returns a line that says what was read. Throws RecipeError where there is neither,
// BadDataError naming file and line.
std::string calibrate(const CheckpointInfo& info, std::vector<std::string> overrides, const std::string& text,
                      ExportModel& model);

}  // namespace fp4t
