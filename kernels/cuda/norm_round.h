// The norm of few rows, which may also round its output for a product (norm_round.cu).
#pragma once

#include "kernels/base/queue.h"
#include "kernels/ops/norm.h"

namespace fp4t::cuda {

// Whether it takes the op: by sizes and pointers alone.
bool norm_rounds(const NormForward& op);
void norm_and_round(Queue& queue, const NormForward& op);

}  // namespace fp4t::cuda
