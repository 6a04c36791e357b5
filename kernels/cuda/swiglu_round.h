// SwiGLU that rounds its output for a product in the same kernel (swiglu_round.cu).
#pragma once

#include "kernels/base/queue.h"
#include "kernels/ops/elementwise.h"

namespace fp4t::cuda {

// Whether it takes the op: by pointers alone.
bool swiglu_rounds(const SwigluForward& op);
void swiglu_and_round(Queue& queue, const SwigluForward& op);

}  // namespace fp4t::cuda
