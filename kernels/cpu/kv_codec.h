// Rows of the key-value cache: bf16 keeps the values as they are, mxfp8 stores blocks of 32 along the
// head dimension. Rounding in place is encode followed by decode, so the trainer reads what the cache
// would give back.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/rows.h"
#include "kernels/formats/mxfp8.h"
#include "kernels/ops/attention.h"

namespace fp4t::cpu {

constexpr int64_t kKvBlock = 32;

// Checks the place of a row in a cache and returns slot * max_length + position.
inline int64_t cache_row(const char* op, const KvCacheView& cache, int32_t slot, int32_t position) {
  FP4T_CHECK(slot >= 0 && slot < cache.k.dim(0), op, ": slot ", slot, " of ", cache.k.dim(0));
  FP4T_CHECK(position >= 0 && position < cache.k.dim(1), op, ": position ", position, " of ", cache.k.dim(1));
  return slot * cache.k.dim(1) + position;
}

// One block: 32 codes; returns the scale byte.
template <class T>
uint8_t encode_kv_block(const T* values, uint8_t* codes) {
  float x[kKvBlock], amax = 0.0f;
  load_row(values, x, kKvBlock);
  for (float v : x) amax = std::fabs(v) > amax ? std::fabs(v) : amax;
  const uint32_t scale = mxfp8_block_scale(amax);
  const float factor = mxfp8_encode_factor(scale);
  for (int64_t i = 0; i < kKvBlock; ++i) codes[i] = static_cast<uint8_t>(e4m3_nearest(x[i] * factor));
  return static_cast<uint8_t>(scale);
}

// The block's values, rounded to the act dtype T.
template <class T>
void decode_kv_block(const uint8_t* codes, uint8_t scale, T* values) {
  const float factor = e8m0_value(scale);
  for (int64_t i = 0; i < kKvBlock; ++i) values[i] = from_f32<T>(e4m3_value(codes[i]) * factor);
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

// Reads `count` values at element `first` of a cache tensor into FP32.
template <class T>
void load_kv(Format format, const TensorView& cache, const TensorView& scales, int64_t first, int64_t count,
             float* row) {
  if (format == Format::kBf16) {
    load_row(cache.as<T>() + first, row, count);
    return;
  }
  for (int64_t i = 0; i < count; i += kKvBlock) {
    T block[kKvBlock];
    decode_kv_block(cache.as<uint8_t>() + first + i, scales.as<uint8_t>()[(first + i) / kKvBlock], block);
    load_row(block, row + i, kKvBlock);
  }
}

}  // namespace fp4t::cpu
