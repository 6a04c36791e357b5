// Dequantize on the GPU: the tiles of Quantize backwards, a block of 16 values a thread.
#include "kernels/base/numeric.h"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/quantize.cuh"
#include "kernels/formats/code_order.h"
#include "kernels/formats/e2m1.h"
#include "kernels/formats/e4m3.h"
#include "kernels/formats/e8m0.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

// What the kernel needs beside where things lie.
struct Decoding {
  bool scaled;  // by the tensor scale too
  CodeOrder order;
  int64_t out_cols;
  unsigned long long* inexact;  // or null
};

// A product as the host gives it: a NaN keeps its first operand's bits.
__device__ float product(float a, float b) {
  const float out = a * b;
  if (out == out) return out;
  return a != a ? a : b != b ? b : float_of(0xFFC00000u);
}

// The first or second 16 of 32 codes in kStream, in order.
__device__ void load_stream(const uint8_t* p, bool second, bool wide, uint32_t (&word)[2]) {
  uint32_t stream[4] = {}, natural[4];
  if (wide) {
    const uint4 q = *reinterpret_cast<const uint4*>(p);
    stream[0] = q.x, stream[1] = q.y, stream[2] = q.z, stream[3] = q.w;
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) stream[i / 4] |= static_cast<uint32_t>(p[i]) << (8 * (i % 4));
  }
  to_natural(stream, natural);
  word[0] = second ? natural[2] : natural[0], word[1] = second ? natural[3] : natural[1];
}

// Blocks of 16 codes from storage, as q * s.
__device__ void decode_block(const QuantJob& job, CodeOrder order, int64_t element, int64_t scale_at,
                             float (&v)[kQuantBlock]) {
  const uint32_t scale = job.block_scales[scale_at];
  if (job.spec.format == Format::kNvfp4) {
    const uint8_t* p = job.codes + element / 2;
    uint32_t word[2] = {0, 0};
    if (order == CodeOrder::kStream) {
      load_stream(job.codes + element / 32 * 16, element % 32 != 0, job.wide_codes, word);
    } else if (job.wide_codes) {
      const uint2 q = *reinterpret_cast<const uint2*>(p);
      word[0] = q.x, word[1] = q.y;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) word[i / 4] |= static_cast<uint32_t>(p[i]) << (8 * (i % 4));
    }
    const float s = e4m3_value(scale);
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) v[i] = product(e2m1_value(word[i / 8] >> (4 * (i % 8))), s);
    return;
  }
  const uint8_t* p = job.codes + element;
  uint32_t word[4] = {0, 0, 0, 0};
  if (job.wide_codes) {
    const uint4 q = *reinterpret_cast<const uint4*>(p);
    word[0] = q.x, word[1] = q.y, word[2] = q.z, word[3] = q.w;
  } else {
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) word[i / 4] |= static_cast<uint32_t>(p[i]) << (8 * (i % 4));
  }
  const float s = e8m0_value(scale);
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) v[i] = product(e4m3_value(word[i / 4] >> (8 * (i % 4))), s);
}

// The first `count` values; returns how many of them BF16 could not hold.
__device__ uint32_t store_block(const float (&v)[kQuantBlock], int count, bool vectors, Bf16* p) {
  uint32_t inexact = 0;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) inexact += i < count && (bits_of(v[i]) & 0xFFFFu) != 0u ? 1u : 0u;
  if (vectors && count == kQuantBlock) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t low = f32_to_bf16(v[8 * h + 2 * i]).bits,
                       high = f32_to_bf16(v[8 * h + 2 * i + 1]).bits;
        word[i] = low | high << 16;
      }
      reinterpret_cast<uint4*>(p)[h] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return inexact;
  }
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) {
    if (i < count) p[i] = f32_to_bf16(v[i]);
  }
  return inexact;
}

__device__ uint32_t store_block(const float (&v)[kQuantBlock], int count, bool vectors, float* p) {
  if (vectors && count == kQuantBlock) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      reinterpret_cast<float4*>(p)[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
    return 0;
  }
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) {
    if (i < count) p[i] = v[i];
  }
  return 0;
}

