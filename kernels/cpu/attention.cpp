#include "kernels/ops/attention.h"

#include "kernels/cpu/attention_core.h"
#include "kernels/cpu/documents.h"
#include "kernels/cpu/kv_codec.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

// Rows of a document that are one piece of work; each piece lays out the keys before it by itself.
constexpr int64_t kRowsPerPiece = 128;

struct Piece {
  int64_t doc_begin, begin, end;
};

template <class T>
void attention_forward(Queue& queue, const AttentionForward& op) {
  const HeadLayout layout = {op.heads, op.kv_heads, op.head_dim};
  std::vector<Piece> pieces;
  for (const RowSpan& doc : documents_of(op.doc_begin, op.kName)) {
    for (int64_t t = doc.begin; t < doc.end; t += kRowsPerPiece) {
      pieces.push_back({doc.begin, t, std::min(doc.end, t + kRowsPerPiece)});
    }
  }
  const T* qkv = op.qkv.as<T>();
  const auto work = [&](int64_t item) {
    const Piece& piece = pieces[static_cast<size_t>(item / op.kv_heads)];
    const int64_t kv_head = item % op.kv_heads, width = layout.width();
    const T* first = qkv + piece.doc_begin * width;
    const Keys keys(piece.end - piece.doc_begin, op.head_dim);
    const auto load_from = [&](int64_t offset) {
      return [=](int64_t j, int64_t c, int64_t n, float* columns) {
        load_columns(first + j * width + offset + c, n, columns);
      };
    };
    keys.fill(load_from(layout.k(kv_head)), load_from(layout.v(kv_head)));
    attend_rows(
        layout, kv_head, qkv, piece.begin, piece.end, [&](int64_t t) { return t - piece.doc_begin + 1; },
        keys, op.scale, op.out.as<T>(), op.lse.as<float>());
  };
  parallel_for(queue, static_cast<int64_t>(pieces.size()) * op.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) work(item);
  });
}

// Runs of neighbouring rows with one slot share their keys.
std::vector<RowSpan> runs_of(const int32_t* slots, int64_t rows) {
  std::vector<RowSpan> runs;
  for (int64_t t = 0; t < rows; ++t) {
    if (t > 0 && slots[t] == slots[t - 1]) {
      runs.back().end = t + 1;
    } else {
      runs.push_back({t, t + 1});
    }
  }
  return runs;
}

template <class T>
void attention_cached(Queue& queue, const AttentionCached& op) {
  const HeadLayout layout = {op.heads, op.kv_heads, op.head_dim};
  const KvCacheView& cache = op.cache;
  const int32_t *slot = op.slots.as<int32_t>(), *positions = op.positions.as<int32_t>();
  for (int64_t t = 0; t < op.qkv.dim(0); ++t) checked_cache_row(op.kName, cache, slot[t], positions[t]);
  const std::vector<RowSpan> runs = runs_of(slot, op.qkv.dim(0));
  const auto work = [&](int64_t item) {
    const RowSpan& run = runs[static_cast<size_t>(item / op.kv_heads)];
    const int64_t kv_head = item % op.kv_heads, dim = op.head_dim;
    const int64_t own = slot[run.begin];
    const Keys keys(*std::max_element(positions + run.begin, positions + run.end) + 1, dim);
    const auto element = [&](int64_t j) { return (cache_row(cache, own, j) * op.kv_heads + kv_head) * dim; };
    const auto load_from = [&](const TensorView& values, const TensorView& scales) {
      return [&](int64_t j, int64_t c, int64_t n, float* columns) {
        load_kv<T>(cache.format, values, scales, element(j) + c, n, columns);
      };
    };
    keys.fill(load_from(cache.k, cache.k_scales), load_from(cache.v, cache.v_scales));
    attend_rows(
        layout, kv_head, op.qkv.as<T>(), run.begin, run.end, [&](int64_t t) { return positions[t] + 1; },
        keys, op.scale, op.out.as<T>(), nullptr);
  };
  parallel_for(queue, static_cast<int64_t>(runs.size()) * op.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) work(item);
  });
}

}  // namespace

void run(Queue& queue, const AttentionForward& op) {
  for_float_type(op.qkv.dtype, [&](auto type) { attention_forward<decltype(type)>(queue, op); });
}

void run(Queue& queue, const AttentionCached& op) {
  for_float_type(op.qkv.dtype, [&](auto type) { attention_cached<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cpu
