// The Hopper kernels of packed attention (attention_sm90.cu), called where `on_sm90` says so. They give the
// bits of the mma.sync kernels.
#pragma once

#include "kernels/base/dtype.h"
#include "kernels/cuda/attention_plan.cuh"
#include "kernels/cuda/context.h"

namespace fp4t::cuda {

struct PackedAttention {
  const Bf16* qkv;
  HeadShape shape;
  int64_t tokens;
  float c;  // scale * log2(e)
  Bf16* out;
  float* lse;
};

inline constexpr int kPackedRows = 128;  // of a tile

void attention_sm90(Queue& queue, const char* op, const PackedAttention& args, const AttentionTiles& tiles);

}  // namespace fp4t::cuda
