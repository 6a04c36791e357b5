// Writing the key-value cache: rows as they are, or blocks of 32 as MXFP8; twin of kernels/cpu/kv_cache.cpp.
#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/kv_codec.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;

// One thread a unit of a row: 8 values where both sides allow vectors, else one.
template <int kUnit, class T>
__global__ void __launch_bounds__(kThreads)
    append_values(const T* qkv, int64_t rows, int64_t width, int64_t first, int64_t kv_width,
                  CachePlaces places, T* k, T* v, FaultSink sink) {
  wait_for_previous();
  const int64_t units = 2 * kv_width / kUnit, i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows * units) return;
  const int64_t t = i / units, e = i % units * kUnit;
  const int64_t place = places.row(t, sink);
  if (place < 0) return;
  const T* from = qkv + t * width + first + e;
  T* to = e < kv_width ? k + place * kv_width + e : v + place * kv_width + e - kv_width;
  if constexpr (kUnit == 1) {
    *to = *from;
  } else {
    constexpr int kPieces = kUnit * static_cast<int>(sizeof(T)) / 16;
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
      reinterpret_cast<uint4*>(to)[p] = reinterpret_cast<const uint4*>(from)[p];
  }
}

// One thread a block of 32 values.
template <bool kVectors, class T>
__global__ void __launch_bounds__(kThreads)
    append_codes(const T* qkv, int64_t rows, int64_t width, int64_t first, int64_t kv_width,
                 CachePlaces places, uint8_t* k, uint8_t* v, uint8_t* k_scales, uint8_t* v_scales,
                 FaultSink sink) {
  const int64_t blocks = kv_width / kKvBlock, i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows * 2 * blocks) return;
  const int64_t t = i / (2 * blocks), b = i % (2 * blocks);
  const int64_t place = places.row(t, sink);
  if (place < 0) return;
  float x[kKvBlock];
  load_kv_block<kVectors>(qkv + t * width + first + b * kKvBlock, x);
  uint8_t codes[kKvBlock];
  const uint8_t scale = encode_kv_block(x, codes);
  const int64_t block = place * blocks + (b < blocks ? b : b - blocks);
  (b < blocks ? k_scales : v_scales)[block] = scale;
  uint8_t* to = (b < blocks ? k : v) + block * kKvBlock;
#pragma unroll
  for (int c = 0; c < kKvBlock; ++c) to[c] = codes[c];
}

template <bool kVectors, class T>
__global__ void __launch_bounds__(kThreads)
    round_codes(T* qkv, int64_t rows, int64_t width, int64_t first, int64_t kv_width) {
  const int64_t blocks = 2 * kv_width / kKvBlock, i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows * blocks) return;
  T* at = qkv + i / blocks * width + first + i % blocks * kKvBlock;
  float x[kKvBlock];
  load_kv_block<kVectors>(at, x);
  uint8_t codes[kKvBlock];
  const uint8_t scale = encode_kv_block(x, codes);
#pragma unroll
  for (int c = 0; c < kKvBlock; ++c) x[c] = to_f32(decode_kv<T>(codes[c], e8m0_value(scale)));
  store_kv_block<kVectors>(x, at);
}

// One thread a piece of 16 bytes, or a byte where pages are no multiple of that.
template <class Piece>
__global__ void __launch_bounds__(kThreads)
    copy_pages(const int32_t* from, const int32_t* to, int64_t count, int64_t pages, int64_t page_pieces,
               Piece* data, FaultSink sink) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count * page_pieces) return;
  const int64_t n = i / page_pieces, piece = i % page_pieces, source = from[n], target = to[n];
  if (source < 0 || source >= pages || target < 0 || target >= pages) {
    if (piece == 0) report(sink, FaultKind::kIndex, n, source < 0 || source >= pages ? from[n] : to[n]);
    return;
  }
  data[target * page_pieces + piece] = data[source * page_pieces + piece];
}

unsigned grid_of(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kThreads)); }

