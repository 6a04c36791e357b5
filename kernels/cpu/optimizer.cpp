// Blocks are loaded as FP32, computed, and stored by the tensor's own rounding: one loop serves every
// mix of F32 and BF16 masters and moments.
#include "kernels/ops/optimizer.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/numeric.h"
#include "kernels/cpu/philox_lanes.h"
#include "kernels/cpu/rows.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

void load_block(const TensorView& view, int64_t first, int64_t count, float* block) {
  if (view.dtype == DType::kBf16) {
    load_row(view.as<Bf16>() + first, block, count);
  } else {
    load_row(view.as<float>() + first, block, count);
  }
}

// The random words of a block's BF16 stores, one row for each word; drawn only when one is needed.
class StoreDraws {
 public:
  StoreDraws(bool needed, PhiloxKey key, int64_t first, int64_t count) {
    if (!needed) return;
    for (int64_t i = 0; i < count; i += kDraws) {  // past `count` if need be: kBlock is a multiple
      uint32_t draws[4][kDraws];
      site_draws(key, static_cast<uint64_t>(first + i), draws);
      for (int w = 0; w < kWords; ++w) std::copy(draws[w], draws[w] + kDraws, words_[w] + i);
    }
  }
  const uint32_t* word(int w) const { return words_[w]; }

 private:
  static constexpr int kWords = 3;
  uint32_t words_[kWords][kBlock] = {};
};

bool is_skipped(const TensorView& apply) { return !apply.empty() && apply.as<int32_t>()[0] == 0; }

bool stores_bf16(const TensorView& view) { return view.dtype == DType::kBf16; }

// Stores the block and leaves in it what was stored.
void store_block(float* __restrict block, const uint32_t* __restrict words, const TensorView& view,
                 int64_t first, int64_t count) {
  if (!stores_bf16(view)) {
    store_row(block, view.as<float>() + first, count);
    return;
  }
  for (int64_t i = 0; i < count; ++i)
    block[i] = bf16_to_f32(f32_to_bf16_stochastic(block[i], words[i] >> 16));
  store_row(block, view.as<Bf16>() + first, count);
}

void store_copy(const float* stored_master, const TensorView& copy, int64_t first, int64_t count) {
  if (!copy.empty()) store_row(stored_master, copy.as<Bf16>() + first, count);
}

// g, m, v, w become the new values; g is scratch afterwards.
void adamw_block(const AdamWStep& op, float grad_scale, float* __restrict g, float* __restrict m,
                 float* __restrict v, float* __restrict w, int64_t count) {
  const float rest1 = 1.0f - op.beta1, rest2 = 1.0f - op.beta2;
  for (int64_t i = 0; i < count; ++i) {
    g[i] = g[i] * grad_scale;
    m[i] = op.beta1 * m[i] + rest1 * g[i];
    v[i] = op.beta2 * v[i] + rest2 * (g[i] * g[i]);
    const float step = m[i] * op.bias1 / (std::sqrt(v[i] * op.bias2) + op.eps) + op.weight_decay * w[i];
    w[i] = w[i] - op.lr * step;
  }
}

struct ChunkSum {
  double sum, nonfinite;
};

// Element i goes to lane i mod 8; the lanes are added in order.
template <class T>
ChunkSum sum_squares(const T* x, int64_t n) {
  constexpr int64_t kLanes = 8;
  double sum[kLanes] = {}, nonfinite[kLanes] = {};
  for (int64_t first = 0; first < n; first += kBlock) {
    float block[kBlock] = {};
    load_row(x + first, block, std::min(kBlock, n - first));
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) {
        const bool finite = std::fabs(block[i + l]) <= std::numeric_limits<float>::max();
        const double value = finite ? static_cast<double>(block[i + l]) : 0.0;
        sum[l] += value * value;
        nonfinite[l] += finite ? 0.0 : 1.0;
      }
    }
  }
  ChunkSum total = {0.0, 0.0};
  for (int64_t l = 0; l < kLanes; ++l) {
    total.sum += sum[l];
    total.nonfinite += nonfinite[l];
  }
  return total;
}

}  // namespace

