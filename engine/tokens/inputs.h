// The files that a recipe names as input. Who looks early spares a run that would fail after hours, when its
// second stage begins.
#pragma once

#include <string>
#include <vector>

#include "engine/recipe/recipe.h"

namespace fp4t {

// Files of a text or jsonl source, in order: a path that exists stands for itself, a folder for all files
// below it, anything else is a glob. Throws MissingInputError when a pattern matches nothing or a link leads
// nowhere, BadDataError for what is no regular file and for a file that is matched twice (its held-out
// documents would be trained on).
std::vector<std::string> input_files(const DataSourceSpec& spec);

// Throws MissingInputError, or BadDataError, with one line for every source, in any stage, whose files are
// not as above, and for a folder of weights that is not there. Reads no file.
void check_inputs(const Recipe& recipe);

}  // namespace fp4t
