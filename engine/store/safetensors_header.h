// The JSON header of a safetensors file. Read as a stream of events, so that memory is bounded by the
// header's own size whatever is nested in it, and duplicate names are seen.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/store/safetensors.h"

namespace fp4t {

// Appends to `tensors` in the header's order. Throws BadDataError with path and tensor.
void parse_safetensors_header(const std::string& path, const std::string& header,
                              std::vector<StoredTensor>* tensors,
                              std::map<std::string, std::string>* metadata);

// The header of tensors whose data follow in this order, padded with spaces to a multiple of 8 bytes.
std::string safetensors_header(const std::vector<TensorToStore>& tensors,
                               const std::map<std::string, std::string>& metadata);

}  // namespace fp4t
