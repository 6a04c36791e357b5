// The router's product and its gradients: the choice of a core by the shape, and the core for FP32
// activations and odd shapes, plain multiply-adds. There every output is one chain over the contraction in
// index order; either way a token's logits do not depend on its neighbours.
#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/router_cores.h"
#include "kernels/ops/moe.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kTile = 64;   // rows and columns of a block's output
constexpr int kDepth = 16;  // of the contraction at a time
constexpr int kThreads = 128;
constexpr int kRows = 8, kColumns = 4;             // of a thread's output
constexpr int kLoads = kTile * kDepth / kThreads;  // elements of an operand a thread moves
constexpr int kPitch = kTile + 4;                  // of a row in shared memory, against conflicts

// out[m, n] = sum over k of a[m, k] * b[n, k]; an operand is read with either index contiguous.
struct Product {
  const void *a, *b;
  int64_t m, n, k;
  int64_t a_stride, b_stride;  // of the index that is not contiguous
  float* out;                  // [m, n]; of slice s at out + s * m * n
  int64_t slice;               // of k for one blockIdx.z
  int64_t chunk;               // of k summed by itself and added in order, a multiple of kDepth; 0 for all
};

// Operand tiles, k-major.
struct Tiles {
  float a[kDepth][kPitch], b[kDepth][kPitch];
};

// This thread's part of rows [first, first + kTile) x k in [k0, k0 + kDepth), zeros outside.
template <class T, bool kAlongK>
__device__ void fetch(const T* p, int64_t stride, int64_t first, int64_t rows, int64_t k0, int64_t k_end,
                      float (&out)[kLoads]) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * kThreads + thread;
    const int64_t r = first + (kAlongK ? at / kDepth : at % kTile);
    const int64_t k = k0 + (kAlongK ? at % kDepth : at / kTile);
    out[i] = r < rows && k < k_end ? to_f32(kAlongK ? p[r * stride + k] : p[k * stride + r]) : 0.0f;
  }
}
template <bool kAlongK>
__device__ void put(const float (&in)[kLoads], float (&tile)[kDepth][kPitch]) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * kThreads + thread;
    if constexpr (kAlongK) {
      tile[at % kDepth][at / kDepth] = in[i];
    } else {
      tile[at / kTile][at % kTile] = in[i];
    }
  }
}

__device__ void multiply(const Tiles& tiles, int row, int column, float (&acc)[kRows][kColumns]) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    float a[kRows];
    const float4 a0 = *reinterpret_cast<const float4*>(&tiles.a[k][row]);
    const float4 a1 = *reinterpret_cast<const float4*>(&tiles.a[k][row + 4]);
    const float4 b0 = *reinterpret_cast<const float4*>(&tiles.b[k][column]);
    a[0] = a0.x, a[1] = a0.y, a[2] = a0.z, a[3] = a0.w, a[4] = a1.x, a[5] = a1.y, a[6] = a1.z, a[7] = a1.w;
    const float b[kColumns] = {b0.x, b0.y, b0.z, b0.w};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) acc[i][j] = __fmaf_rn(a[i], b[j], acc[i][j]);
    }
  }
}

__device__ void flush(float (&acc)[kRows][kColumns], float (&total)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      total[i][j] = total[i][j] + acc[i][j];
      acc[i][j] = 0.0f;
    }
  }
}

template <class A, class B, bool kAlongKA, bool kAlongKB>
__global__ void __launch_bounds__(kThreads) product(Product p) {
  __shared__ Tiles tiles[2];
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 16 * kRows, column = thread % 16 * kColumns;
  const int64_t m0 = int64_t{blockIdx.x} * kTile, n0 = int64_t{blockIdx.y} * kTile;
  const int64_t k_begin = int64_t{blockIdx.z} * p.slice;
  const int64_t k_end = k_begin + p.slice < p.k ? k_begin + p.slice : p.k;
  const A* a = static_cast<const A*>(p.a);
  const B* b = static_cast<const B*>(p.b);
  float acc[kRows][kColumns] = {}, total[kRows][kColumns] = {};
  float next_a[kLoads], next_b[kLoads];
  const auto get = [&](int64_t k) {
    fetch<A, kAlongKA>(a, p.a_stride, m0, p.m, k, k_end, next_a);
    fetch<B, kAlongKB>(b, p.b_stride, n0, p.n, k, k_end, next_b);
  };
  get(k_begin);
  int stage = 0;
  for (int64_t k = k_begin; k < k_end; k += kDepth) {
    put<kAlongKA>(next_a, tiles[stage].a);
    put<kAlongKB>(next_b, tiles[stage].b);
    __syncthreads();
    if (k + kDepth < k_end) get(k + kDepth);
    multiply(tiles[stage], row, column, acc);
    if (p.chunk > 0 && (k + kDepth - k_begin) % p.chunk == 0) flush(acc, total);
    stage ^= 1;  // the next barrier keeps writers off what is being read
  }
  if (p.chunk > 0) flush(acc, total);
  float* out = p.out + blockIdx.z * p.m * p.n;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (m0 + row + i < p.m && n0 + column + j < p.n) {
        out[(m0 + row + i) * p.n + n0 + column + j] = p.chunk > 0 ? total[i][j] : acc[i][j];
      }
    }
  }
}

