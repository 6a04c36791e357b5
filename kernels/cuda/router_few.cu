// Logits of few tokens, as in decoding: the weight's bytes decide, so every multiprocessor takes 8 experts of
// 32 tokens, and each of its warps a part of the width.
#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/router_cores.h"
#include "kernels/cuda/router_mma.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kTokens = 32, kExperts = 8;
constexpr int kTiles = kTokens / 16;
constexpr int kChunks = 4;  // of a warp at a time
constexpr int kWarpWidth = kChunks * kRouterChunk, kSteps = kWarpWidth / 16;
constexpr int kSharedBytes = kWarps * kChunks * kTokens * kExperts * 4;

struct FewArgs {
  const Bf16* x;
  const float* weight;
  float* logits;
  int64_t tokens, experts, width;
};

// Four pairs of x, as the tensor core wants them; zeros outside.
__device__ __forceinline__ void load_x(const FewArgs& a, int64_t token, int64_t k, uint32_t (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t t = token + i % 2 * 8, at = k + i / 2 * 8;
    const bool inside = t < a.tokens && at < a.width;
    out[i] = inside ? *reinterpret_cast<const uint32_t*>(a.x + t * a.width + at) : 0u;
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

// Chunks of the width, from k0 on: acc[chunk] are their sums.
__device__ void multiply_chunks(const FewArgs& a, int64_t token, int64_t expert, int64_t k0,
                                float (&acc)[kChunks][kTiles][4]) {
  using P = Products<1, kPieces>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  token += lane / 4, expert += lane / 4, k0 += lane % 4 * 2;
  float2 w[kSteps][2];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) load_weight(a, expert, k0 + 16 * s, w[s]);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t x[kTiles][4], pieces[2][kPieces];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) load_x(a, token + 16 * m, k0 + 16 * s, x[m]);
#pragma unroll
    for (int i = 0; i < 2; ++i) split(w[s][i].x, w[s][i].y, pieces[i]);
#pragma unroll
    for (int p = 0; p < P::kCount; ++p) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        mma_bf16(acc[s / (kRouterChunk / 16)][m], x[m], pieces[0][P::b(p)], pieces[1][P::b(p)]);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) few_logits(FewArgs a) {
  extern __shared__ float partial[];  // [kWarps * kChunks][kTokens][kExperts]
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t expert0 = int64_t{blockIdx.x} * kExperts, token0 = int64_t{blockIdx.y} * kTokens;
  float total = 0.0f;
  for (int64_t first = 0; first < a.width; first += kWarps * kWarpWidth) {
    const int64_t k0 = first + warp * kWarpWidth;
    if (k0 < a.width) {
      float acc[kChunks][kTiles][4] = {};
      multiply_chunks(a, token0, expert0, k0, acc);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = 16 * m + lane / 4 + i / 2 * 8, expert = lane % 4 * 2 + i % 2;
            partial[((warp * kChunks + c) * kTokens + token) * kExperts + expert] = acc[c][m][i];
          }
        }
      }
    }
    __syncthreads();
    if (thread < kTokens * kExperts) {
      const int64_t left = (a.width - first + kRouterChunk - 1) / kRouterChunk;
      const int chunks = static_cast<int>(left < kWarps * kChunks ? left : kWarps * kChunks);
#pragma unroll 8
      for (int c = 0; c < chunks; ++c) total = total + partial[c * (kTokens * kExperts) + thread];
    }
    __syncthreads();
  }
  const int64_t token = token0 + thread / kExperts, expert = expert0 + thread % kExperts;
  if (thread < kTokens * kExperts && token < a.tokens && expert < a.experts) {
    a.logits[token * a.experts + expert] = total;
  }
}

}  // namespace

void router_logits_few(Queue& queue, const RouterLogits& op) {
  const FewArgs a{op.x.as<Bf16>(), op.weight.as<float>(), op.logits.as<float>(),
                  op.x.dim(0),     op.weight.dim(0),      op.x.dim(1)};
  const dim3 grid(static_cast<unsigned>(ceil_div(a.experts, kExperts)),
                  static_cast<unsigned>(ceil_div(a.tokens, kTokens)));
  FP4T_CUDA(cudaFuncSetAttribute(few_logits, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  launch_early(queue, op.kName, few_logits, grid, kThreads, kSharedBytes, a);
}

}  // namespace fp4t::cuda
