// The router's products on tensor cores, in their tilings (router_mma.cuh). x is BF16; which core an op gets
// is a function of its shape (router.cu), and of these the two for logits give the same bits.
#pragma once

#include "kernels/base/queue.h"
#include "kernels/ops/moe.h"

namespace fp4t::cuda {

// Tokens up to which the first is the faster one, at 128 experts of width 2048.
inline constexpr int64_t kFewTokens = 2048;

void router_logits_few(Queue& queue, const RouterLogits& op);
void router_logits_many(Queue& queue, const RouterLogits& op);
void router_dweight(Queue& queue, const RouterLogitsBackward& op);
void router_dx(Queue& queue, const RouterLogitsBackward& op);

// total[i] += the sum over slices s, in order, of partial[s * n + i].
void add_slices(Queue& queue, const float* partial, int64_t n, int64_t slices, float* total);

}  // namespace fp4t::cuda
