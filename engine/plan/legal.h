// Which cells are legal: the combinations that NUMERICS.md section 0.0 forbids, each with its reason.
#pragma once

#include <string>
#include <vector>

#include "engine/plan/precision.h"

namespace fp4t {

// Problems of one operand by itself.
std::vector<std::string> problems_of_operand(const QuantSpec& spec, GemmRole gemm, OperandRole operand);

// Problems of the two operands of one GEMM together.
std::vector<std::string> problems_of_pair(const QuantSpec& a, const QuantSpec& b);

// Problems between a forward weight and the dgrad weight made from it, and between a forward activation
// and the wgrad activation.
std::vector<std::string> problems_of_weights(const QuantSpec& fprop, const QuantSpec& dgrad);
std::vector<std::string> problems_of_activations(const QuantSpec& fprop, const QuantSpec& wgrad);

}  // namespace fp4t
