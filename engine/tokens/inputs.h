// What a recipe names as input: files, problems, texts. Who looks early spares a run that would fail after
// hours, when its second stage begins.
#pragma once

#include <string>
#include <vector>

#include "engine/recipe/problems.h"
#include "engine/recipe/recipe.h"

namespace fp4t {

// Files of a source, in order: a path that exists stands for itself, a folder for all files
// below it, anything else is a glob. Throws MissingInputError when a pattern matches nothing or a link leads
// nowhere, BadDataError for what is no regular file and for a file that is matched twice (its held-out
// documents would be trained on).
std::vector<std::string> input_files(const DataSourceSpec& spec);

// Makes everything that the stages will read or generate, once, and keeps nothing: files of text, held-out
// splits and their hashes, prompts and end tokens as tokens. Throws with one line for each that is refused,
// in any stage, beginning with its place and dotted path: RecipeError when one of them is the recipe's own
// text, else MissingInputError when a file or a folder is not there, else BadDataError.
void check_inputs(const Recipe& recipe, const FieldPlaces& places = {});

}  // namespace fp4t