// Rows of the packed tensor start at multiples of 16 bytes, and so do their k and v parts.
template <class T>
bool rows_take_vectors(const T* qkv, int64_t width, int64_t first, int64_t kv_width) {
  return aligned16(qkv) && width % kVector == 0 && first % kVector == 0 && kv_width % kVector == 0;
}

template <class T>
void append(Queue& queue, const KvAppend& op) {
  const int64_t rows = op.qkv.dim(0), width = op.qkv.dim(1), first = op.heads * op.head_dim;
  const int64_t kv_width = op.kv_heads * op.head_dim;
  const KvCacheView& cache = op.cache;
  const CachePlaces places = CachePlaces::of(op.slots, op.positions, cache);
  const FaultSink sink = fault_sink(queue, op.kName);
  const cudaStream_t stream = stream_of(queue);
  const T* qkv = op.qkv.as<T>();
  const bool vectors = rows_take_vectors(qkv, width, first, kv_width);
  if (cache.format == Format::kBf16) {
    T *k = cache.k.as<T>(), *v = cache.v.as<T>();
    if (vectors && aligned16(k) && aligned16(v)) {
      launch_early(queue, op.kName, append_values<kVector, T>, dim3(grid_of(rows * 2 * kv_width / kVector)),
                   kThreads, 0, qkv, rows, width, first, kv_width, places, k, v, sink);
    } else {
      append_values<1><<<grid_of(rows * 2 * kv_width), kThreads, 0, stream>>>(qkv, rows, width, first,
                                                                              kv_width, places, k, v, sink);
    }
  } else {
    const auto kernel = vectors ? append_codes<true, T> : append_codes<false, T>;
    kernel<<<grid_of(rows * 2 * kv_width / kKvBlock), kThreads, 0, stream>>>(
        qkv, rows, width, first, kv_width, places, cache.k.as<uint8_t>(), cache.v.as<uint8_t>(),
        cache.k_scales.as<uint8_t>(), cache.v_scales.as<uint8_t>(), sink);
  }
  check_launch(op.kName);
}

}  // namespace

void run(Queue& queue, const KvAppend& op) {
  if (op.qkv.dim(0) == 0) return;
  for_float_type(op.qkv.dtype, [&](auto type) { append<decltype(type)>(queue, op); });
}

void run(Queue& queue, const KvCopyPages& op) {
  const int64_t count = op.from.dim(0), pages = op.cache.k.dim(0);
  if (count == 0) return;
  const FaultSink sink = fault_sink(queue, op.kName);
  const auto copy = [&](auto* data, int64_t page_pieces) {
    copy_pages<<<grid_of(count * page_pieces), kThreads, 0, stream_of(queue)>>>(
        op.from.as<int32_t>(), op.to.as<int32_t>(), count, pages, page_pieces, data, sink);
    check_launch(op.kName);
  };
  for (const TensorView& part : {op.cache.k, op.cache.v, op.cache.k_scales, op.cache.v_scales}) {
    if (!part.data) continue;
    const int64_t bytes = part.bytes() / pages;
    if (bytes % 16 == 0 && aligned16(part.data)) {
      copy(static_cast<uint4*>(part.data), bytes / 16);
    } else {
      copy(static_cast<uint8_t*>(part.data), bytes);
    }
  }
}

void run(Queue& queue, const KvRound& op) {
  const int64_t rows = op.qkv.dim(0), width = op.qkv.dim(1), first = op.heads * op.head_dim;
  const int64_t kv_width = op.kv_heads * op.head_dim;
  if (rows == 0) return;
  for_float_type(op.qkv.dtype, [&](auto type) {
    using T = decltype(type);
    T* qkv = op.qkv.as<T>();
    const auto kernel =
        rows_take_vectors(qkv, width, first, kv_width) ? round_codes<true, T> : round_codes<false, T>;
    kernel<<<grid_of(rows * 2 * kv_width / kKvBlock), kThreads, 0, stream_of(queue)>>>(qkv, rows, width,
                                                                                       first, kv_width);
  });
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
