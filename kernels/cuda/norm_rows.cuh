// What the norms share. Thread l of the G that hold a row takes the neighbours 8 (j G + l) .. + 8 for
// j = 0, 1, ...; its sum runs over four accumulators, so a row's result depends on the width alone:
// neither on the number of rows nor on whether they could be loaded as vectors.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/base/queue.h"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/reduce.cuh"

namespace fp4t::cuda {

// Weight gradients are summed over chunks of tokens, then over the chunks: two chunks for every
// multiprocessor of an H200, on any GPU, because the order must not depend on where it runs.
inline constexpr int64_t kMaxChunks = 264;
inline int64_t tokens_per_chunk(int64_t tokens) {
  constexpr int64_t kFewest = 8;
  return std::max(kFewest, ceil_div(tokens, kMaxChunks));
}

// first[i] += the sum of column i of partials [chunks, columns] for i < split, second[i - split] the rest.
void add_partials(Queue& queue, const char* op, const float* partials, int64_t chunks, int64_t columns,
                  float* first, int64_t split, float* second);

// kVector elements at `column`; what lies past the row's end reads as zero.
template <class T>
__device__ __forceinline__ void load_part(const T* row, int64_t column, int64_t width,
                                          float (&out)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) out[k] = column + k < width ? to_f32(row[column + k]) : 0.0f;
}

template <class T>
__device__ __forceinline__ void store_part(const float (&in)[kVector], T* row, int64_t column,
                                           int64_t width) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (column + k < width) row[column + k] = from_f32<T>(in[k]);
  }
}

// A thread's part of an inner product.
struct Dot {
  float lane[4] = {};
  __device__ __forceinline__ void add(const float (&a)[kVector], const float (&b)[kVector]) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) lane[k % 4] = __fmaf_rn(a[k], b[k], lane[k % 4]);
  }
  __device__ __forceinline__ float sum() const { return (lane[0] + lane[2]) + (lane[1] + lane[3]); }
};

__device__ __forceinline__ float reciprocal_rms(float sum_of_squares, int64_t n, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(n) + eps);
}

// The parts of the `warps` warps that hold a row, in the order of the warps; every thread gets the sum.
// `scratch` has one value a warp and must not be in use when there is more than one.
__device__ __forceinline__ float row_sum(float part, int warps, int warp, float* scratch) {
  part = warp_sum(part);
  if (warps == 1) return part;
  if (threadIdx.x % 32 == 0) scratch[warp] = part;
  __syncthreads();
  float sum = scratch[0];
  for (int w = 1; w < warps; ++w) sum += scratch[w];
  return sum;
}

// Eight elements as they lie in memory.
__device__ __forceinline__ uint4 load_raw(const Bf16* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ __forceinline__ void decode(const uint4& raw, float (&out)[kVector]) {
  const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = float_of(word[i] << 16);
    out[2 * i + 1] = float_of(word[i] & 0xFFFF0000u);
  }
}
// Rounds as f32_to_bf16 does, but for the payload of NaN.
__device__ __forceinline__ uint4 encode(const float (&in)[kVector]) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
    word[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}
__device__ __forceinline__ void store_raw(const uint4& raw, Bf16* p) { *reinterpret_cast<uint4*>(p) = raw; }

// 16 bytes into shared memory, which the thread that asked for them may read after fetch_wait.
__device__ __forceinline__ void fetch(uint4* shared, const Bf16* p) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(p) : "memory");
}
__device__ __forceinline__ void fetch_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last kPending commits have arrived.
template <int kPending>
__device__ __forceinline__ void fetch_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fp4t::cuda
