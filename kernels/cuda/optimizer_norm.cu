// The sum of squares in FP64, where the square of an FP32 value is exact; and what an update does with it.
#include <limits>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/ops/optimizer.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int64_t kChunk = 65536;  // of the op's contract
constexpr int kThreads = 256;
constexpr int kFinalThreads = 1024;

struct ChunkSum {
  double sum, nonfinite;
};

struct Accumulator {
  double sum[2] = {};
  int nonfinite = 0;
  __device__ __forceinline__ void add(float x, int lane) {
    const bool finite = fabsf(x) <= std::numeric_limits<float>::max();
    const double value = finite ? static_cast<double>(x) : 0.0;
    sum[lane] = fma(value, value, sum[lane]);
    nonfinite += finite ? 0 : 1;
  }
};

// One chunk a block: thread t takes the vectors t, t + 256, ... of it. Vectors where every chunk begins at
// one.
template <class T, bool kVectors>
__device__ void sum_chunk(const T* x, int64_t first, int count, ChunkSum* out) {
  __shared__ double scratch[33];
  Accumulator part;
  const int vectors = kVectors ? count / kVector : 0;
#pragma unroll 4
  for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kThreads) {
    float values[kVector];
    load_vector(x + first + v * kVector, values);
#pragma unroll
    for (int k = 0; k < kVector; ++k) part.add(values[k], k % 2);
  }
  for (int i = vectors * kVector + static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    part.add(to_f32(x[first + i]), 0);
  }
  const double sum = block_sum(part.sum[0] + part.sum[1], scratch);
  const double nonfinite = block_sum(static_cast<double>(part.nonfinite), scratch);
  if (threadIdx.x == 0) *out = {sum, nonfinite};
}

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads) sum_chunks(const T* x, int64_t n, ChunkSum* chunks) {
  const int64_t first = int64_t{blockIdx.x} * kChunk;
  sum_chunk<T, kVectors>(x, first, static_cast<int>(min(kChunk, n - first)), chunks + blockIdx.x);
}

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads) sum_each_chunk(SumSquaresChunks op, int64_t n) {
  const SumSquaresChunks::Range range = op.range(blockIdx.x, n);
  auto* sums = static_cast<ChunkSum*>(op.sums.data);
  sum_chunk<T, kVectors>(static_cast<const T*>(op.x.data), range.begin,
                         static_cast<int>(range.end - range.begin), sums + blockIdx.x);
}

__global__ void __launch_bounds__(kFinalThreads)
    add_chunks(const ChunkSum* chunks, int64_t count, double* sum, double* nonfinite) {
  __shared__ double scratch[33];
  ChunkSum part = {0.0, 0.0};
  for (int64_t c = threadIdx.x; c < count; c += kFinalThreads) {
    part.sum += chunks[c].sum;
    part.nonfinite += chunks[c].nonfinite;
  }
  part.sum = block_sum(part.sum, scratch);
  part.nonfinite = block_sum(part.nonfinite, scratch);
  if (threadIdx.x != 0) return;
  *sum += part.sum;
  *nonfinite += part.nonfinite;
}

__global__ void decide(const double* sum, const double* nonfinite, double extra, double max_norm,
                       float* factor, int32_t* apply) {
  const ClipDecision decision = decide_clip(*sum, *nonfinite + extra, max_norm);
  *factor = static_cast<float>(decision.factor);
  *apply = decision.apply ? 1 : 0;
}

}  // namespace

void run(Queue& queue, const SumSquares& op) {
  const int64_t n = op.x.elements(), chunks = ceil_div(n, kChunk);
  if (n == 0) return;
  Workspace workspace(queue);
  ChunkSum* parts = workspace.take<ChunkSum>(chunks);
  for_float_type(op.x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto blocks = narrow<uint32_t>(chunks);
    if (aligned16(op.x.data)) {
      sum_chunks<T, true><<<blocks, kThreads, 0, stream_of(queue)>>>(op.x.as<T>(), n, parts);
    } else {
      sum_chunks<T, false><<<blocks, kThreads, 0, stream_of(queue)>>>(op.x.as<T>(), n, parts);
    }
  });
  check_launch(op.kName);
  add_chunks<<<1, kFinalThreads, 0, stream_of(queue)>>>(parts, chunks, op.sum.as<double>(),
                                                        op.nonfinite.as<double>());
  check_launch(op.kName);
}

void run(Queue& queue, const SumSquaresChunks& op) {
  const int64_t n = op.x.elements(), chunks = op.chunks();
  if (chunks == 0) return;
  // Chunks are whole vectors but for the end of a matrix, where the next one begins.
  const bool vectors = aligned16(op.x.data) && op.matrix % kVector == 0;
  for_float_type(op.x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto blocks = narrow<uint32_t>(chunks);
    if (vectors) {
      sum_each_chunk<T, true><<<blocks, kThreads, 0, stream_of(queue)>>>(op, n);
    } else {
      sum_each_chunk<T, false><<<blocks, kThreads, 0, stream_of(queue)>>>(op, n);
    }
  });
  check_launch(op.kName);
}

void run(Queue& queue, const ClipFactor& op) {
  decide<<<1, 1, 0, stream_of(queue)>>>(op.sum.as<double>(), op.nonfinite.as<double>(), op.extra_nonfinite,
                                        op.max_norm, op.factor.as<float>(), op.apply.as<int32_t>());
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
