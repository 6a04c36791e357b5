// The distribution of one row of logits, read by one block: largest value, sum of exponentials, entropy
// (definitions in kernels/ops/loss.h). One source for the sampler and the trainer, so that both give the
// same bits: which thread adds what, and in which order, depends on the vocabulary alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/load.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/formats/math.h"

namespace fp4t::cuda {

inline constexpr float kMinusInf = -__builtin_huge_valf();

// Threads of a block, whatever the op.
inline int row_threads(int64_t vocab) { return vocab >= 4096 ? 512 : 128; }
inline constexpr int kMaxRowThreads = 512;
inline constexpr int kMaxRowWarps = kMaxRowThreads / 32;

// Quads that are summed at a time: part of the order.
inline constexpr int kSummedQuads = 4;

// Which elements are a thread's: four at a time ("a quad"), `lane_step` apart from its neighbour's and
// `step` apart from each other. Rows of whole vectors give a thread 16 bytes; others, whose rows begin at
// any address, give neighbours neighbouring elements.
struct RowLayout {
  int64_t vocab;
  int32_t lane_step, step;

  __device__ int64_t quad_width() const { return int64_t{4} * blockDim.x; }
  __device__ int64_t first() const { return int64_t{threadIdx.x} * lane_step; }
};
inline RowLayout row_layout(int64_t vocab) {
  return vocab % 4 == 0 ? RowLayout{vocab, 4, 1} : RowLayout{vocab, 1, row_threads(vocab)};
}
// Whether every quad of every row may be loaded as one vector (kVector below): no other bits, less time.
inline bool has_vectors(int64_t vocab, const void* rows) { return vocab % 4 == 0 && aligned16(rows); }

// The four elements from `at` on, -inf beyond the row.
template <bool kVector>
__device__ __forceinline__ void load_quad(const float* row, const RowLayout& layout, int64_t at, float* out) {
  if constexpr (kVector) {
    float4 v = make_float4(kMinusInf, kMinusInf, kMinusInf, kMinusInf);
    if (at < layout.vocab) v = *reinterpret_cast<const float4*>(row + at);
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t i = at + j * layout.step;
      out[j] = i < layout.vocab ? row[i] : kMinusInf;
    }
  }
}

// Calls body(values, at) for this thread's elements: kQuads quads at a time while they are whole, then one
// at a time. Element 4 q + j of the values is element at + q * quad_width() + j * step of the row, divided
// by the temperature; what lies beyond the row is -inf.
template <bool kVector, int kQuads, class Body>
__device__ __forceinline__ void for_quads(const float* row, const RowLayout& layout, float temperature,
                                          const Body& body) {
  const int64_t width = layout.quad_width();
  const bool divide = temperature != 1.0f;
  int64_t begin = 0;
  for (; begin + kQuads * width <= layout.vocab; begin += kQuads * width) {
    float x[4 * kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      load_quad<kVector>(row, layout, begin + q * width + layout.first(), x + 4 * q);
    }
    if (divide) {
#pragma unroll
      for (int j = 0; j < 4 * kQuads; ++j) x[j] = x[j] / temperature;
    }
    body(x, begin + layout.first());
  }
  for (; begin < layout.vocab; begin += width) {
    float x[4];
    load_quad<kVector>(row, layout, begin + layout.first(), x);
    if (divide) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = x[j] / temperature;
    }
    body(x, begin + layout.first());
  }
}

