#include "kernels/cpu/kv_codec.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

template <class T>
void kv_append(Queue& queue, const KvAppend& op) {
  const int64_t kv_width = op.kv_heads * op.head_dim, width = op.qkv.dim(1);
  const T* qkv = op.qkv.as<T>();
  const int32_t *slots = op.slots.as<int32_t>(), *positions = op.positions.as<int32_t>();
  parallel_for(queue, op.qkv.dim(0), rows_per_chunk(2 * kv_width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = checked_cache_row(op.kName, op.cache, slots[t], positions[t]) * kv_width;
      const T *k = qkv + t * width + op.heads * op.head_dim, *v = k + kv_width;
      store_kv(op.cache.format, k, kv_width, first, op.cache.k, op.cache.k_scales);
      store_kv(op.cache.format, v, kv_width, first, op.cache.v, op.cache.v_scales);
    }
  });
}

template <class T>
void kv_round(Queue& queue, const KvRound& op) {
  const int64_t count = 2 * op.kv_heads * op.head_dim, width = op.qkv.dim(1);
  T* qkv = op.qkv.as<T>();
  parallel_for(queue, op.qkv.dim(0), rows_per_chunk(count), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T* row = qkv + t * width + op.heads * op.head_dim;
      for (int64_t i = 0; i < count; i += kKvBlock) {
        uint8_t codes[kKvBlock];
        const uint8_t scale = encode_kv_block(row + i, codes);
        for (int64_t c = 0; c < kKvBlock; c += kColumns) {
          float columns[kColumns];
          decode_kv_columns<T>(codes + c, scale, columns);
          store_row(columns, row + i + c, kColumns);
        }
      }
    }
  });
}

}  // namespace

void run(Queue& queue, const KvAppend& op) {
  for_float_type(op.qkv.dtype, [&](auto type) { kv_append<decltype(type)>(queue, op); });
}

void run(Queue& queue, const KvCopyPages& op) {
  const int32_t *from = op.from.as<int32_t>(), *to = op.to.as<int32_t>();
  const int64_t pages = op.cache.k.dim(0);
  for (int64_t i = 0; i < op.from.dim(0); ++i) {
    for (const int32_t page : {from[i], to[i]}) {
      FP4T_CHECK(page >= 0 && page < pages, op.kName, ": page ", page, " of ", pages);
    }
  }
  parallel_for(queue, op.from.dim(0), 1, [&](int64_t begin, int64_t end) {
    for (const TensorView& part : {op.cache.k, op.cache.v, op.cache.k_scales, op.cache.v_scales}) {
      if (!part.data) continue;
      const int64_t bytes = part.bytes() / pages;
      char* data = static_cast<char*>(part.data);
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(data + to[i] * bytes, data + from[i] * bytes, static_cast<size_t>(bytes));
      }
    }
  });
}

void run(Queue& queue, const KvRound& op) {
  for_float_type(op.qkv.dtype, [&](auto type) { kv_round<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cpu
