// Gradients of the combination. Each (token, choice) sums 2048 or so products in index order, so a thread
// owns a pair and walks along its row; rows come in tiles through shared memory, read and written coalesced.
#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/gemm_ptx.cuh"
#include "kernels/cuda/load.cuh"
#include "kernels/ops/moe.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kPairs = 128;  // of a block, and its threads
constexpr int kStages = 2;
// kTile bytes of a row at a time: of as many rows of dout as of y, half, so that several blocks fit together.
constexpr int kWideTile = 256, kNarrowTile = 128;
template <int kTile>
constexpr int kRowBytes = kTile + 16;  // in shared memory: 16-byte reads of 8 rows meet no conflict

struct CombineGradArgs {
  const void *dout, *y;
  const int32_t *row_of, *dout_of;  // may be null
  const float* gates;
  void* dy;
  float* dgates;
  int64_t pairs, rows, dout_count, width;
  int top_k;
  int dout_rows;  // of a stage: tokens that 128 pairs can touch
  FaultSink sink;
};

template <class T>
constexpr int kPer16 = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ void unpack16(const char* p, float (&out)[8], Bf16) {
  load_vector(reinterpret_cast<const Bf16*>(p), out);
}
__device__ __forceinline__ void unpack16(const char* p, float (&out)[4], float) {
  const float4 x = *reinterpret_cast<const float4*>(p);
  out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
}

__device__ __forceinline__ void pack16(const float (&x)[8], Bf16* p) { store_computed(x, p); }
__device__ __forceinline__ void pack16(const float (&x)[4], float* p) {
  *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
}

// The rows of this block's pairs.
struct Rows {
  int32_t row[kPairs];    // of y and dy; -1 for none
  int32_t token[kPairs];  // from the block's first
  int32_t grad[kPairs];   // the row of dout of each of the block's tokens
  float gate[kPairs];
};

// `count` rows of columns [first, first + n) into `tile`; row(i) is the global row, negative for none.
template <class T, bool kVectors, int kTile, class Row>
__device__ void load_tile(char* tile, const T* from, int count, int64_t width, int64_t first, int n,
                          const Row& row) {
  if constexpr (kVectors) {
    constexpr int kChunks = kTile / 16;
    for (int i = static_cast<int>(threadIdx.x); i < count * kChunks; i += kPairs) {
      const int64_t r = row(i / kChunks);
      const int c = i % kChunks;
      if (r < 0 || c * kPer16<T> >= n) continue;
      cp_async16(shared_address(tile + i / kChunks * kRowBytes<kTile> + 16 * c),
                 from + r * width + first + c * kPer16<T>, 16);
    }
  } else {
    constexpr int kColumns = kTile / static_cast<int>(sizeof(T));
    for (int i = static_cast<int>(threadIdx.x); i < count * kColumns; i += kPairs) {
      const int64_t r = row(i / kColumns);
      const int c = i % kColumns;
      if (r < 0 || c >= n) continue;
      reinterpret_cast<T*>(tile + i / kColumns * kRowBytes<kTile>)[c] = from[r * width + first + c];
    }
  }
}

// sum += the products of two rows of a tile, in index order.
template <class T>
__device__ float add_products(const char* grad, const char* y, int n, float sum) {
  int c = 0;
#pragma unroll 2
  for (; c + kPer16<T> <= n; c += kPer16<T>) {
    float g[kPer16<T>], v[kPer16<T>];
    unpack16(grad + c * static_cast<int>(sizeof(T)), g, T{});
    unpack16(y + c * static_cast<int>(sizeof(T)), v, T{});
#pragma unroll
    for (int i = 0; i < kPer16<T>; ++i) sum = sum + g[i] * v[i];
  }
  for (; c < n; ++c) {
    sum = sum + to_f32(reinterpret_cast<const T*>(grad)[c]) * to_f32(reinterpret_cast<const T*>(y)[c]);
  }
  return sum;
}

// dy of a tile.
template <class T, bool kVectors, int kTile>
__device__ void store_scaled(const char* dout, const Rows& rows, T* dy, int64_t width, int64_t first, int n) {
  constexpr int kStep = kVectors ? kPer16<T> : 1;
  constexpr int kColumns = kTile / static_cast<int>(sizeof(T)) / kStep;
  for (int i = static_cast<int>(threadIdx.x); i < kPairs * kColumns; i += kPairs) {
    const int p = i / kColumns, c = i % kColumns * kStep;
    const int64_t row = rows.row[p];
    if (row < 0 || c >= n) continue;
    const char* grad = dout + rows.token[p] * kRowBytes<kTile>;
    if constexpr (kVectors) {
      float g[kPer16<T>];
      unpack16(grad + c * static_cast<int>(sizeof(T)), g, T{});
#pragma unroll
      for (int k = 0; k < kPer16<T>; ++k) g[k] = rows.gate[p] * g[k];
      pack16(g, dy + row * width + first + c);
    } else {
      dy[row * width + first + c] = from_f32<T>(rows.gate[p] * to_f32(reinterpret_cast<const T*>(grad)[c]));
    }
  }
}

