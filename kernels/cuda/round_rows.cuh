// A row of BF16 values to what NVFP4 with a scale of its own makes of it (RoundedRows), by the threads of a
// block that hold it: a thread has whole blocks of 16 values. The rules are those of Quantize and Dequantize.
#pragma once

#include "kernels/cuda/context.h"
#include "kernels/cuda/gemm_codes.cuh"
#include "kernels/cuda/quantize_code.cuh"
#include "kernels/cuda/round_rows.h"

namespace fp4t::cuda {

inline constexpr int kRoundThreads = 128, kRoundWarps = kRoundThreads / 32;

struct RoundJob {
  QuantSpec spec;
  Bf16* values;  // [rows, cols], 16-byte aligned
  float* scale;  // [rows]
  int64_t rows, cols;
  int threads;  // that hold a row: 32, 64 or 128
};

inline RoundJob round_job(const RoundedRows& out) {
  RoundJob job{out.spec,          out.values.as<Bf16>(), out.scale.as<float>(),
               out.values.dim(0), out.values.dim(1),     32};
  while (job.threads < kRoundThreads && int64_t{job.threads} * kQuantBlock < job.cols) job.threads *= 2;
  return job;
}

inline int64_t round_blocks(const RoundJob& job) {
  const int64_t rows = kRoundThreads / job.threads;
  return (job.rows + rows - 1) / rows;
}

// Where a thread stands.
struct RoundPlace {
  int64_t row;
  int thread;  // within the row
  __device__ __forceinline__ explicit RoundPlace(const RoundJob& job)
      : row(int64_t{blockIdx.x} * (kRoundThreads / job.threads) +
            static_cast<int>(threadIdx.x) / job.threads),
        thread(static_cast<int>(threadIdx.x) % job.threads) {}
};

__device__ __forceinline__ void load_block16(const Bf16* p, uint32_t (&word)[8]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint4 q = reinterpret_cast<const uint4*>(p)[h];
    word[4 * h] = q.x, word[4 * h + 1] = q.y, word[4 * h + 2] = q.z, word[4 * h + 3] = q.w;
  }
}
__device__ __forceinline__ void store_block16(const uint32_t (&word)[8], Bf16* p) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    reinterpret_cast<uint4*>(p)[h] =
        make_uint4(word[4 * h], word[4 * h + 1], word[4 * h + 2], word[4 * h + 3]);
  }
}

// Largest magnitude of a block as FP32 bits, NaN left out.
__device__ __forceinline__ uint32_t magnitude_bits(const uint32_t (&word)[8]) {
  float v[kQuantBlock];
  widen(word, v);
  return bits_of(block_max(v));
}

// The largest of a row's threads' bits; the whole block calls it. `scratch` has a word a warp.
__device__ __forceinline__ uint32_t row_largest(const RoundJob& job, uint32_t bits, uint32_t* scratch) {
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = job.threads / 32;
  bits = __reduce_max_sync(0xFFFFFFFFu, bits);
  if (warps == 1) return bits;
  if (threadIdx.x % 32 == 0) scratch[warp] = bits;
  __syncthreads();
  const int first = warp / warps * warps;
  for (int w = 0; w < warps; ++w) bits = max(bits, scratch[first + w]);
  return bits;
}

// What the codes of one block stand for, tensor scale left out.
__device__ __forceinline__ void round_block(const QuantSpec& spec, const TensorScale& scale,
                                            const uint32_t (&word)[8], uint32_t (&out)[8]) {
  float v[kQuantBlock];
  widen(word, v);
  BlockPlace place{};
  place.scale = scale;
  CodedBlock coded;
  if (spec.scale_rule == ScaleRule::kFourOverSix) {
    code_four_over_six(place, v, block_max(v), coded);
  } else {
    coded.scale = nvfp4_block_scale(block_max(v), nvfp4_block_multiplier(spec.headroom, scale.encode));
    coded.factor = nvfp4_encode_factor(e4m3_value(coded.scale), scale.decode);
    code_nearest(v, coded.factor, coded);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t pairs[4];
    decode_nvfp4(coded.word[h], static_cast<uint8_t>(coded.scale), pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[4 * h + i] = pairs[i];
  }
}

// Rounds a row of `x`, of which this thread holds block `place.thread` in `held` (zeros beyond the width).
// The whole block calls it.
__device__ __forceinline__ void round_row(const RoundJob& job, const RoundPlace& place, const Bf16* x,
                                          const uint32_t (&held)[8], uint32_t* scratch) {
  const int blocks = place.row < job.rows ? static_cast<int>(job.cols / kQuantBlock) : 0;
  uint32_t top = magnitude_bits(held);
  for (int b = place.thread + job.threads; b < blocks; b += job.threads) {
    uint32_t word[8];
    load_block16(x + b * kQuantBlock, word);
    top = max(top, magnitude_bits(word));
  }
  top = row_largest(job, top, scratch);
  if (place.thread >= blocks) return;
  const TensorScale scale =
      nvfp4_tensor_scale(job.spec.scale_rule, job.spec.scale_round, job.spec.headroom, float_of(top));
  if (place.thread == 0) job.scale[place.row] = scale.decode;
  Bf16* out = job.values + place.row * job.cols;
  uint32_t rounded[8];
  round_block(job.spec, scale, held, rounded);
  store_block16(rounded, out + place.thread * kQuantBlock);
  for (int b = place.thread + job.threads; b < blocks; b += job.threads) {
    uint32_t word[8];
    load_block16(x + b * kQuantBlock, word);
    round_block(job.spec, scale, word, rounded);
    store_block16(rounded, out + b * kQuantBlock);
  }
}

}  // namespace fp4t::cuda
