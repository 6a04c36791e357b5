// Rows of BF16 or F32 tensors as FP32 buffers: bodies load a row, compute in FP32 and store it with one
// rounding. The buffers are their own memory, so loops between load and store vectorise and operands may
// alias wherever an op allows it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "kernels/base/queue.h"
#include "kernels/base/tensor.h"
#include "kernels/formats/bf16.h"

namespace fp4t::cpu {

inline float to_f32(float x) { return x; }
inline float to_f32(Bf16 x) { return bf16_to_f32(x); }

template <class T>
T from_f32(float x);
template <>
inline float from_f32<float>(float x) {
  return x;
}
template <>
inline Bf16 from_f32<Bf16>(float x) {
  return f32_to_bf16(x);
}

// Before a loop over few elements: GCC would unroll it into scalars before it comes to vectorise.
#define FP4T_KEEP_LOOP _Pragma("GCC unroll 1")

template <class T>
void load_row(const T* __restrict src, float* __restrict dst, int64_t n) {
  FP4T_KEEP_LOOP
  for (int64_t i = 0; i < n; ++i) dst[i] = to_f32(src[i]);
}

template <class T>
void store_row(const float* __restrict src, T* __restrict dst, int64_t n) {
  FP4T_KEEP_LOOP
  for (int64_t i = 0; i < n; ++i) dst[i] = from_f32<T>(src[i]);
}

// Up to sixteen elements of a row. Sixteen are the rule, and a count known to the compiler makes them
// two vectors.
constexpr int64_t kColumns = 16;

template <class T>
void load_columns(const T* src, int64_t count, float* out) {
  if (count == kColumns) {
    load_row(src, out, kColumns);
  } else {
    load_row(src, out, count);
  }
}

template <class T>
void store_columns(const float* columns, int64_t count, T* out) {
  if (count == kColumns) {
    store_row(columns, out, kColumns);
  } else {
    store_row(columns, out, count);
  }
}

// Uninitialised FP32 scratch.
class Scratch {
 public:
  explicit Scratch(int64_t n) : data_(std::make_unique_for_overwrite<float[]>(static_cast<size_t>(n))) {}
  float* get() const { return data_.get(); }

 private:
  std::unique_ptr<float[]> data_;
};

// Streams of elements are worked on in blocks that fit the first cache, several to a chunk.
constexpr int64_t kBlock = 256;
constexpr int64_t kElementsPerChunk = 64 * kBlock;

// body(first, count) over [0, n) in blocks.
template <class Body>
void for_blocks(Queue& queue, int64_t n, const Body& body) {
  parallel_for(queue, n, kElementsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kBlock) body(i, std::min(kBlock, end - i));
  });
}

// Rows of `width` elements that make one chunk of work; from the width alone.
inline int64_t rows_per_chunk(int64_t width) {
  return width >= kElementsPerChunk ? 1 : kElementsPerChunk / (width < 1 ? 1 : width);
}

// Tokens whose contributions to a weight's gradient form one partial sum.
constexpr int64_t kTokensPerPartial = 64;

}  // namespace fp4t::cpu