template <class T, bool kVectors, int kTile>
__global__ void __launch_bounds__(kPairs) combine_gradient(CombineGradArgs a) {
  extern __shared__ __align__(16) char shared[];
  __shared__ Rows rows;
  constexpr int kColumns = kTile / static_cast<int>(sizeof(T));
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first_pair = int64_t{blockIdx.x} * kPairs, first_token = first_pair / a.top_k;
  const int64_t pair = first_pair + thread;
  const int64_t last_pair = first_pair + kPairs < a.pairs ? first_pair + kPairs - 1 : a.pairs - 1;
  const int tokens = static_cast<int>(last_pair / a.top_k - first_token) + 1;
  rows.row[thread] = -1;
  if (thread < tokens) {
    int64_t grad = first_token + thread;
    if (a.dout_of) grad = a.dout_of[grad];
    if (grad < 0 || grad >= a.dout_count) {
      report(a.sink, FaultKind::kIndex, first_token + thread, static_cast<int32_t>(grad));
      grad = -1;
    }
    rows.grad[thread] = static_cast<int32_t>(grad);
  }
  if (pair < a.pairs) {
    const int64_t row = a.row_of ? a.row_of[pair] : pair;
    if (row >= 0 && row < a.rows) {
      rows.row[thread] = static_cast<int32_t>(row);
    } else {
      report(a.sink, FaultKind::kIndex, pair, static_cast<int32_t>(row));
    }
    rows.token[thread] = static_cast<int32_t>(pair / a.top_k - first_token);
    rows.gate[thread] = a.gates[pair];
  }
  __syncthreads();

  const T *dout = static_cast<const T*>(a.dout), *y = static_cast<const T*>(a.y);
  const int stage_bytes = (kPairs + a.dout_rows) * kRowBytes<kTile>;
  const auto load = [&](int64_t tile) {
    char* stage = shared + tile % kStages * stage_bytes;
    const int64_t first = tile * kColumns;
    if (first < a.width) {
      const int n = static_cast<int>(a.width - first < kColumns ? a.width - first : kColumns);
      load_tile<T, kVectors, kTile>(stage, y, kPairs, a.width, first, n,
                                    [&](int i) { return int64_t{rows.row[i]}; });
      load_tile<T, kVectors, kTile>(stage + kPairs * kRowBytes<kTile>, dout, tokens, a.width, first, n,
                                    [&](int i) { return int64_t{rows.grad[i]}; });
    }
    cp_async_commit();
  };
  const bool owner = rows.row[thread] >= 0;
  float sum = 0.0f;
  load(0);
  for (int64_t tile = 0; tile * kColumns < a.width; ++tile) {
    load(tile + 1);
    cp_async_wait<1>();
    __syncthreads();
    const char* stage = shared + tile % kStages * stage_bytes;
    const char* grads = stage + kPairs * kRowBytes<kTile>;
    const int64_t first = tile * kColumns;
    const int n = static_cast<int>(a.width - first < kColumns ? a.width - first : kColumns);
    store_scaled<T, kVectors, kTile>(grads, rows, static_cast<T*>(a.dy), a.width, first, n);
    if (owner) {
      sum = add_products<T>(grads + rows.token[thread] * kRowBytes<kTile>, stage + thread * kRowBytes<kTile>,
                            n, sum);
    }
    __syncthreads();  // the stage is loaded again
  }
  if (owner) a.dgates[pair] = sum;
}

template <class T, bool kVectors, int kTile>
void launch_tile(Queue& queue, const CombineGradArgs& a) {
  const int bytes = kStages * (kPairs + a.dout_rows) * kRowBytes<kTile>;
  FP4T_CUDA(cudaFuncSetAttribute(combine_gradient<T, kVectors, kTile>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  combine_gradient<T, kVectors, kTile><<<static_cast<unsigned>(ceil_div(a.pairs, kPairs)), kPairs,
                                         static_cast<size_t>(bytes), stream_of(queue)>>>(a);
  check_launch(CombineExpertsBackward::kName);
}

template <class T, bool kVectors>
void launch(Queue& queue, const CombineGradArgs& a) {
  if (a.dout_rows < kPairs) return launch_tile<T, kVectors, kWideTile>(queue, a);
  launch_tile<T, kVectors, kNarrowTile>(queue, a);
}

}  // namespace

void run(Queue& queue, const CombineExpertsBackward& op) {
  const int64_t pairs = op.gates.elements(), width = op.dout.dim(1), top_k = op.gates.dim(1);
  if (pairs == 0) return;
  const int64_t touched = kPairs % top_k == 0 ? kPairs / top_k : (kPairs - 1) / top_k + 2;
  const CombineGradArgs a{op.dout.data,
                          op.y.data,
                          op.row_of.empty() ? nullptr : op.row_of.as<int32_t>(),
                          op.dout_of.empty() ? nullptr : op.dout_of.as<int32_t>(),
                          op.gates.as<float>(),
                          op.dy.data,
                          op.dgates.as<float>(),
                          pairs,
                          op.y.dim(0),
                          op.dout.dim(0),
                          width,
                          narrow<int>(top_k),
                          static_cast<int>(std::min<int64_t>(touched, kPairs)),
                          fault_sink(queue, op.kName)};
  for_float_type(op.dout.dtype, [&](auto type) {
    using T = decltype(type);
    const bool vectors =
        width % kPer16<T> == 0 && aligned16(op.dout.data) && aligned16(op.y.data) && aligned16(op.dy.data);
    if (vectors) {
      launch<T, true>(queue, a);
    } else {
      launch<T, false>(queue, a);
    }
  });
}

}  // namespace fp4t::cuda
