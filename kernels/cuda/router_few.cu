// Logits of few tokens, as in decoding: the weight's bytes decide, so every multiprocessor takes 8 experts of
// 32 tokens, and each of its warps a part of the width.
#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/router_cores.h"
#include "kernels/cuda/router_mma.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kTokens = 32, kExperts = 8;
constexpr int kTiles = kTokens / 16;
constexpr int kSteps = kRouterChunk / 16;

struct FewArgs {
  const Bf16* x;
  const float* weight;
  float* logits;
  int64_t tokens, experts, width;
};

// Four pairs of x, as the tensor core wants them; zeros outside.
__device__ __forceinline__ void load_x(const FewArgs& a, int64_t token, int64_t k, uint32_t (&out)[1][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t t = token + i % 2 * 8, at = k + i / 2 * 8;
    const bool inside = t < a.tokens && at < a.width;
    out[0][i] = inside ? *reinterpret_cast<const uint32_t*>(a.x + t * a.width + at) : 0u;
  }
}
__device__ __forceinline__ void load_weight(const FewArgs& a, int64_t expert, int64_t k, float2 (&out)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool inside = expert < a.experts && k + 8 * i < a.width;
    out[i] = inside ? *reinterpret_cast<const float2*>(a.weight + expert * a.width + k + 8 * i)
                    : make_float2(0.0f, 0.0f);
  }
}

// One chunk of the width.
__device__ void multiply_chunk(const FewArgs& a, int64_t token, int64_t expert, int64_t k0,
                               float (&acc)[kTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  token += lane / 4, expert += lane / 4, k0 += lane % 4 * 2;
  float2 w[kSteps][2];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) load_weight(a, expert, k0 + 16 * s, w[s]);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t x[kTiles][1][4], pieces[2][kPieces], b[kPieces][2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) load_x(a, token + 16 * m, k0 + 16 * s, x[m]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      split(w[s][i].x, w[s][i].y, pieces[i]);
#pragma unroll
      for (int p = 0; p < kPieces; ++p) b[p][i] = pieces[i][p];
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) multiply_pieces(acc[m], x[m], b);
  }
}

__global__ void __launch_bounds__(kThreads) few_logits(FewArgs a) {
  __shared__ float partial[kWarps][kTokens][kExperts];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t expert0 = int64_t{blockIdx.x} * kExperts, token0 = int64_t{blockIdx.y} * kTokens;
  const int token = thread / kExperts, expert = thread % kExperts;
  float total = 0.0f;
  for (int64_t first = 0; first < a.width; first += kWarps * kRouterChunk) {
    const int64_t k0 = first + warp * kRouterChunk;
    if (k0 < a.width) {
      float acc[kTiles][4] = {};
      multiply_chunk(a, token0, expert0, k0, acc);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          partial[warp][16 * m + lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = acc[m][i];
        }
      }
    }
    __syncthreads();
    if (thread < kTokens * kExperts) {
      for (int w = 0; w < kWarps && first + w * kRouterChunk < a.width; ++w) {
        total = total + partial[w][token][expert];
      }
    }
    __syncthreads();
  }
  if (thread < kTokens * kExperts && token0 + token < a.tokens && expert0 + expert < a.experts) {
    a.logits[(token0 + token) * a.experts + expert0 + expert] = total;
  }
}

}  // namespace

void router_logits_few(Queue& queue, const RouterLogits& op) {
  const FewArgs a{op.x.as<Bf16>(), op.weight.as<float>(), op.logits.as<float>(),
                  op.x.dim(0),     op.weight.dim(0),      op.x.dim(1)};
  const dim3 grid(static_cast<unsigned>(ceil_div(a.experts, kExperts)),
                  static_cast<unsigned>(ceil_div(a.tokens, kTokens)));
  few_logits<<<grid, kThreads, 0, stream_of(queue)>>>(a);
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
