// Does this build, on this machine, quantise exactly as the independent oracle did? The file of vectors
// is described in kernels/formats/README.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/base/queue.h"

namespace fp4t {

struct GoldenResult {
  int64_t cases = 0;
  int64_t equal = 0;                  // cases whose codes and scales are all byte-equal
  std::vector<std::string> failures;  // one line for each other case: what differs first, and where
};

// Runs every case of a JSONL file of quantiser vectors on the queue's backend. Throws MissingInputError
// when the file cannot be opened, BadDataError with the line when it is empty, damaged, or asks for
// something that no quantiser here does.
GoldenResult check_golden(Queue& queue, const std::string& path);

}  // namespace fp4t