template <class A, class B, bool kAlongKA, bool kAlongKB>
void launch_product(Queue& queue, const char* op, const Product& p, int64_t slices) {
  if (p.m == 0 || p.n == 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.m, kTile)), static_cast<unsigned>(ceil_div(p.n, kTile)),
                  static_cast<unsigned>(slices));
  product<A, B, kAlongKA, kAlongKB><<<grid, kThreads, 0, stream_of(queue)>>>(p);
  check_launch(op);
}

// Slices of the tokens in the weight's gradient: enough blocks for the GPU, of at least 256 tokens.
int64_t token_slice(int64_t tokens, int64_t tiles, int sm_count) {
  const int64_t wanted = ceil_div(int64_t{sm_count} * 4, tiles);
  return align_up(std::max<int64_t>(256, ceil_div(tokens, wanted)), kDepth);
}

template <class T>
void backward_weight(Queue& queue, const RouterLogitsBackward& op) {
  const int64_t tokens = op.x.dim(0), width = op.x.dim(1), experts = op.weight.dim(0);
  const int64_t n = experts * width;
  if (tokens == 0 || n == 0) return;
  const int64_t tiles = ceil_div(experts, kTile) * ceil_div(width, kTile);
  const int64_t slice = token_slice(tokens, tiles, context_of(queue).sm_count);
  const int64_t slices = ceil_div(tokens, slice);
  Workspace workspace(queue);
  float* partial = workspace.take<float>(slices * n);
  launch_product<float, T, false, false>(
      queue, op.kName,
      {op.dlogits.data, op.x.data, experts, width, tokens, experts, width, partial, slice, 64}, slices);
  add_slices(queue, partial, n, slices, op.dweight.as<float>());
}

constexpr int kAddThreads = 256;

__global__ void __launch_bounds__(kAddThreads)
    add_in_order(const float* partial, int64_t n, int64_t slices, float* total) {
  const int64_t i = int64_t{blockIdx.x} * kAddThreads + threadIdx.x;
  if (i >= n) return;
  float sum = partial[i];
#pragma unroll 8
  for (int64_t s = 1; s < slices; ++s) sum = sum + partial[s * n + i];
  total[i] = total[i] + sum;
}

// Tensor cores take BF16 activations whose rows are whole vectors. T is no part of the choice.
bool on_tensor_cores(const TensorView& x, const TensorView& weight) {
  return x.dtype == DType::kBf16 && x.dim(1) > 0 && x.dim(1) % kVector == 0 && aligned16(x.data) &&
         aligned16(weight.data);
}

}  // namespace

void add_slices(Queue& queue, const float* partial, int64_t n, int64_t slices, float* total) {
  add_in_order<<<static_cast<unsigned>(ceil_div(n, kAddThreads)), kAddThreads, 0, stream_of(queue)>>>(
      partial, n, slices, total);
  check_launch("add_slices");
}

void run(Queue& queue, const RouterLogits& op) {
  const int64_t tokens = op.x.dim(0), width = op.x.dim(1), experts = op.weight.dim(0);
  if (op.logits.elements() == 0) return;
  if (on_tensor_cores(op.x, op.weight)) {
    return tokens <= kFewTokens ? router_logits_few(queue, op) : router_logits_many(queue, op);
  }
  for_float_type(op.x.dtype, [&](auto type) {
    launch_product<decltype(type), float, true, true>(
        queue, op.kName,
        {op.x.data, op.weight.data, tokens, experts, width, width, width, op.logits.as<float>(), width, 0},
        1);
  });
}

void run(Queue& queue, const RouterLogitsBackward& op) {
  const int64_t tokens = op.x.dim(0), width = op.x.dim(1), experts = op.weight.dim(0);
  const bool whole = experts > 0 && experts % 4 == 0 && aligned16(op.dlogits.data) && aligned16(op.dx.data) &&
                     aligned16(op.dweight.data);
  if (tokens > 0 && whole && on_tensor_cores(op.x, op.weight)) {
    router_dx(queue, op);
    return router_dweight(queue, op);
  }
  launch_product<float, float, true, false>(queue, op.kName,
                                            {op.dlogits.data, op.weight.data, tokens, width, experts, experts,
                                             width, op.dx.as<float>(), experts, 0},
                                            1);
  for_float_type(op.x.dtype, [&](auto type) { backward_weight<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cuda
