// Arguments of the gradient's kernels.
#pragma once

#include "kernels/cuda/attention_plan.cuh"
#include "kernels/cuda/attention_tile.cuh"

namespace fp4t::cuda {

// Rows of an owner's tile, and rows of the other side at a time: every sum runs over steps of kStepRows in
// order.
inline constexpr int kOwnRows = 128, kStepRows = 64;

struct BackwardAttention {
  const Bf16* qkv;
  HeadShape shape;
  int64_t tokens;
  float scale, c;  // c = scale * log2(e)
  const Bf16 *out, *dout;
  const float* lse;
  float4* rows;  // [heads][tokens]: lse * log2(e), delta = <dout, out>, 0, 0
  Bf16* dqkv;
};

// Tiles by keys before them, for dQ, and by queries after them, for dK and dV.
struct BackwardTiles {
  AttentionTiles queries, keys;
};

// attention_backward_sm90.cu: Hopper.
void attention_backward_sm90(Queue& queue, const char* op, const BackwardAttention& args,
                             const BackwardTiles& tiles);

}  // namespace fp4t::cuda
