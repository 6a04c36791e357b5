// Token embedding: a gather, and its gradient.
// The gradient needs each vocabulary row's tokens in index order. They are collected in any order by integer
// atomics (how many, then where); the block that owns the row sorts them, so results do not depend on who
// came first.
#include "kernels/ops/embed.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/gather.cuh"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/scan.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kFew = 256;               // tokens of a row that are sorted by comparing all pairs
constexpr int kWindow = 32 * kThreads;  // tokens that one bitmap covers, where there are more

struct EmbedGradArgs {
  const void* dout;
  const int32_t* ids;
  float* dtable;
  int64_t tokens, vocabulary, width;
  int32_t* count;   // [V]
  int32_t* cursor;  // [1], room given out in `places`
  int32_t* start;   // [V], of the rows that occur
  int32_t* rank;    // [T], among the tokens of the same row, in order of arrival; -1 out of range
  int32_t* places;  // [T], tokens by row
  FaultSink sink;
};

__global__ void __launch_bounds__(kThreads) count_tokens(EmbedGradArgs a) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= a.tokens) return;
  const int32_t id = a.ids[t];
  if (id < 0 || id >= a.vocabulary) {
    report(a.sink, FaultKind::kIndex, t, id);
    a.rank[t] = -1;
    return;
  }
  a.rank[t] = atomicAdd(&a.count[id], 1);
}

__global__ void __launch_bounds__(kThreads) give_room(EmbedGradArgs a) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t < a.tokens && a.rank[t] == 0) a.start[a.ids[t]] = atomicAdd(a.cursor, a.count[a.ids[t]]);
}

__global__ void __launch_bounds__(kThreads) collect_tokens(EmbedGradArgs a) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t < a.tokens && a.rank[t] >= 0) a.places[a.start[a.ids[t]] + a.rank[t]] = static_cast<int32_t>(t);
}

// The columns of one thread: a vector, or a single one.
template <class T, int kCount>
struct Columns {
  const T* dout;  // of token 0
  int64_t width;
  bool inside;
  float sum[kCount];

  __device__ void add(const int32_t* tokens, int n) {
    if (!inside) return;
    constexpr int kInFlight = 8;
    int i = 0;
    for (; i + kInFlight <= n; i += kInFlight) {
      float grad[kInFlight][kCount];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) load(tokens[i + j], grad[j]);
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) sum[k] = sum[k] + grad[j][k];
      }
    }
    for (; i < n; ++i) {
      float grad[kCount];
      load(tokens[i], grad);
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum[k] = sum[k] + grad[k];
    }
  }

 private:
  __device__ void load(int32_t token, float (&out)[kCount]) const {
    if constexpr (kCount == 1) {
      out[0] = to_f32(dout[token * width]);
    } else {
      load_vector(dout + token * width, out);
    }
  }
};

// Calls add(sorted, n) with up to kWindow tokens at a time, ascending over all calls.
template <class Add>
__device__ void in_order(const int32_t* places, int count, int64_t tokens, const Add& add) {
  __shared__ int32_t sorted[kWindow];
  __shared__ int32_t unsorted[kFew];
  __shared__ uint32_t bits[kThreads];
  __shared__ int scratch[32];
  const int thread = static_cast<int>(threadIdx.x);
  if (count <= kFew) {
    if (thread < count) unsorted[thread] = places[thread];
    __syncthreads();
    if (thread < count) {
      int rank = 0;
      for (int i = 0; i < count; ++i) rank += unsorted[i] < unsorted[thread] ? 1 : 0;
      sorted[rank] = unsorted[thread];
    }
    __syncthreads();
    add(sorted, count);
    return;
  }
  for (int64_t first = 0; first < tokens; first += kWindow) {
    bits[thread] = 0;
    __syncthreads();
    for (int i = thread; i < count; i += kThreads) {
      const int64_t at = places[i] - first;
      if (at >= 0 && at < kWindow) atomicOr(&bits[at / 32], 1u << (at % 32));
    }
    __syncthreads();
    int total = 0;
    int next = block_exclusive_sum(__popc(bits[thread]), scratch, total);
    for (uint32_t left = bits[thread]; left != 0; left &= left - 1) {
      sorted[next++] = static_cast<int32_t>(first) + 32 * thread + __ffs(static_cast<int>(left)) - 1;
    }
    __syncthreads();
    add(sorted, total);
    __syncthreads();
  }
}

// Block (t, chunk of columns); the block of the token that came first owns the row.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads) add_tokens(EmbedGradArgs a) {
  const int64_t t = blockIdx.x;
  if (a.rank[t] != 0) return;
  const int32_t id = a.ids[t];
  const int64_t c = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kCount;
  Columns<T, kCount> columns{static_cast<const T*>(a.dout) + c, a.width, c < a.width, {}};
  float* row = a.dtable + id * a.width + c;
  if (columns.inside) {
    if constexpr (kCount == 1) {
      columns.sum[0] = row[0];
    } else {
      load_vector(row, columns.sum);
    }
  }
  in_order(a.places + a.start[id], a.count[id], a.tokens,
           [&](const int32_t* tokens, int n) { columns.add(tokens, n); });
  if (columns.inside) {
    if constexpr (kCount == 1) {
      row[0] = columns.sum[0];
    } else {
      store_vector(columns.sum, row);
    }
  }
}

template <class T, int kCount>
void launch_add(const Context& c, const EmbedGradArgs& a) {
  const dim3 grid(static_cast<unsigned>(a.tokens),
                  static_cast<unsigned>(ceil_div(a.width, int64_t{kThreads} * kCount)));
  add_tokens<T, kCount><<<grid, kThreads, 0, c.stream>>>(a);
}

}  // namespace

void run(Queue& queue, const EmbedForward& op) { gather(queue, op.kName, op.table, op.tokens, op.out); }

void run(Queue& queue, const EmbedBackward& op) {
  const Context& c = context_of(queue);
  const int64_t tokens = op.dout.dim(0), vocabulary = op.dtable.dim(0);
  if (op.dout.elements() == 0) return;
  narrow<int32_t>(tokens);
  Workspace workspace(queue);
  int32_t* count = workspace.take<int32_t>(vocabulary + 1);
  const EmbedGradArgs a{op.dout.data,
                        op.tokens.as<int32_t>(),
                        op.dtable.as<float>(),
                        tokens,
                        vocabulary,
                        op.dout.dim(1),
                        count,
                        count + vocabulary,
                        workspace.take<int32_t>(vocabulary),
                        workspace.take<int32_t>(tokens),
                        workspace.take<int32_t>(tokens),
                        fault_sink(queue, op.kName)};
  FP4T_CUDA(cudaMemsetAsync(count, 0, static_cast<size_t>(4 * (vocabulary + 1)), c.stream));
  const auto blocks = static_cast<unsigned>(ceil_div(tokens, kThreads));
  count_tokens<<<blocks, kThreads, 0, c.stream>>>(a);
  give_room<<<blocks, kThreads, 0, c.stream>>>(a);
  collect_tokens<<<blocks, kThreads, 0, c.stream>>>(a);
  check_launch(op.kName);
  for_float_type(op.dout.dtype, [&](auto type) {
    using T = decltype(type);
    if (a.width % kVector == 0 && aligned16(a.dout) && aligned16(a.dtable)) {
      launch_add<T, kVector>(c, a);
    } else {
      launch_add<T, 1>(c, a);
    }
  });
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
