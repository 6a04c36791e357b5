// A row is held by one warp up to a width of 2048, by more above; BF16 rows that can be read as vectors
// stay in registers between the sum and the scaling, all others are read twice.
#include "kernels/cuda/context.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/norm_round.h"
#include "kernels/cuda/norm_rows.cuh"
#include "kernels/cuda/round_rows.h"
#include "kernels/ops/norm.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kMaxWarps = 16;         // of one row
constexpr int kVectorsPerThread = 8;  // in registers
constexpr int64_t kWarpWidth = 32 * kVectorsPerThread * kVector;
constexpr int kRowsPerBlock = 4;  // where a warp holds a row

template <class T>
struct Args {
  const T *x, *residual;
  const float* weight;
  float eps;
  T *sum, *out;
  float* rstd;
  int64_t rows, width;
  int warps;
};

// Where a thread stands.
struct Place {
  int64_t row;
  int thread, threads;  // in the row
};

template <class T>
__device__ __forceinline__ Place place(const Args<T>& a) {
  const int t = static_cast<int>(threadIdx.x);
  if (a.warps == 1) return {int64_t{blockIdx.x} * kRowsPerBlock + t / 32, t % 32, 32};
  return {blockIdx.x, t, 32 * a.warps};
}

template <int kVectors>
__global__ void __launch_bounds__(kVectors == kVectorsPerThread ? 32 * kMaxWarps : 32 * kRowsPerBlock)
    forward_in_registers(const Args<Bf16> a) {
  __shared__ float scratch[kMaxWarps];
  wait_for_previous();
  const Place p = place(a);
  if (p.row >= a.rows) return;  // whole warps, and only where a warp is a row
  const Bf16* x = a.x + p.row * a.width;
  const int width = static_cast<int>(a.width);
  const auto column = [&](int j) { return (j * p.threads + p.thread) * kVector; };
  uint4 raw[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    raw[j] = column(j) < width ? load_raw(x + column(j)) : make_uint4(0, 0, 0, 0);
  }
  if (a.residual) {
    const Bf16* residual = a.residual + p.row * a.width;
    Bf16* sum = a.sum + p.row * a.width;
    uint4 other[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      other[j] = column(j) < width ? load_raw(residual + column(j)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float left[kVector], right[kVector];
      decode(raw[j], left);
      decode(other[j], right);
#pragma unroll
      for (int k = 0; k < kVector; ++k) left[k] = left[k] + right[k];
      raw[j] = encode(left);
      if (column(j) < width) store_raw(raw[j], sum + column(j));
    }
  }
  Dot dot;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float values[kVector];
    decode(raw[j], values);
    dot.add(values, values);
  }
  const float r = reciprocal_rms(row_sum(dot.sum(), a.warps, p.thread / 32, scratch), a.width, a.eps);
  Bf16* out = a.out + p.row * a.width;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (column(j) >= width) continue;
    float values[kVector], weight[kVector];
    decode(raw[j], values);
    load_vector(a.weight + column(j), weight);
#pragma unroll
    for (int k = 0; k < kVector; ++k) values[k] = values[k] * r * weight[k];
    store_raw(encode(values), out + column(j));
  }
  if (p.thread == 0) a.rstd[p.row] = r;
}

template <class T>
__global__ void __launch_bounds__(32 * kMaxWarps) forward_any(const Args<T> a) {
  __shared__ float scratch[kMaxWarps];
  const Place p = place(a);
  if (p.row >= a.rows) return;
  const T* x = (a.residual ? a.sum : a.x) + p.row * a.width;
  const int64_t first = p.thread * kVector, stride = int64_t{p.threads} * kVector;
  if (a.residual) {  // each thread reads back only what it wrote
    const T *left = a.x + p.row * a.width, *right = a.residual + p.row * a.width;
    for (int64_t c = first; c < a.width; c += stride) {
      float values[kVector], other[kVector];
      load_part(left, c, a.width, values);
      load_part(right, c, a.width, other);
#pragma unroll
      for (int k = 0; k < kVector; ++k) values[k] = values[k] + other[k];
      store_part(values, a.sum + p.row * a.width, c, a.width);
    }
  }
  Dot dot;
  float values[kVector], weight[kVector];
  for (int64_t c = first; c < a.width; c += stride) {
    load_part(x, c, a.width, values);
    dot.add(values, values);
  }
  const float r = reciprocal_rms(row_sum(dot.sum(), a.warps, p.thread / 32, scratch), a.width, a.eps);
  for (int64_t c = first; c < a.width; c += stride) {
    load_part(x, c, a.width, values);
    load_part(a.weight, c, a.width, weight);
#pragma unroll
    for (int k = 0; k < kVector; ++k) values[k] = values[k] * r * weight[k];
    store_part(values, a.out + p.row * a.width, c, a.width);
  }
  if (p.thread == 0) a.rstd[p.row] = r;
}

using Kernel = void (*)(Args<Bf16>);

// By the width alone.
Kernel kernel_in_registers(int64_t width, int warps) {
  const int64_t vectors = ceil_div(width, 32 * warps * kVector);
  if (vectors <= 1) return forward_in_registers<1>;
  if (vectors <= 2) return forward_in_registers<2>;
  if (vectors <= 4) return forward_in_registers<4>;
  return forward_in_registers<kVectorsPerThread>;
}

template <class T>
void forward(Queue& queue, const NormForward& op) {
  const bool residual = !op.residual.empty();
  Args<T> a{.x = op.x.as<T>(),
            .residual = residual ? op.residual.as<T>() : nullptr,
            .weight = op.weight.as<float>(),
            .eps = op.eps,
            .sum = residual ? op.sum.as<T>() : nullptr,
            .out = op.out.as<T>(),
            .rstd = op.rstd.as<float>(),
            .rows = op.x.dim(0),
            .width = op.x.dim(1),
            .warps = 1};
  if (a.rows == 0) return;
  a.warps = static_cast<int>(std::clamp<int64_t>(ceil_div(a.width, kWarpWidth), 1, kMaxWarps));
  const int64_t blocks = a.warps == 1 ? ceil_div(a.rows, kRowsPerBlock) : a.rows;
  const dim3 grid(narrow<uint32_t>(blocks)),
      block(32u * (a.warps == 1 ? kRowsPerBlock : static_cast<unsigned>(a.warps)));
  Kernel fast = nullptr;
  if constexpr (std::is_same_v<T, Bf16>) {
    const bool vectors = a.width % kVector == 0 && a.width <= kMaxWarps * kWarpWidth && aligned16(a.x) &&
                         aligned16(a.residual) && aligned16(a.weight) && aligned16(a.sum) && aligned16(a.out);
    if (vectors) fast = kernel_in_registers(a.width, a.warps);
    if (fast) launch_early(queue, op.kName, fast, grid, static_cast<int>(block.x), 0, a);
  }
  if (!fast) forward_any<T><<<grid, block, 0, stream_of(queue)>>>(a);
  check_launch(op.kName);
}

}  // namespace

void run(Queue& queue, const NormForward& op) {
  if (norm_rounds(op)) return norm_and_round(queue, op);
  for_float_type(op.x.dtype, [&](auto type) { forward<decltype(type)>(queue, op); });
  if (!op.rounded.empty()) round_rows(queue, op.kName, op.out, op.rounded);
}

}  // namespace fp4t::cuda