void run(Queue& queue, const AdamWStep& op) {
  if (is_skipped(op.apply)) return;
  const float grad_scale = op.grad_scale.as<float>()[0];
  const bool random = stores_bf16(op.master) || stores_bf16(op.m) || stores_bf16(op.v);
  for_blocks(queue, op.master.elements(), [&](int64_t first, int64_t count) {
    float g[kBlock], m[kBlock], v[kBlock], w[kBlock];
    load_block(op.grad, first, count, g);
    load_block(op.m, first, count, m);
    load_block(op.v, first, count, v);
    load_block(op.master, first, count, w);
    adamw_block(op, grad_scale, g, m, v, w, count);
    const StoreDraws draws(random, op.store_key, op.first_element + first, count);
    store_block(w, draws.word(0), op.master, first, count);
    store_block(m, draws.word(1), op.m, first, count);
    store_block(v, draws.word(2), op.v, first, count);
    store_copy(w, op.copy, first, count);
  });
}

void run(Queue& queue, const SumSquares& op) {
  constexpr int64_t kChunk = 65536;
  const int64_t n = op.x.elements();
  std::vector<ChunkSum> chunks(static_cast<size_t>(ceil_div(n, kChunk)));
  for_float_type(op.x.dtype, [&](auto type) {
    const auto* x = op.x.as<decltype(type)>();
    parallel_for(queue, n, kChunk, [&](int64_t begin, int64_t end) {
      chunks[static_cast<size_t>(begin / kChunk)] = sum_squares(x + begin, end - begin);
    });
  });
  ChunkSum total = {0.0, 0.0};
  for (const ChunkSum& chunk : chunks) {
    total.sum += chunk.sum;
    total.nonfinite += chunk.nonfinite;
  }
  op.sum.as<double>()[0] += total.sum;
  op.nonfinite.as<double>()[0] += total.nonfinite;
}

void run(Queue& queue, const SumSquaresChunks& op) {
  const int64_t n = op.x.elements();
  for_float_type(op.x.dtype, [&](auto type) {
    const auto* x = op.x.as<decltype(type)>();
    parallel_for(queue, op.chunks(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const SumSquaresChunks::Range range = op.range(c, n);
        const ChunkSum chunk = sum_squares(x + range.begin, range.end - range.begin);
        op.sums.as<double>()[2 * c] = chunk.sum;
        op.sums.as<double>()[2 * c + 1] = chunk.nonfinite;
      }
    });
  });
}

void run(Queue&, const ClipFactor& op) {
  const ClipDecision decision =
      decide_clip(op.sum.as<double>()[0], op.nonfinite.as<double>()[0] + op.extra_nonfinite, op.max_norm);
  op.factor.as<float>()[0] = static_cast<float>(decision.factor);
  op.apply.as<int32_t>()[0] = decision.apply ? 1 : 0;
}

void run(Queue& queue, const MuonMomentum& op) {
  if (is_skipped(op.apply)) return;
  const float grad_scale = op.grad_scale.as<float>()[0];
  for_blocks(queue, op.momentum.elements(), [&](int64_t first, int64_t count) {
    float g[kBlock], momentum[kBlock];
    load_block(op.grad, first, count, g);
    load_block(op.momentum, first, count, momentum);
    for (int64_t i = 0; i < count; ++i) {
      g[i] = g[i] * grad_scale;
      momentum[i] = op.beta * momentum[i] + g[i];
      g[i] = g[i] + op.beta * momentum[i];
    }
    const StoreDraws draws(stores_bf16(op.momentum), op.store_key, op.first_element + first, count);
    store_block(momentum, draws.word(1), op.momentum, first, count);
    store_row(g, op.update.as<float>() + first, count);
  });
}

void run(Queue& queue, const ApplyUpdate& op) {
  if (is_skipped(op.apply)) return;
  for_blocks(queue, op.master.elements(), [&](int64_t first, int64_t count) {
    float update[kBlock], w[kBlock];
    load_row(op.update.as<float>() + first, update, count);
    load_block(op.master, first, count, w);
    for (int64_t i = 0; i < count; ++i) {
      w[i] = w[i] - op.lr * (op.scale * update[i] + op.weight_decay * w[i]);
    }
    const StoreDraws draws(stores_bf16(op.master), op.store_key, op.first_element + first, count);
    store_block(w, draws.word(0), op.master, first, count);
    store_copy(w, op.copy, first, count);
  });
}

}  // namespace fp4t::cpu
