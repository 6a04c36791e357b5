// Putting codes in the order that products of few rows read (code_order.cu).
#pragma once

#include "kernels/base/queue.h"
#include "kernels/formats/quant.h"

namespace fp4t::cuda {

// In place, all stored rows.
void put_in_stream_order(Queue& queue, const QuantView& codes);

}  // namespace fp4t::cuda
