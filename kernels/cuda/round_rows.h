// Rounding the rows of a producer whose own kernel does not (round_rows.cu).
#pragma once

#include "kernels/base/queue.h"
#include "kernels/ops/quantize.h"

namespace fp4t::cuda {

// `x` is what the producer wrote.
void round_rows(Queue& queue, const char* op, const TensorView& x, const RoundedRows& out);

}  // namespace fp4t::cuda
