// What a producer rounds of its output (RoundedRows), by the ops that define it.
#pragma once

#include "kernels/base/queue.h"
#include "kernels/ops/quantize.h"

namespace fp4t::cpu {

void round_rows(Queue& queue, const TensorView& x, const RoundedRows& out);

}  // namespace fp4t::cpu
