#include "kernels/cuda/gemm_operand.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/gemm_codes.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kVector = 8;  // elements a lane decodes at a time
constexpr int kUnroll = 4;  // such vectors in flight

struct Codes {
  const uint8_t* codes;
  const uint8_t* scales;
  bool aligned;  // whole vectors of codes may be loaded at once
  int outer;     // rows that share a scale
};

Codes codes_of(const QuantView& v) {
  const auto* data = static_cast<const uint8_t*>(v.codes.data);
  return {data, static_cast<const uint8_t*>(v.block_scales.data), reinterpret_cast<uintptr_t>(data) % 8 == 0,
          static_cast<int>(outer_padding(v.spec))};
}

// A stretch of one stored row: where its codes and scales begin.
struct Segment {
  int64_t element;  // of the storage
  int64_t scale;    // of the block scales
  int64_t length;   // elements, a multiple of 32
  Bf16* out;
};

struct Nvfp4 {
  static constexpr int kBlock = 16;
  using Raw = uint32_t;
  static __device__ __forceinline__ Raw load(const Codes& c, int64_t element) {
    const uint8_t* p = c.codes + element / 2;
    if (c.aligned) return *reinterpret_cast<const uint32_t*>(p);
    return p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24;
  }
  static __device__ __forceinline__ void decode(Raw raw, uint8_t scale, uint32_t (&out)[4]) {
    decode_nvfp4(raw, scale, out);
  }
};

struct Nvfp4Stream : Nvfp4 {};

struct Mxfp8 {
  static constexpr int kBlock = 32;
  using Raw = uint2;
  static __device__ __forceinline__ Raw load(const Codes& c, int64_t element) {
    const uint8_t* p = c.codes + element;
    if (c.aligned) return *reinterpret_cast<const uint2*>(p);
    return make_uint2(p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24,
                      p[4] | p[5] << 8 | p[6] << 16 | static_cast<uint32_t>(p[7]) << 24);
  }
  static __device__ __forceinline__ void decode(Raw raw, uint8_t scale, uint32_t (&out)[4]) {
    decode_mxfp8(raw, scale, out);
  }
};

// One warp decodes one segment; out is 16-byte aligned.
template <class Format>
__device__ __forceinline__ void decode_segment(const Codes& c, const Segment& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kStep = 32 * kVector;
  for (int64_t begin = lane * kVector; begin < s.length; begin += kUnroll * kStep) {
    typename Format::Raw raw[kUnroll];
    uint8_t scale[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = begin + u * kStep;
      if (i >= s.length) continue;
      raw[u] = Format::load(c, s.element + i);
      scale[u] = c.scales[s.scale + i / Format::kBlock];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = begin + u * kStep;
      if (i >= s.length) continue;
      uint32_t out[4];
      Format::decode(raw[u], scale[u], out);
      *reinterpret_cast<uint4*>(s.out + i) = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
}

// The same of codes in kStream: a lane has a word, four codes of each half of 32.
template <>
__device__ __forceinline__ void decode_segment<Nvfp4Stream>(const Codes& c, const Segment& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kStep = 32 * kVector;
  for (int64_t begin = lane * kVector; begin < s.length; begin += kUnroll * kStep) {
    uint32_t word[kUnroll];
    uint8_t scale[kUnroll][2];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = begin + u * kStep;
      if (i >= s.length) continue;
      word[u] = Nvfp4::load(c, s.element + i);
      scale[u][0] = c.scales[s.scale + i / 32 * 2];
      scale[u][1] = c.scales[s.scale + i / 32 * 2 + 1];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = begin + u * kStep;
      if (i >= s.length) continue;
      uint32_t pair[4];
      place_stream(word[u], pair);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float value = e4m3_value(scale[u][h]);
        const uint32_t factor = pack_bf16(value, value);
        uint2 out;
        out.x = mul_bf16x2(mul_bf16x2(pair[2 * h], 0x7E807E80u), factor);
        out.y = mul_bf16x2(mul_bf16x2(pair[2 * h + 1], 0x7E807E80u), factor);
        *reinterpret_cast<uint2*>(s.out + i / 32 * 32 + 16 * h + i % 32 / 2) = out;
      }
    }
  }
}

__device__ __forceinline__ int64_t pad_to(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Stored row of logical row r, or -1 beyond the last group.
__device__ int64_t stored_row(const StoredRows& place, int64_t r) {
  if (place.offsets && r >= place.offsets[place.groups]) return -1;
  if (place.kind == StoredRows::Kind::kSame) return r;
  if (place.kind == StoredRows::Kind::kEqual) return r / place.count * place.stored_count + r % place.count;
  int64_t stored = 0;
  for (int g = 0;; ++g) {
    const int64_t begin = place.offsets[g], end = place.offsets[g + 1];
    if (r < end) return stored + r - begin;
    stored += pad_to(end - begin, place.padding);
  }
}

template <class Format>
__global__ void __launch_bounds__(kThreads)
    decode_rows_kernel(Codes c, StoredRows place, int64_t rows, int64_t cols, Bf16* out) {
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  for (int64_t r = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; r < rows; r += warps) {
    const int64_t stored = stored_row(place, r);
    if (stored < 0) return;
    decode_segment<Format>(c,
                           {stored * cols, stored / c.outer * (cols / Format::kBlock), cols, out + r * cols});
  }
}

template <class Format>
__global__ void __launch_bounds__(kThreads)
    decode_columns_kernel(Codes c, const int32_t* padded, int64_t groups, int64_t rows, int64_t stored_rows,
                          int64_t cols, Bf16* out) {
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < rows * groups; i += warps) {
    const int64_t g = i / rows, r = i % rows;
    const int64_t begin = padded[g], length = padded[g + 1] - begin;
    const int64_t origin = begin * stored_rows;
    decode_segment<Format>(c, {origin + r * length,
                               origin / (Format::kBlock * c.outer) + r / c.outer * (length / Format::kBlock),
                               length, out + r * cols + begin});
  }
}

