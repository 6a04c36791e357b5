#include "kernels/cpu/gemm_source.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/cpu/gemm_tile.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/decode.h"

namespace fp4t::cpu {

namespace {

float widen(float x) { return x; }
float widen(Bf16 x) { return bf16_to_f32(x); }

typedef float Lane8 __attribute__((vector_size(32)));

template <class T>
void widen_row(const T* src, int64_t count, float* dst) {
  for (int64_t i = 0; i < count; ++i) dst[i] = widen(src[i]);
}

// dst[k * dst_stride + i] = src[i * src_stride + k] for i, k < 8, in registers.
template <class T>
void transpose_8x8(const T* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  Lane8 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    float row[8];
    widen_row(src + i * src_stride, 8, row);
    std::memcpy(&a[i], row, sizeof row);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // interleave pairs of rows
    b[2 * i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    b[2 * i + 1] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {  // and pairs of pairs: half-rows of four rows
    a[4 * i + 0] = __builtin_shufflevector(b[4 * i], b[4 * i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    a[4 * i + 1] = __builtin_shufflevector(b[4 * i], b[4 * i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    a[4 * i + 2] = __builtin_shufflevector(b[4 * i + 1], b[4 * i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    a[4 * i + 3] = __builtin_shufflevector(b[4 * i + 1], b[4 * i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    b[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) std::memcpy(dst + i * dst_stride, &b[i], sizeof b[i]);
}

// dst[k * dst_stride + i] = src[i * src_stride + k] for i < rows, k < cols.
template <class T>
void transpose(const T* src, int64_t src_stride, int64_t rows, int64_t cols, float* dst, int64_t dst_stride) {
  const int64_t rows8 = rows / 8 * 8, cols8 = cols / 8 * 8;
  for (int64_t i = 0; i < rows8; i += 8) {
    for (int64_t k = 0; k < cols8; k += 8) {
      transpose_8x8(src + i * src_stride + k, src_stride, dst + k * dst_stride + i, dst_stride);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = i < rows8 ? cols8 : 0; k < cols; ++k) {
      dst[k * dst_stride + i] = widen(src[i * src_stride + k]);
    }
  }
}

// Copies rows of `count` values, dst_stride apart.
template <class T>
void copy_rows(const T* src, int64_t src_stride, int64_t rows, int64_t count, float* dst,
               int64_t dst_stride) {
  if (count == kTileCols) {  // whole panels of transposed operands: a constant count vectorises best
    for (int64_t i = 0; i < rows; ++i) widen_row(src + i * src_stride, kTileCols, dst + i * dst_stride);
  } else {
    for (int64_t i = 0; i < rows; ++i) widen_row(src + i * src_stride, count, dst + i * dst_stride);
  }
}

void decode_rows(const GemmSource& s, int64_t outer0, int64_t num_outer, int64_t depth0, int64_t num_depth,
                 float* dst, int64_t dst_stride) {
  for (int64_t i = 0; i < num_outer; ++i) {
    float* row = dst + i * dst_stride;
    if (s.stored_count > 0) {
      decode_group_row(*s.codes, s.stored_begin, s.stored_count, outer0 + i, depth0, num_depth, row);
    } else {
      decode_row(*s.codes, s.row0 + outer0 + i, depth0, num_depth, row);
    }
  }
}

template <class T>
void load_plain_rows(const GemmSource& s, int64_t outer0, int64_t num_outer, int64_t depth0,
                     int64_t num_depth, float* dst, int64_t dst_stride) {
  const T* data = static_cast<const T*>(s.data);
  if (s.depth_outer) {
    transpose(data + depth0 * s.stride + outer0, s.stride, num_depth, num_outer, dst, dst_stride);
  } else {
    copy_rows(data + outer0 * s.stride + depth0, s.stride, num_outer, num_depth, dst, dst_stride);
  }
}

template <class T>
void load_plain_panel(const GemmSource& s, int64_t outer0, int64_t num_outer, int64_t depth0,
                      int64_t num_depth, float* dst) {
  const T* data = static_cast<const T*>(s.data);
  if (s.depth_outer) {
    copy_rows(data + depth0 * s.stride + outer0, s.stride, num_depth, num_outer, dst, kTileCols);
  } else {
    transpose(data + outer0 * s.stride + depth0, s.stride, num_outer, num_depth, dst, kTileCols);
  }
}

}  // namespace

void load_rows(const GemmSource& source, int64_t outer0, int64_t num_outer, int64_t depth0, int64_t num_depth,
               float* dst, int64_t dst_stride) {
  switch (source.kind) {
    case GemmSource::Kind::kF32:
      return load_plain_rows<float>(source, outer0, num_outer, depth0, num_depth, dst, dst_stride);
    case GemmSource::Kind::kBf16:
      return load_plain_rows<Bf16>(source, outer0, num_outer, depth0, num_depth, dst, dst_stride);
    case GemmSource::Kind::kCodes:
      return decode_rows(source, outer0, num_outer, depth0, num_depth, dst, dst_stride);
  }
}

void load_panel(const GemmSource& source, int64_t outer0, int64_t num_outer, int64_t depth0,
                int64_t num_depth, float* dst) {
  FP4T_CHECK(num_outer <= kTileCols && num_depth <= kMaxDepth, num_outer, " x ", num_depth);
  if (num_outer < kTileCols) std::fill_n(dst, num_depth * kTileCols, 0.0f);
  switch (source.kind) {
    case GemmSource::Kind::kF32:
      return load_plain_panel<float>(source, outer0, num_outer, depth0, num_depth, dst);
    case GemmSource::Kind::kBf16:
      return load_plain_panel<Bf16>(source, outer0, num_outer, depth0, num_depth, dst);
    case GemmSource::Kind::kCodes: {
      alignas(64) float rows[8 * kMaxDepth];  // 8 at a time: rows and panel stay in first-level cache
      for (int64_t i = 0; i < num_outer; i += 8) {
        const int64_t count = std::min<int64_t>(8, num_outer - i);
        decode_rows(source, outer0 + i, count, depth0, num_depth, rows, kMaxDepth);
        transpose(rows, kMaxDepth, count, num_depth, dst + i, kTileCols);
      }
    }
  }
}

}  // namespace fp4t::cpu
