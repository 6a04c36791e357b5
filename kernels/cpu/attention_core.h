// The inner function of attention, shared by training and cached rows: both lay their keys out the same
// way and call `attend`, so the same keys give the same bits.
// Order of every sum, a function of a key's index in its document alone:
//   score_j = scale * <q, k_j>, the product summed over the head dimension by fma from 0
//   m = max over all keys; p_j = exp(score_j - m)
//   l = sum of p_j: key j goes to lane j mod 16 in key order, then a tree over the lanes
//   out = (p_0 v_0 + p_1 v_1 + ...) / l, by fma from 0 in key order
// Layouts in FP32, made for products of few coefficients with 16 columns held in registers:
//   tiles  [keys / 16][head_dim][16]  the keys of a tile along the lanes
//   panels [head_dim / 16][keys][16]  dimensions along the lanes
// Both are zero-padded; padding never enters a result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/base/numeric.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/rows.h"
#include "kernels/formats/math.h"

namespace fp4t::cpu {

constexpr int kQueries = 4;  // 4 x 16 accumulators: enough chains to hide the latency of fma

inline int64_t padded_columns(int64_t n) { return align_up(n, kColumns); }

// acc[q] += coef[q * q_stride + i * i_stride] * panel[i][0..15], for i in [begin, end) in order.
template <int Q>
[[gnu::always_inline]] inline void accumulate(const float* coef, int64_t q_stride, int64_t i_stride,
                                              int64_t begin, int64_t end, const float* panel,
                                              F8 (&acc)[Q][2]) {
  F8 sum[Q][2];  // a copy of its own stays in registers, whatever acc refers to
  for (int q = 0; q < Q; ++q) sum[q][0] = acc[q][0], sum[q][1] = acc[q][1];
  for (int64_t i = begin; i < end; ++i) {
    F8 low = load8(panel + i * kColumns), high = load8(panel + i * kColumns + 8);
    keep8(low);
    keep8(high);
    for (int q = 0; q < Q; ++q) {
      const F8 c = splat8(coef[q * q_stride + i * i_stride]);
      sum[q][0] = fma8(c, low, sum[q][0]);
      sum[q][1] = fma8(c, high, sum[q][1]);
    }
  }
  for (int q = 0; q < Q; ++q) acc[q][0] = sum[q][0], acc[q][1] = sum[q][1];
}

// Both fills: load(j, c, n, out) writes n <= 16 dimensions of row j, from dimension c on.
template <class Load>
void fill_tiles(float* tiles, int64_t rows, int64_t head_dim, const Load& load) {
  const int64_t padded = padded_columns(head_dim);
  for (int64_t first = 0; first < rows; first += kColumns) {
    const int64_t count = std::min(kColumns, rows - first);
    for (int64_t c = 0; c < padded; c += kColumns) {
      float block[kColumns * kColumns];
      if (count < kColumns || head_dim - c < kColumns) std::fill(std::begin(block), std::end(block), 0.0f);
      for (int64_t j = 0; j < count; ++j) {
        load(first + j, c, std::min(kColumns, head_dim - c), block + j * kColumns);
      }
      float* tile = tiles + first * padded + c * kColumns;
      transpose8x8(block, kColumns, tile, kColumns);
      transpose8x8(block + 8, kColumns, tile + 8 * kColumns, kColumns);
      transpose8x8(block + 8 * kColumns, kColumns, tile + 8, kColumns);
      transpose8x8(block + 8 * kColumns + 8, kColumns, tile + 8 * kColumns + 8, kColumns);
    }
  }
}

template <class Load>
void fill_panels(float* panels, int64_t rows, int64_t head_dim, const Load& load) {
  for (int64_t c = 0; c < head_dim; c += kColumns) {
    const int64_t count = std::min(kColumns, head_dim - c);
    for (int64_t j = 0; j < rows; ++j) {
      float* row = panels + c * rows + j * kColumns;
      load(j, c, count, row);
      if (count < kColumns) std::fill(row + count, row + kColumns, 0.0f);
    }
  }
}

// Keys and values of one document and one key head.
class Keys {
 public:
  Keys(int64_t count, int64_t head_dim)
      : count_(count),
        head_dim_(head_dim),
        k_tiles_(padded_columns(count) * padded_columns(head_dim)),
        v_panels_(count * padded_columns(head_dim)) {}