// Blocks of 32 tokens by 64 rows, turned in shared memory.
template <class Format>
__global__ void __launch_bounds__(kThreads)
    decode_tokens_kernel(Codes c, const int32_t* offsets, const int32_t* padded, int groups, int64_t rows,
                         int64_t stored_rows, int64_t ld, Bf16* out) {
  constexpr int kTokens = 32, kRows = 64;
  __shared__ uint16_t tile[kTokens][kRows + 2];
  const int64_t first = int64_t{blockIdx.x} * kTokens;
  if (first >= padded[groups]) return;
  int g = 0;
  while (first >= padded[g + 1]) ++g;
  const int64_t length = padded[g + 1] - padded[g], inside = first - padded[g];
  const int64_t origin = int64_t{padded[g]} * stored_rows;
  const int64_t row0 = int64_t{blockIdx.y} * kRows;
  // A thread a vector: 64 rows of four.
  const int r = static_cast<int>(threadIdx.x) / 4, k = static_cast<int>(threadIdx.x) % 4 * kVector;
  if (row0 + r < rows) {
    const int64_t row = row0 + r;
    const int64_t scales = origin / (Format::kBlock * c.outer) + row / c.outer * (length / Format::kBlock);
    uint32_t pair[4];
    Format::decode(Format::load(c, origin + row * length + inside + k),
                   c.scales[scales + (inside + k) / Format::kBlock], pair);
#pragma unroll
    for (int i = 0; i < kVector; ++i) tile[k + i][r] = static_cast<uint16_t>(pair[i / 2] >> (i % 2 * 16));
  }
  __syncthreads();
  const int64_t count = offsets[g + 1] - offsets[g];
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * kRows; i += kThreads) {
    const int token = i / kRows, row = i % kRows;
    if (inside + token < count && row0 + row < rows) {
      out[(offsets[g] + inside + token) * ld + row0 + row].bits = tile[token][row];
    }
  }
}

__global__ void pad_offsets_kernel(const int32_t* offsets, int groups, int multiple, int32_t* padded) {
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
  for (int base = 0; base < groups; base += 32) {
    const int g = base + lane;
    const int size = g < groups ? static_cast<int>(pad_to(offsets[g + 1] - offsets[g], multiple)) : 0;
    int sum = size;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += other;
    }
    if (g < groups) padded[g] = before + sum - size;
    before += __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
  if (lane == 0) padded[groups] = before;
}

// body(Format{}) with the format of a view.
template <class Body>
void for_format(const QuantView& v, const Body& body) {
  if (v.spec.format == Format::kNvfp4) {
    body(Nvfp4{});
  } else {
    body(Mxfp8{});
  }
}

unsigned warps_grid(const Queue& queue, int64_t segments) {
  return static_cast<unsigned>(
      std::min<int64_t>(ceil_div(segments, kWarps), int64_t{context_of(queue).sm_count} * 32));
}

}  // namespace

void decode_rows(Queue& queue, const QuantView& v, const StoredRows& place, int64_t rows, Bf16* out) {
  if (rows == 0 || v.padded_cols == 0) return;
  const auto launch = [&](auto format) {
    decode_rows_kernel<decltype(format)><<<warps_grid(queue, rows), kThreads, 0, stream_of(queue)>>>(
        codes_of(v), place, rows, v.padded_cols, out);
  };
  if (v.order == CodeOrder::kStream) {
    launch(Nvfp4Stream{});
  } else {
    for_format(v, launch);
  }
  check_launch("gemm: decode rows");
}

void pad_offsets(Queue& queue, const int32_t* offsets, int64_t groups, int64_t multiple, int32_t* padded) {
  pad_offsets_kernel<<<1, 32, 0, stream_of(queue)>>>(offsets, static_cast<int>(groups),
                                                     static_cast<int>(multiple), padded);
  check_launch("gemm: pad offsets");
}

void decode_columns(Queue& queue, const QuantView& v, const int32_t* padded, Bf16* out) {
  if (v.rows == 0 || v.padded_cols == 0) return;
  const int64_t segments = v.rows * v.groups;
  for_format(v, [&](auto format) {
    decode_columns_kernel<decltype(format)><<<warps_grid(queue, segments), kThreads, 0, stream_of(queue)>>>(
        codes_of(v), padded, v.groups, v.rows, v.padded_rows, v.padded_cols, out);
  });
  check_launch("gemm: decode columns");
}

void decode_tokens(Queue& queue, const QuantView& v, const int32_t* offsets, const int32_t* padded,
                   Bf16* out) {
  if (v.rows == 0 || v.padded_cols == 0) return;
  const dim3 grid(static_cast<unsigned>(v.padded_cols / 32), static_cast<unsigned>(ceil_div(v.rows, 64)));
  FP4T_CHECK(grid.y < 65536, v.rows, " rows");
  for_format(v, [&](auto format) {
    decode_tokens_kernel<decltype(format)>
        <<<grid, kThreads, 0, stream_of(queue)>>>(codes_of(v), offsets, padded, static_cast<int>(v.groups),
                                                  v.rows, v.padded_rows, align_up(v.rows, 8), out);
  });
  check_launch("gemm: decode tokens");
}

}  // namespace fp4t::cuda
