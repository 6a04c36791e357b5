// The router's product and its gradients: small matrices (tens of experts), so plain register blocks.
#include <algorithm>
#include <vector>

#include "kernels/base/numeric.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/rows.h"
#include "kernels/ops/moe.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

constexpr int64_t kWidth = 8;         // experts, or columns, of one vector
constexpr int64_t kTokensAtOnce = 4;  // independent chains that hide the latency of fma
constexpr int64_t kTokensPerChunk = 64;

// weight [E, D] as [E / 8][D][8], missing experts as zeros.
std::vector<float> by_expert_blocks(const float* weight, int64_t experts, int64_t width) {
  std::vector<float> blocks(static_cast<size_t>(align_up(experts, kWidth) * width));
  for (int64_t e = 0; e < experts; ++e) {
    float* block = blocks.data() + e / kWidth * width * kWidth + e % kWidth;
    for (int64_t k = 0; k < width; ++k) block[k * kWidth] = weight[e * width + k];
  }
  return blocks;
}

// logits[i][e] of four rows and eight experts: k = 0..D-1 by fma, as every caller's chain.
void logits_block(const float* x, int64_t width, const float* block, float* out) {
  F8 acc[kTokensAtOnce] = {};
  for (int64_t k = 0; k < width; ++k) {
    const F8 w = load8(block + k * kWidth);
    for (int64_t i = 0; i < kTokensAtOnce; ++i) acc[i] = fma8(splat8(x[i * width + k]), w, acc[i]);
  }
  for (int64_t i = 0; i < kTokensAtOnce; ++i) store8(out + i * kWidth, acc[i]);
}

template <class T>
void router_logits(Queue& queue, const RouterLogits& op) {
  const int64_t width = op.x.dim(1), experts = op.weight.dim(0);
  const std::vector<float> blocks = by_expert_blocks(op.weight.as<float>(), experts, width);
  const T* x = op.x.as<T>();
  float* logits = op.logits.as<float>();
  parallel_for(queue, op.x.dim(0), kTokensPerChunk, [&](int64_t begin, int64_t end) {
    std::vector<float> rows(static_cast<size_t>(kTokensAtOnce * width));
    float out[kTokensAtOnce * kWidth];
    for (int64_t t = begin; t < end; t += kTokensAtOnce) {
      const int64_t count = std::min(kTokensAtOnce, end - t);
      load_row(x + t * width, rows.data(), count * width);
      for (int64_t e = 0; e < experts; e += kWidth) {
        logits_block(rows.data(), width, blocks.data() + e * width, out);
        const int64_t num = std::min(kWidth, experts - e);
        for (int64_t i = 0; i < count; ++i) {
          std::copy(out + i * kWidth, out + i * kWidth + num, logits + (t + i) * experts + e);
        }
      }
    }
  });
}

// dx[t, :] = sum over e = 0..E-1 of dlogits[t, e] * weight[e, :], by fma.
void backward_x(Queue& queue, const RouterLogitsBackward& op) {
  const int64_t width = op.x.dim(1), experts = op.weight.dim(0);
  const float *weight = op.weight.as<float>(), *dlogits = op.dlogits.as<float>();
  float* dx = op.dx.as<float>();
  parallel_for(queue, op.x.dim(0), kTokensPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* out = dx + t * width;
      std::fill(out, out + width, 0.0f);
      for (int64_t e = 0; e < experts; ++e) {
        const float g = dlogits[t * experts + e];
        const float* w = weight + e * width;
        for (int64_t k = 0; k < width; ++k) out[k] = std::fma(g, w[k], out[k]);
      }
    }
  });
}

constexpr int64_t kColumns = 32;  // of dweight, one task
constexpr int64_t kExpertsAtOnce = 2;

// total[e][c] += sum over the chunk's tokens of dlogits[t, e] * x[t, c], by fma in token order.
void add_chunk(const float* x, const float* dlogits, int64_t tokens, int64_t experts, float* total) {
  constexpr int64_t kVectors = kColumns / kWidth;
  for (int64_t e = 0; e < experts; e += kExpertsAtOnce) {
    const int64_t second = std::min(e + 1, experts - 1) - e;  // an odd last expert is computed twice
    F8 acc[kExpertsAtOnce][kVectors] = {};
    for (int64_t t = 0; t < tokens; ++t) {
      const F8 g[kExpertsAtOnce] = {splat8(dlogits[t * experts + e]),
                                    splat8(dlogits[t * experts + e + second])};
      for (int64_t v = 0; v < kVectors; ++v) {
        const F8 column = load8(x + t * kColumns + v * kWidth);
        for (int64_t i = 0; i < kExpertsAtOnce; ++i) acc[i][v] = fma8(g[i], column, acc[i][v]);
      }
    }
    for (int64_t i = 0; i <= second; ++i) {
      float* out = total + (e + i) * kColumns;
      for (int64_t v = 0; v < kVectors; ++v) {
        store8(out + v * kWidth, load8(out + v * kWidth) + acc[i][v]);
      }
    }
  }
}

// Chunks of 64 tokens are summed by themselves and added in order; tasks are blocks of columns.
template <class T>
void backward_weight(Queue& queue, const RouterLogitsBackward& op) {
  const int64_t tokens = op.x.dim(0), width = op.x.dim(1), experts = op.weight.dim(0);
  const T* x = op.x.as<T>();
  const float* dlogits = op.dlogits.as<float>();
  float* dweight = op.dweight.as<float>();
  parallel_for(queue, width, kColumns, [&](int64_t first, int64_t last) {
    std::vector<float> total(static_cast<size_t>(experts * kColumns), 0.0f);
    std::vector<float> block(static_cast<size_t>(kTokensPerChunk * kColumns), 0.0f);
    for (int64_t t = 0; t < tokens; t += kTokensPerChunk) {
      const int64_t count = std::min(kTokensPerChunk, tokens - t);
      for (int64_t i = 0; i < count; ++i) {
        load_row(x + (t + i) * width + first, block.data() + i * kColumns, last - first);
      }
      add_chunk(block.data(), dlogits + t * experts, count, experts, total.data());
    }
    for (int64_t e = 0; e < experts; ++e) {
      for (int64_t c = first; c < last; ++c) {
        dweight[e * width + c] =
            dweight[e * width + c] + total[static_cast<size_t>(e * kColumns + c - first)];
      }
    }
  });
}

}  // namespace

void run(Queue& queue, const RouterLogits& op) {
  for_float_type(op.x.dtype, [&](auto type) { router_logits<decltype(type)>(queue, op); });
}

void run(Queue& queue, const RouterLogitsBackward& op) {
  backward_x(queue, op);
  for_float_type(op.x.dtype, [&](auto type) { backward_weight<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cpu
