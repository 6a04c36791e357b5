// Attention for what the tensor-core kernels do not take: FP32, any head dimension up to kMaxHeadDim.
// Contract of the numbers as in kernels/cuda/attention_tile.cuh: keys go in blocks of 32 counted from the
// document's first token, so cached and packed rows give the same bits.
#pragma once

#include "kernels/cuda/attention_sizes.h"
#include "kernels/cuda/context.h"
#include "kernels/ops/attention.h"

namespace fp4t::cuda {

void general_attention(Queue& queue, const AttentionForward& op);
void general_attention(Queue& queue, const AttentionCached& op);
void general_attention(Queue& queue, const AttentionBackward& op);

}  // namespace fp4t::cuda
