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
inline constexpr int kMaxRowThreads = 512;
inline constexpr int64_t kLongRow = 4096;
inline int row_threads(int64_t vocab) { return vocab >= kLongRow ? kMaxRowThreads : 128; }
inline constexpr int kMaxRowWarps = kMaxRowThreads / 32;

// Quads that are summed at a time: part of the order.
inline constexpr int kSummedQuads = 4;

// Which elements are a thread's: four at a time ("a quad"), `lane_step` apart from its neighbour's and
// `step` apart from each other. Rows of whole vectors give a thread 16 bytes; others, whose rows begin at
// any address, give neighbours neighbouring elements.
struct RowLayout {
  int64_t vocab;
  int32_t lane_step, step;
};
inline RowLayout row_layout(int64_t vocab) {
  return vocab % 4 == 0 ? RowLayout{vocab, 4, 1} : RowLayout{vocab, 1, row_threads(vocab)};
}
// Whether every quad of every row may be loaded as one vector by a block of the full size (kVector below): no
// other bits, less time.
inline bool has_vectors(int64_t vocab, const void* rows) {
  return vocab >= kLongRow && vocab % 4 == 0 && aligned16(rows);
}

// Elements from one quad of a thread to its next, and from the row's begin to its first.
template <bool kVector>
__device__ __forceinline__ int64_t quad_width() {
  return kVector ? 4 * kMaxRowThreads : int64_t{4} * blockDim.x;
}
template <bool kVector>
__device__ __forceinline__ int64_t first_element(const RowLayout& layout) {
  return int64_t{threadIdx.x} * (kVector ? 4 : layout.lane_step);
}

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
// at a time. Element 4 q + j of the values is element at + q * quad_width() + j * step of the row; what lies
// beyond the row is -inf.
template <bool kVector, int kQuads, class Body>
__device__ __forceinline__ void for_quads(const float* row, const RowLayout& layout, const Body& body) {
  const int64_t width = quad_width<kVector>();
  int64_t at = first_element<kVector>(layout), left = layout.vocab;
  for (; left >= kQuads * width; left -= kQuads * width, at += kQuads * width) {
    float x[4 * kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if constexpr (kVector) {
        const float4 v = *reinterpret_cast<const float4*>(row + at + q * width);
        x[4 * q] = v.x, x[4 * q + 1] = v.y, x[4 * q + 2] = v.z, x[4 * q + 3] = v.w;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[4 * q + j] = row[at + q * width + j * layout.step];
      }
    }
    body(x, at);
  }
  for (; left > 0; left -= width, at += width) {
    float x[4];
    load_quad<kVector>(row, layout, at, x);
    body(x, at);
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

// Two exponentials. Sums take the first; draws, which must be the CPU's, the second. Both are built of single
// correctly rounded operations, and both leave out what cannot occur: the power of two is added to the
// exponent.

inline constexpr float kLog2E = 0x1.715476p0f;

// 2^t for |t| <= 126, t being d * scale: rounded once, by the fused operations. 2^0 is 1; relative error
// 2^-23.6.
__device__ __forceinline__ float exp2_scaled(float d, float scale) {
  constexpr float kShift = 0x1.8p23f;  // leaves round(t) in the low mantissa bits
  const float shifted = __fmaf_rn(d, scale, kShift);
  const float f = __fmaf_rn(d, scale, kShift - shifted);
  float p = 0x1.636e2cp-13f;
  p = __fmaf_rn(p, f, 0x1.603446p-10f);
  p = __fmaf_rn(p, f, 0x1.3afca8p-7f);
  p = __fmaf_rn(p, f, 0x1.c6ac3ap-5f);
  p = __fmaf_rn(p, f, 0x1.ebfc1ep-3f);
  p = __fmaf_rn(p, f, 0x1.62e434p-1f);
  p = __fmaf_rn(p, f, 1.0f);
  return float_of(bits_of(p) + (bits_of(shifted) << 23));
}

// exp_f32 (kernels/formats/math.h) of x - largest, the same bits where that is at least -87; beyond it counts
// as -87, where no unit of 2^-30 is left of a weight. Not for NaN.
__device__ __forceinline__ float weight_of(float x, float largest) {
  constexpr float kShift = 0x1.8p23f;
  x = fmaxf(x - largest, -87.0f);
  const float shifted = __fmaf_rn(x, kLog2E, kShift);
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
  return float_of(bits_of(p) + (bits_of(shifted) << 23));
}

// A weight relative to the largest, in units of 2^-30: what draws and top-p masses count in.
__device__ __forceinline__ int32_t fixed_point(float weight) {
  return static_cast<int32_t>(weight * 0x1p30f);
}

// Weights of logits that have this temperature, for sums.
struct Scale {
  float per_logit;  // log2(e) / temperature
  float least;      // distances of logits below count as this: e^-87, nothing beside the largest weight

  __device__ explicit Scale(float temperature)
      : per_logit(kLog2E / temperature), least(-87.0f * temperature) {}
  __device__ __forceinline__ float distance(float x, float largest) const {
    return fmaxf(x - largest, least);
  }
  __device__ __forceinline__ float weight(float distance) const { return exp2_scaled(distance, per_logit); }
};

// What a row comes to. Without a distribution (NaN, +inf or nothing but -inf) `sum` is NaN.
struct RowTotals {
  float max;     // of the logits
  float sum;     // of weights
  float moment;  // of weight * (logit - max), where asked for
  __device__ bool finite() const { return sum > 0.0f && sum < -kMinusInf; }
};

// Totals of some elements, relative to the largest so far; four partial sums for the arithmetic's latency.
// A NaN becomes the largest and stays it; then, as with infinities, the sums mean nothing.
template <bool kMoment>
struct RunningTotals {
  Scale scale;
  float max = kMinusInf;
  float sum[4] = {}, moment[4] = {};

  __device__ explicit RunningTotals(const Scale& s) : scale(s) {}

  __device__ void raise(float to) {
    const bool first = max == kMinusInf;
    const float distance = first ? 0.0f : scale.distance(max, to);
    const float factor = first ? 0.0f : scale.weight(distance);
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
      const float distance = scale.distance(x[j], base), weight = scale.weight(distance);
      sum[j % 4] += weight;
      if constexpr (kMoment) moment[j % 4] += weight * distance;
    }
  }

  __device__ RowTotals totals() const {
    return {max, (sum[0] + sum[1]) + (sum[2] + sum[3]), (moment[0] + moment[1]) + (moment[2] + moment[3])};
  }
};

// Scratch of the block for sums of a row.
struct RowScratch {
  float max[kMaxRowWarps], sum[kMaxRowWarps], moment[kMaxRowWarps];
};

// Totals of a warp from those of its lanes; every lane gets the result.
template <bool kMoment>
__device__ __forceinline__ RowTotals warp_merge(const RowTotals& part, const Scale& scale) {
  const float max = warp_max_or_nan(part.max);
  const bool none = part.max == kMinusInf;
  const float distance = none ? 0.0f : scale.distance(part.max, max);
  const float factor = none ? 0.0f : scale.weight(distance);
  RowTotals out{max, warp_sum(factor * part.sum), 0.0f};
  if constexpr (kMoment) out.moment = warp_sum(factor * (part.moment + distance * part.sum));
  return out;
}

// Every thread gets the result. Ends with a barrier: scratch may be used again.
template <bool kMoment>
__device__ __forceinline__ RowTotals block_merge(RowTotals part, const Scale& scale, RowScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  part = warp_merge<kMoment>(part, scale);
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
  part = warp_merge<kMoment>(part, scale);
  __syncthreads();
  return part;
}

// One pass over the row.
template <bool kVector, bool kMoment>
__device__ __forceinline__ RowTotals row_totals(const float* row, const RowLayout& layout, float temperature,
                                                RowScratch& scratch) {
  RunningTotals<kMoment> running{Scale(temperature)};
  for_quads<kVector, kSummedQuads>(row, layout, [&](const auto& x, int64_t) { running.add(x); });
  RowTotals totals = block_merge<kMoment>(running.totals(), running.scale, scratch);
  if (!(fabsf(totals.max / temperature) < -kMinusInf)) totals.sum = float_of(0x7FC00000u);
  return totals;
}

}  // namespace fp4t::cuda
