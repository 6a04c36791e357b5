// Which combinations of a cell's keys mean something. Recipes report the reason at its place in the
// file; ops refuse to run such a cell.
#pragma once

#include <string>

#include "kernels/formats/quant.h"

namespace fp4t {

// Empty when the keys of `spec` go together, else the reason in a few words. What concerns other cells
// (the partner operand, the GEMM) is the plan's to check.
std::string conflict_in(const QuantSpec& spec);

}  // namespace fp4t
