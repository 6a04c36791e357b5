// Rows of the key-value cache on the device: their place, and blocks of 32 as MXFP8 (kernels/cpu/kv_codec.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/bf16_pair.cuh"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/load.cuh"
#include "kernels/formats/mxfp8.h"
#include "kernels/ops/attention.h"

namespace fp4t::cuda {

inline constexpr int kKvBlock = 32;

struct CachePlaces {
  const int32_t* slots;
  const int32_t* positions;
  int64_t num_slots, max_length;
  const int32_t* table;                // null: slot s has page s alone
  int32_t pages_per_slot, page_shift;  // a page's length is 1 << page_shift
  int64_t num_pages;

  __host__ static CachePlaces of(const TensorView& slots, const TensorView& positions,
                                 const KvCacheView& cache) {
    CachePlaces p{
        slots.as<int32_t>(), positions.as<int32_t>(), cache.slots(), cache.max_length(), nullptr, 0, 0,
        cache.k.dim(0)};
    if (!cache.is_paged()) return p;
    p.table = cache.table.as<int32_t>();
    p.pages_per_slot = static_cast<int32_t>(cache.table.dim(1));
    while ((int64_t{1} << p.page_shift) < cache.k.dim(1)) ++p.page_shift;
    return p;
  }

  // The row of k and v that holds a position of a slot; neighbouring positions of a page, neighbouring rows.
  __device__ __forceinline__ int64_t row_of(int32_t slot, int32_t position) const {
    if (table == nullptr) return slot * max_length + position;
    const int64_t page = table[int64_t{slot} * pages_per_slot + (position >> page_shift)];
    return (page << page_shift) + (position & ((1 << page_shift) - 1));
  }

  // The same in 32 bits, where the cache has fewer rows than that.
  __device__ __forceinline__ int32_t small_row_of(int32_t slot, int32_t position) const {
    if (table == nullptr) return slot * static_cast<int32_t>(max_length) + position;
    const int32_t page = table[int64_t{slot} * pages_per_slot + (position >> page_shift)];
    return (page << page_shift) + (position & ((1 << page_shift) - 1));
  }

  // That of a row of the batch; -1 and a fault where it is outside of the cache.
  __device__ int64_t row(int64_t t, const FaultSink& sink) const {
    const int32_t slot = slots[t], position = positions[t];
    if (slot < 0 || slot >= num_slots) {
      report(sink, FaultKind::kIndex, t, slot);
      return -1;
    }
    if (position < 0 || position >= max_length) {
      report(sink, FaultKind::kIndex, t, position);
      return -1;
    }
    const int64_t place = row_of(slot, position);
    if (place < 0 || (table != nullptr && place >> page_shift >= num_pages)) {
      report(sink, FaultKind::kIndex, t, position);
      return -1;
    }
    return place;
  }
};

template <bool kVectors, class T>
__device__ __forceinline__ void load_kv_block(const T* from, float (&x)[kKvBlock]) {
#pragma unroll
  for (int c = 0; c < kKvBlock; c += kVector) {
    float part[kVector];
    if constexpr (kVectors) {
      load_vector(from + c, part);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) part[i] = to_f32(from[c + i]);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[c + i] = part[i];
  }
}

template <bool kVectors, class T>
__device__ __forceinline__ void store_kv_block(const float (&x)[kKvBlock], T* to) {
#pragma unroll
  for (int c = 0; c < kKvBlock; c += kVector) {
    float part[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) part[i] = x[c + i];
    if constexpr (kVectors) {
      store_vector(part, to + c);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) to[c + i] = from_f32<T>(part[i]);
    }
  }
}

// Codes of a block; returns the scale byte. NaN takes no part in the maximum.
__device__ __forceinline__ uint8_t encode_kv_block(const float (&x)[kKvBlock], uint8_t (&codes)[kKvBlock]) {
  float amax = 0.0f;
#pragma unroll
  for (int c = 0; c < kKvBlock; ++c) amax = fabsf(x[c]) > amax ? fabsf(x[c]) : amax;
  const uint32_t scale = mxfp8_block_scale(amax);
  const float factor = mxfp8_encode_factor(scale);
#pragma unroll
  for (int c = 0; c < kKvBlock; ++c) codes[c] = static_cast<uint8_t>(e4m3_nearest(x[c] * factor));
  return static_cast<uint8_t>(scale);
}

// A value as the cache gives it back: rounded to the act dtype T. NaN keeps its sign, as on the CPU; a
// product on the GPU would lose it.
template <class T>
__device__ __forceinline__ T decode_kv(uint32_t code, float scale) {
  const float value = e4m3_value(code);
  return from_f32<T>((code & 0x7Fu) == 0x7Fu ? value : value * scale);
}

// One pair of codes as BF16. The bits of a code, moved to their places in BF16, stand for the value times
// 2^-120, so one exact product with `factor`, scale * 2^120 twice, is the value.
__device__ __forceinline__ uint32_t decode_pair(uint32_t codes, uint32_t factor) {
  const uint32_t wide = __byte_perm(codes, 0, 0x4140);
  const uint32_t bits = (wide & 0x007F007Fu) << 4 | (wide & 0x00800080u) << 8;
  return mul_bf16x2(bits, factor);
}

// Sixteen codes of one block of 32, as decode_kv gives them.
__device__ __forceinline__ void decode_codes(const uint4& codes, uint32_t scale, uint32_t (&word)[8]) {
  const uint32_t in[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t nan = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) nan |= ((in[i] & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
  if (nan == 0 && scale <= 134) {
    const uint32_t factor = (scale + 120) << 7, twice = factor | factor << 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) word[i] = decode_pair(in[i / 2] >> (i % 2 * 16), twice);
    return;
  }
  const float value = e8m0_value(scale);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t pair = in[i / 2] >> (i % 2 * 16);
    word[i] = decode_kv<Bf16>(pair & 0xFFu, value).bits |
              static_cast<uint32_t>(decode_kv<Bf16>(pair >> 8 & 0xFFu, value).bits) << 16;
  }
}

}  // namespace fp4t::cuda