// The larger of two values, NaN if one is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}
__device__ __forceinline__ float warp_max_or_nan(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = max_or_nan(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}

// Distances beyond count as 87: e^-87 is nothing beside the largest weight, which is 1.
inline constexpr float kLeastDistance = -87.0f;
__device__ __forceinline__ float clamped_distance(float x, float largest) {
  return fmaxf(x - largest, kLeastDistance);
}

// exp_f32 (kernels/formats/math.h) for x in [-87, 87], the same bits in half as many instructions: no
// overflow, no subnormals and no NaN, so that the power of two is added to the exponent.
__device__ __forceinline__ float exp_of_distance(float x) {
  constexpr float kShift = 0x1.8p23f;
  const float shifted = __fmaf_rn(x, 0x1.715476p0f, kShift);
  const float n = shifted - kShift;
  float r = __fmaf_rn(n, -detail::kLn2Hi, x);
  r = __fmaf_rn(n, -detail::kLn2Lo, r);
  float q = 0x1.6a2444p-10f;
  q = __fmaf_rn(q, r, 0x1.1239d6p-7f);
  q = __fmaf_rn(q, r, 0x1.5558f2p-5f);
  q = __fmaf_rn(q, r, 0x1.555492p-3f);
  q = __fmaf_rn(q, r, 0x1.fffffcp-2f);
  const float one_plus_r = 1.0f + r;
  const float lost = (1.0f - one_plus_r) + r;
  const float p = one_plus_r + __fmaf_rn(r * r, q, lost);
  // The low bits of `shifted` are the exponent; those of its own fall out at the top.
  return float_of(bits_of(p) + (bits_of(shifted) << 23));
}

// Weight of a value relative to the largest.
__device__ __forceinline__ float weight_of(float x, float largest) {
  return exp_of_distance(clamped_distance(x, largest));
}

// What clamped distances add to a moment is below this for any row, and stands for nothing.
inline constexpr float kLeastMoment = 0x1p-100f;

// A weight relative to the largest, in units of 2^-30: what draws and top-p masses count in.
__device__ __forceinline__ int32_t fixed_point(float weight) {
  return static_cast<int32_t>(weight * 0x1p30f);
}

// What a row comes to. Without a distribution (NaN, +inf or nothing but -inf) `sum` is NaN.
struct RowTotals {
  float max;     // of logits / temperature
  float sum;     // of weights
  float moment;  // of weight * (logit / temperature - max), where asked for
  __device__ bool finite() const { return sum > 0.0f && sum < -kMinusInf; }
};

// Totals of some elements, relative to the largest so far; four partial sums for the arithmetic's latency.
// A NaN becomes the largest and stays it; then, as with infinities, the sums mean nothing.
template <bool kMoment>
struct RunningTotals {
  float max = kMinusInf;
  float sum[4] = {}, moment[4] = {};

  __device__ void raise(float to) {
    const bool first = max == kMinusInf;
    const float distance = first ? 0.0f : clamped_distance(max, to);
    const float factor = first ? 0.0f : exp_of_distance(distance);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (kMoment) moment[j] = factor * (moment[j] + distance * sum[j]);
      sum[j] = factor * sum[j];
    }
    max = to;
  }

  template <int kCount>
  __device__ void add(const float (&x)[kCount]) {
    float largest = max;
#pragma unroll
    for (int j = 0; j < kCount; ++j) largest = max_or_nan(largest, x[j]);
    if (largest != max) raise(largest);
    const float base = max == kMinusInf ? 0.0f : max;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float distance = clamped_distance(x[j], base);
      const float weight = exp_of_distance(distance);
      sum[j % 4] += weight;
      if constexpr (kMoment) moment[j % 4] += weight * distance;
    }
  }
};

// Scratch of the block for sums of a row.
struct RowScratch {
  float max[kMaxRowWarps], sum[kMaxRowWarps], moment[kMaxRowWarps];
};

// Totals of a warp from those of its lanes; every lane gets the result.
template <bool kMoment>
__device__ __forceinline__ RowTotals warp_merge(const RowTotals& part) {
  const float max = warp_max_or_nan(part.max);
  const bool none = part.max == kMinusInf;
  const float distance = none ? 0.0f : clamped_distance(part.max, max);
  const float factor = none ? 0.0f : exp_of_distance(distance);
  RowTotals out{max, warp_sum(factor * part.sum), 0.0f};
  if constexpr (kMoment) out.moment = warp_sum(factor * (part.moment + distance * part.sum));
  return out;
}

// Every thread gets the result. Ends with a barrier: scratch may be used again.
template <bool kMoment>
__device__ __forceinline__ RowTotals block_merge(RowTotals part, RowScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  part = warp_merge<kMoment>(part);
  if (lane == 0) {
    scratch.max[warp] = part.max;
    scratch.sum[warp] = part.sum;
    scratch.moment[warp] = part.moment;
  }
  __syncthreads();
  part = {kMinusInf, 0.0f, 0.0f};
  if (lane < static_cast<int>(blockDim.x) / 32) {
    part = {scratch.max[lane], scratch.sum[lane], scratch.moment[lane]};
  }
  part = warp_merge<kMoment>(part);
  __syncthreads();
  return part;
}

// One pass over the row.
template <bool kVector, bool kMoment>
__device__ __forceinline__ RowTotals row_totals(const float* row, const RowLayout& layout, float temperature,
                                                RowScratch& scratch) {
  RunningTotals<kMoment> running;
  for_quads<kVector, kSummedQuads>(row, layout, temperature, [&](const auto& x, int64_t) { running.add(x); });
  const float* s = running.sum;
  const float* m = running.moment;
  RowTotals totals = block_merge<kMoment>(
      {running.max, (s[0] + s[1]) + (s[2] + s[3]), (m[0] + m[1]) + (m[2] + m[3])}, scratch);
  if (!(fabsf(totals.max) < -kMinusInf)) totals.sum = float_of(0x7FC00000u);
  return totals;
}

}  // namespace fp4t::cuda