template <class T>
__global__ void __launch_bounds__(kQuantThreads) decode_tiles(QuantJob job, Decoding d, T* out) {
  const int64_t length = job.spec.format == Format::kNvfp4 ? 16 : 32;
  const bool row_scope = job.spec.scale_scope == ScaleScope::kRow;
  int row, block;
  place_of_thread(false, row, block);
  uint32_t inexact = 0;
  for (TileWalk walk(job); walk.valid(); walk.next(job)) {
    const QuantTile& t = walk.t;
#pragma unroll
    for (int pass = 0; pass < kTilePasses; ++pass) {
      const int64_t r = t.row0 + row + 32 * pass, k = t.k0 + kQuantBlock * block;
      if (r >= t.rows || k >= t.cols) continue;
      float v[kQuantBlock];
      const int64_t scales_before = t.elements_before / (length * job.outer);
      decode_block(job, d.order, t.elements_before + r * t.length + k,
                   scales_before + r / job.outer * (t.length / length) + k / length, v);
      if (d.scaled) {
        const int64_t index = row_scope ? t.begin + r : t.group;
        const float scale = job.tensor_scale ? job.tensor_scale[index] : 1.0f;
#pragma unroll
        for (int e = 0; e < kQuantBlock; ++e) v[e] = product(v[e], scale);
      }
      const int64_t out_row = job.column ? r : t.begin + r, out_col = job.column ? t.begin + k : k;
      T* p = out + out_row * d.out_cols + out_col;
      const int count = static_cast<int>(min(t.cols - k, int64_t{kQuantBlock}));
      inexact += store_block(v, count, reinterpret_cast<uintptr_t>(p) % 16 == 0, p);
    }
  }
  if (!d.inexact) return;
  inexact = __reduce_add_sync(0xFFFFFFFFu, inexact);
  if (threadIdx.x % 32 == 0 && inexact != 0) atomicAdd(d.inexact, static_cast<unsigned long long>(inexact));
}

__global__ void add_count(const unsigned long long* count, double* out) {
  *out += static_cast<double>(*count);
}

}  // namespace

void run(Queue& queue, const Dequantize& op) {
  const QuantView& v = op.x;
  const Context& c = context_of(queue);
  const bool column = v.group_axis == GroupAxis::kCols;
  QuantJob job{};
  job.cols = column ? v.rows : v.cols;
  job.width = column ? v.padded_rows : v.padded_cols;
  job.padded_cols = v.padded_cols;
  job.groups = narrow<int32_t>(v.groups);
  job.outer = static_cast<int32_t>(outer_padding(v.spec));
  job.depth_multiple = static_cast<int32_t>(contraction_padding(v.spec));
  job.column = column;
  job.spec = v.spec;
  job.codes = v.codes.as<uint8_t>();
  job.wide_codes = aligned16(job.codes);
  job.block_scales = v.block_scales.as<uint8_t>();
  Workspace workspace(queue);
  job.spans = workspace.take<QuantSpan>(job.groups + 1);
  Decoding d{op.scale != DecodeScale::kBlock, v.order, v.cols, nullptr};
  if (!op.inexact.empty()) {
    d.inexact = workspace.take<unsigned long long>(1);
    FP4T_CUDA(cudaMemsetAsync(d.inexact, 0, sizeof(*d.inexact), c.stream));
  }
  const int32_t* offsets = op.offsets.empty() ? nullptr : op.offsets.as<int32_t>();
  launch_layout(queue, op.kName, job, offsets, column ? v.cols : v.rows);
  job.tensor_scale = v.tensor_scale.empty() ? nullptr : v.tensor_scale.as<float>();
  for_float_type(op.out.dtype, [&](auto type) {
    using T = decltype(type);
    decode_tiles<T><<<tile_grid(c), kQuantThreads, 0, c.stream>>>(job, d, op.out.as<T>());
  });
  check_launch(op.kName);
  if (!d.inexact) return;
  add_count<<<1, 1, 0, c.stream>>>(d.inexact, op.inexact.as<double>());
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