  template <class LoadKey, class LoadValue>
  void fill(const LoadKey& load_key, const LoadValue& load_value) const {
    fill_tiles(k_tiles_.get(), count_, head_dim_, load_key);
    fill_panels(v_panels_.get(), count_, head_dim_, load_value);
  }

  int64_t count() const { return count_; }
  int64_t head_dim() const { return head_dim_; }
  const float* k_tile(int64_t first_key) const {
    return k_tiles_.get() + first_key * padded_columns(head_dim_);
  }
  const float* v_panel(int64_t first_dim) const { return v_panels_.get() + first_dim * count_; }

 private:
  int64_t count_, head_dim_;
  Scratch k_tiles_, v_panels_;
};

// Up to four queries that read one set of keys, with room for their scores.
struct QueryBlock {
  QueryBlock(int64_t max_keys, int64_t head_dim)
      : row_stride(padded_columns(head_dim)),
        score_stride(padded_columns(max_keys)),
        q(kQueries * row_stride),
        out(kQueries * row_stride),
        scores(kQueries * score_stride) {}

  int64_t row_stride, score_stride;
  Scratch q, out, scores;      // [4][row_stride], [4][row_stride], [4][score_stride]
  int64_t num_keys[kQueries];  // query i reads keys 0 .. num_keys[i] - 1
  float lse[kQueries];
};

// out[q][0..15] = factor * sum over i of coef[q * coef_stride + i] * panel[i][0..15], i < count.
template <int Q>
[[gnu::always_inline]] inline void tile_products(const float* coef, int64_t coef_stride, int64_t count,
                                                 const float* panel, float factor, float* out,
                                                 int64_t out_stride) {
  F8 acc[Q][2] = {};
  accumulate<Q>(coef, coef_stride, 1, 0, count, panel, acc);
  for (int q = 0; q < Q; ++q) {
    store8(out + q * out_stride, splat8(factor) * acc[q][0]);
    store8(out + q * out_stride + 8, splat8(factor) * acc[q][1]);
  }
}

// out[q] = sum over i < counts[q] of coef[q][i] * panel row i, for one panel. The queries advance
// together over the rows that all of them read, then each by itself.
template <int Q>
[[gnu::always_inline]] inline void weighted_rows(const float* coef, int64_t coef_stride,
                                                 const int64_t* counts, const float* panel, F8 (&acc)[Q][2]) {
  for (int q = 0; q < Q; ++q) acc[q][0] = acc[q][1] = F8{};
  int64_t common = counts[0];
  for (int q = 1; q < Q; ++q) common = std::min(common, counts[q]);
  accumulate<Q>(coef, coef_stride, 1, 0, common, panel, acc);
  for (int q = 0; q < Q; ++q) {
    F8 rest[1][2] = {{acc[q][0], acc[q][1]}};
    accumulate<1>(coef + q * coef_stride, 0, 1, common, counts[q], panel, rest);
    acc[q][0] = rest[0][0];
    acc[q][1] = rest[0][1];
  }
}

// Scores become exp(score - max); returns their sum, and the maximum in `max`.
inline float exponentiate(float* __restrict scores, int64_t count, float& max) {
  const int64_t padded = padded_columns(count), last = padded - kColumns;
  const auto in_last = static_cast<int32_t>(count - last);
  F8 largest = splat8(scores[0]);
  for (int64_t i = 0; i < last; i += kColumns) {
    largest = max8(largest, max8(load8(scores + i), load8(scores + i + 8)));
  }
  FP4T_KEEP_LOOP
  for (int32_t c = 0; c < kColumns; ++c) scores[last + c] = c < in_last ? scores[last + c] : scores[0];
  largest = max8(largest, max8(load8(scores + last), load8(scores + last + 8)));
  float m = largest[0];
  for (int l = 1; l < 8; ++l) m = largest[l] > m ? largest[l] : m;
  F8 low = {}, high = {};
  for (int64_t i = 0; i < padded; i += kColumns) {
    FP4T_KEEP_LOOP
    for (int64_t c = 0; c < kColumns; ++c) scores[i + c] = exp_f32(scores[i + c] - m);
    if (i == last) {
      FP4T_KEEP_LOOP
      for (int32_t c = 0; c < kColumns; ++c) scores[i + c] = c < in_last ? scores[i + c] : 0.0f;
    }
    low = low + load8(scores + i);
    high = high + load8(scores + i + 8);
  }
  max = m;
  return sum8(low + high);
}

template <int Q>
void attend(const Keys& keys, float scale, QueryBlock& block) {
  const int64_t dim = keys.head_dim(), stride = block.score_stride;
  const int64_t longest = *std::max_element(block.num_keys, block.num_keys + Q);
  float* scores = block.scores.get();
  for (int64_t first = 0; first < longest; first += kColumns) {
    tile_products<Q>(block.q.get(), block.row_stride, dim, keys.k_tile(first), scale, scores + first, stride);
  }
  float sum[Q], max[Q];
  for (int q = 0; q < Q; ++q) sum[q] = exponentiate(scores + q * stride, block.num_keys[q], max[q]);
  for (int q = 0; q < Q; ++q) block.lse[q] = max[q] + log_f32(sum[q]);
  for (int64_t c = 0; c < dim; c += kColumns) {
    F8 acc[Q][2];
    weighted_rows<Q>(scores, stride, block.num_keys, keys.v_panel(c), acc);
    for (int q = 0; q < Q; ++q) {
      store8(block.out.get() + q * block.row_stride + c, acc[q][0] / splat8(sum[q]));
      store8(block.out.get() + q * block.row_stride + c + 8, acc[q][1] / splat8(sum[q]));
    }
  }
}

// The first `count` queries of the block.
inline void attend(const Keys& keys, float scale, int64_t count, QueryBlock& block) {
  switch (count) {
    case 1:
      return attend<1>(keys, scale, block);
    case 2:
      return attend<2>(keys, scale, block);
    case 3:
      return attend<3>(keys, scale, block);
    default:
      return attend<kQueries>(keys, scale, block);
  }
}

// Where the heads lie in a packed row [q heads | k heads | v heads].
struct HeadLayout {
  int64_t heads, kv_heads, head_dim;
  int64_t group() const { return heads / kv_heads; }
  int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
  int64_t q(int64_t head) const { return head * head_dim; }
  int64_t k(int64_t kv_head) const { return (heads + kv_head) * head_dim; }
  int64_t v(int64_t kv_head) const { return (heads + kv_heads + kv_head) * head_dim; }
};

// Attends rows [first, last) of the packed tensor with the query heads of one key head; num_keys(t) is
// what row t reads. lse may be null.
template <class T, class NumKeys>
void attend_rows(const HeadLayout& layout, int64_t kv_head, const T* qkv, int64_t first, int64_t last,
                 const NumKeys& num_keys, const Keys& keys, float scale, T* out, float* lse) {
  const int64_t dim = layout.head_dim, first_head = kv_head * layout.group();
  const int64_t last_head = first_head + layout.group();
  QueryBlock block(keys.count(), dim);
  int64_t count = 0, places[kQueries];  // of the block's queries in tensors [T, heads]
  const auto finish = [&] {
    attend(keys, scale, count, block);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = 0; c < dim; c += kColumns) {
        store_columns(block.out.get() + i * block.row_stride + c, std::min(kColumns, dim - c),
                      out + places[i] * dim + c);
      }
      if (lse) lse[places[i]] = block.lse[i];
    }
    count = 0;
  };
  for (int64_t t = first; t < last; ++t) {
    for (int64_t head = first_head; head < last_head; ++head) {
      const T* q = qkv + t * layout.width() + layout.q(head);
      for (int64_t c = 0; c < dim; c += kColumns) {
        load_columns(q + c, std::min(kColumns, dim - c), block.q.get() + count * block.row_stride + c);
      }
      block.num_keys[count] = num_keys(t);
      places[count] = t * layout.heads + head;
      if (++count == kQueries) finish();
    }
  }
  if (count > 0) finish();
}

}  // namespace fp4t::cpu
