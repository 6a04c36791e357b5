// A folder that is whole wherever it has its name: written beside its place, and put there in one step.
//   TO.tmp.<pid>       being written, by the process that holds its flock
//   TO.replaced.<pid>  what stood at TO, for a moment, on file systems that cannot exchange two names
// Both are left behind by a process that was killed, and put right by the next one that writes to TO.
#pragma once

#include <functional>
#include <string>

#include "engine/store/files.h"

namespace fp4t {

// `write` fills the folder. `mark`: a file that every folder of the kind has; one at `to` without it is never
// replaced. Throws RecipeError when `to` exists (and is not to be replaced, or has no mark), SaveError, and
// what `write` throws; `to` is then as it was, and nothing stands beside it.
void write_beside(const std::string& to, bool replace, const std::string& mark, const SaveHook& hook,
                  const std::function<void(const std::string& folder)>& write);

}  // namespace fp4t
