// A rollout as named host arrays ("rollout.completions", ...), so that its numbers are stored exactly and
// hashed like every other tensor. Ragged lists are two arrays: all values, and the lengths.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/tokens/rollout.h"
#include "kernels/base/dtype.h"

namespace fp4t {

struct HostArray {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  std::vector<uint8_t> bytes;
};

// Empty for a rollout without prompts and completions.
std::vector<HostArray> rollout_to_arrays(const Rollout& rollout);

// `find` returns the array of a name and throws when it is not there; `has` says whether it is, for lists
// that not every rollout has. Throws BadDataError when types or lengths disagree.
Rollout rollout_from_arrays(const std::function<HostArray(const std::string&)>& find,
                            const std::function<bool(const std::string&)>& has);

}  // namespace fp4t
