// Rows of the key-value cache: bf16 keeps the values as they are, mxfp8 stores blocks of 32 along the
// head dimension. Rounding in place is encode followed by decode, so the trainer reads what the cache
// would give back.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/rows.h"
#include "kernels/formats/decode.h"
#include "kernels/formats/mxfp8.h"
#include "kernels/ops/attention.h"

namespace fp4t::cpu {

constexpr int64_t kKvBlock = 32;

// The row of a cache's k and v that holds a position of a slot.
inline int64_t cache_row(const KvCacheView& cache, int64_t slot, int64_t position) {
  const int64_t length = cache.k.dim(1);
  if (!cache.is_paged()) return slot * length + position;
  const int64_t page = cache.table.as<int32_t>()[slot * cache.table.dim(1) + position / length];
  return page * length + position % length;
}

// The same of places that come from outside, checked.
inline int64_t checked_cache_row(const char* op, const KvCacheView& cache, int32_t slot, int32_t position) {
  FP4T_CHECK(slot >= 0 && slot < cache.slots(), op, ": slot ", slot, " of ", cache.slots());
  FP4T_CHECK(position >= 0 && position < cache.max_length(), op, ": position ", position, " of ",
             cache.max_length());
  const int64_t row = cache_row(cache, slot, position), rows = cache.k.dim(0) * cache.k.dim(1);
  FP4T_CHECK(row >= 0 && row < rows, op, ": slot ", slot, " has no page for position ", position);
  return row;
}

// One block: 32 codes; returns the scale byte.
template <class T>
uint8_t encode_kv_block(const T* values, uint8_t* codes) {
  float x[kKvBlock], amax = 0.0f;
  load_row(values, x, kKvBlock);
  F8 lanes = {};  // NaN, on the left of the comparison, never gets in
  for (int64_t i = 0; i < kKvBlock; i += 8) lanes = max8(abs8(load8(x + i)), lanes);
  for (int l = 0; l < 8; ++l) amax = lanes[l] > amax ? lanes[l] : amax;
  const uint32_t scale = mxfp8_block_scale(amax);
  const float factor = mxfp8_encode_factor(scale);
  FP4T_KEEP_LOOP
  for (int64_t i = 0; i < kKvBlock; ++i) codes[i] = static_cast<uint8_t>(e4m3_nearest(x[i] * factor));
  return static_cast<uint8_t>(scale);
}

// Sixteen values in FP32, rounded to the act dtype T. Scales of 2^-124 to 2^119 leave nothing to round
// (NUMERICS.md section 0.0).
template <class T>
void decode_kv_columns(const uint8_t* codes, uint8_t scale, float* columns) {
  decode_e4m3(codes, kColumns, e8m0_value(scale), columns);
  if (scale >= 127 - 124 && scale <= 127 + 119) return;
  for (int64_t i = 0; i < kColumns; ++i) columns[i] = to_f32(from_f32<T>(columns[i]));
}

// Writes `count` values at element `first` of a cache tensor.
template <class T>
void store_kv(Format format, const T* values, int64_t count, int64_t first, const TensorView& cache,
              const TensorView& scales) {
  if (format == Format::kBf16) {
    std::memcpy(cache.as<T>() + first, values, static_cast<size_t>(count) * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < count; i += kKvBlock) {
    scales.as<uint8_t>()[(first + i) / kKvBlock] =
        encode_kv_block(values + i, cache.as<uint8_t>() + first + i);
  }
}

// Reads up to 16 values at element `first` of a cache tensor into FP32; they lie in one block.
template <class T>
void load_kv(Format format, const TensorView& cache, const TensorView& scales, int64_t first, int64_t count,
             float* columns) {
  if (format == Format::kBf16) {
    load_columns(static_cast<const T*>(cache.data) + first, count, columns);
    return;
  }
  decode_kv_columns<T>(static_cast<const uint8_t*>(cache.data) + first,
                       static_cast<const uint8_t*>(scales.data)[first / kKvBlock], columns);
}

}  // namespace fp4t::cpu
