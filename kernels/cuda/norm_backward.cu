// dx = rstd (g - xhat mean(g xhat)), g = dout w, xhat = x rstd; dweight is the sum of dout xhat.
// BF16 rows up to 8192 wide: a thread keeps eight columns, their weights and their sums for a whole chunk of
// tokens, and fetches its own part of the next rows into shared memory while it works on these. All other
// shapes: one kernel for dx, one for dweight.
#include "kernels/cuda/context.h"
#include "kernels/cuda/norm_rows.cuh"
#include "kernels/ops/norm.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int64_t kWarpWidth = 32 * kVector;
constexpr int kMaxWarps = 32;     // of one row
constexpr int kFewThreads = 256;  // narrow rows share a block of up to this many
constexpr int kStages = 4;

template <class T>
struct Args {
  const T *x, *dout, *dresidual;
  const float *weight, *rstd;
  T* dx;
  float* partials;  // [chunks, width]
  int64_t rows, width, chunk;
  int warps;
};

// What one thread has of the weights and their gradient, and its way through the rows of a chunk: each
// step takes kRows rows for every group of warps in the block.
template <int kThreads, int kRows>
struct Columns {
  static constexpr int kTensors = 3;  // x, dout, dresidual

  __device__ explicit Columns(const Args<Bf16>& args, uint4* shared)
      : a(args),
        slots(shared + threadIdx.x),
        warp(static_cast<int>(threadIdx.x) / 32 % args.warps),
        group(static_cast<int>(threadIdx.x) / (32 * args.warps)),
        column((warp * 32 + static_cast<int>(threadIdx.x) % 32) * kVector),
        per_step(kRows * static_cast<int>(blockDim.x) / (32 * args.warps)),
        first(int64_t{blockIdx.x} * args.chunk + group * kRows),
        last(min(args.rows, (int64_t{blockIdx.x} + 1) * args.chunk)),
        mine(column < args.width) {
    if (mine) load_vector(a.weight + column, weight);
  }

  __device__ int64_t row(int step, int r) const { return first + int64_t{step} * per_step + r; }
  __device__ uint4* slot(int step, int r, int tensor) const {
    return slots + ((step % kStages * kRows + r) * kTensors + tensor) * static_cast<int>(blockDim.x);
  }

  __device__ void fetch_step(int step) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!mine || row(step, r) >= last) continue;
      const int64_t at = row(step, r) * a.width + column;
      fetch(slot(step, r, 0), a.x + at);
      fetch(slot(step, r, 1), a.dout + at);
      if (a.dresidual) fetch(slot(step, r, 2), a.dresidual + at);
    }
    fetch_commit();
  }
  __device__ void load_rstd(int step, float (&rstd)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) rstd[r] = row(step, r) < last ? a.rstd[row(step, r)] : 0.0f;
  }

  // `scratch` has a value a warp and row, and is another one in the next step.
  __device__ void work(int step, const float (&rstd)[kRows], float* scratch) {
    float xhat[kRows][kVector] = {}, g[kRows][kVector] = {}, sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (mine && row(step, r) < last) {
        decode(*slot(step, r, 0), xhat[r]);
        decode(*slot(step, r, 1), g[r]);
      }
      Dot dot;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        xhat[r][k] = xhat[r][k] * rstd[r];
        dweight[k] = __fmaf_rn(g[r][k], xhat[r][k], dweight[k]);
        g[r][k] = g[r][k] * weight[k];
      }
      dot.add(g[r], xhat[r]);
      sum[r] = warp_sum(dot.sum());
    }
    if (a.warps > 1) {
      float* mine_of_group = scratch + group * a.warps * kRows;
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) mine_of_group[warp * kRows + r] = sum[r];
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[r] = mine_of_group[r];
      for (int w = 1; w < a.warps; ++w) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r] += mine_of_group[w * kRows + r];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!mine || row(step, r) >= last) continue;
      const float mean = sum[r] / static_cast<float>(a.width);
      float past[kVector] = {};
      if (a.dresidual) decode(*slot(step, r, 2), past);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        g[r][k] = rstd[r] * (g[r][k] - xhat[r][k] * mean);
        if (a.dresidual) g[r][k] = g[r][k] + past[k];
      }
      store_raw(encode(g[r]), a.dx + row(step, r) * a.width + column);
    }
  }

  // The sums of the block's groups, in their order. `shared` is free.
  __device__ void store_dweight(float* shared) const {
    const int threads = 32 * a.warps;
    const int groups = static_cast<int>(blockDim.x) / threads;
    float total[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) total[k] = dweight[k];
    if (groups > 1) {
      __syncthreads();
      store_vector(dweight, shared + threadIdx.x * kVector);
      __syncthreads();
      if (group != 0) return;
      for (int other = 1; other < groups; ++other) {
        float part[kVector];
        load_vector(shared + (threadIdx.x + static_cast<unsigned>(other * threads)) * kVector, part);
#pragma unroll
        for (int k = 0; k < kVector; ++k) total[k] += part[k];
      }
    }
    if (mine) store_vector(total, a.partials + int64_t{blockIdx.x} * a.width + column);
  }

  const Args<Bf16>& a;
  uint4* slots;
  int warp, group, column, per_step;
  int64_t first, last;
  bool mine;
  float weight[kVector] = {}, dweight[kVector] = {};
};

template <int kThreads, int kRows>
__global__ void __launch_bounds__(kThreads) backward_chunk(const __grid_constant__ Args<Bf16> a) {
  extern __shared__ uint4 shared[];
  __shared__ float scratch[2][kThreads / 32 * kRows];
  Columns<kThreads, kRows> columns(a, shared);
  const int64_t count = min(a.rows, (int64_t{blockIdx.x} + 1) * a.chunk) - int64_t{blockIdx.x} * a.chunk;
  const int steps = static_cast<int>((count + columns.per_step - 1) / columns.per_step);
  for (int s = 0; s < kStages - 1; ++s) columns.fetch_step(s);
  float rstd[kRows], next[kRows];
  columns.load_rstd(0, next);
  for (int s = 0; s < steps; ++s) {
    columns.fetch_step(s + kStages - 1);
#pragma unroll
    for (int r = 0; r < kRows; ++r) rstd[r] = next[r];
    columns.load_rstd(s + 1, next);
    fetch_wait<kStages - 1>();
    columns.work(s, rstd, scratch[s % 2]);
  }
  fetch_wait<0>();
  columns.store_dweight(reinterpret_cast<float*>(shared));
}

template <class T>
__global__ void __launch_bounds__(32 * kMaxWarps) backward_dx_any(const Args<T> a) {
  __shared__ float scratch[kMaxWarps];
  const int64_t at = int64_t{blockIdx.x} * a.width, stride = int64_t{32 * kVector} * a.warps;
  const float rstd = a.rstd[blockIdx.x];
  float x[kVector], g[kVector], other[kVector];
  const auto load = [&](int64_t c) {
    load_part(a.x + at, c, a.width, x);
    load_part(a.dout + at, c, a.width, g);
    load_part(a.weight, c, a.width, other);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      x[k] = x[k] * rstd;
      g[k] = g[k] * other[k];
    }
  };
  Dot dot;
  for (int64_t c = int64_t{threadIdx.x} * kVector; c < a.width; c += stride) {
    load(c);
    dot.add(g, x);
  }
  const float sum = row_sum(dot.sum(), a.warps, static_cast<int>(threadIdx.x) / 32, scratch);
  const float mean = sum / static_cast<float>(a.width);
  for (int64_t c = int64_t{threadIdx.x} * kVector; c < a.width; c += stride) {
    load(c);
    if (a.dresidual) load_part(a.dresidual + at, c, a.width, other);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      g[k] = rstd * (g[k] - x[k] * mean);
      if (a.dresidual) g[k] = g[k] + other[k];
    }
    store_part(g, a.dx + at, c, a.width);
  }
}

template <class T>
__global__ void __launch_bounds__(kFewThreads) backward_dweight_any(const Args<T> a) {
  const int64_t column = int64_t{blockIdx.x} * kFewThreads + threadIdx.x;
  if (column >= a.width) return;
  const int64_t first = int64_t{blockIdx.y} * a.chunk, last = min(a.rows, first + a.chunk);
  float sum = 0.0f;
  for (int64_t row = first; row < last; ++row) {
    const int64_t at = row * a.width + column;
    sum = __fmaf_rn(to_f32(a.dout[at]), to_f32(a.x[at]) * a.rstd[row], sum);
  }
  a.partials[int64_t{blockIdx.y} * a.width + column] = sum;
}

template <int kThreads, int kRows>
void launch_chunks(Queue& queue, const Args<Bf16>& a, int64_t chunks) {
  const int threads = std::max(1, kFewThreads / (32 * a.warps)) * 32 * a.warps;
  const int bytes = kStages * kRows * Columns<kThreads, kRows>::kTensors * threads * 16;
  FP4T_CUDA(cudaFuncSetAttribute(backward_chunk<kThreads, kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes));
  backward_chunk<kThreads, kRows><<<static_cast<unsigned>(chunks), static_cast<unsigned>(threads),
                                    static_cast<size_t>(bytes), stream_of(queue)>>>(a);
}

bool fits_chunks(const Args<Bf16>& a) {
  return a.width % kVector == 0 && a.width <= kMaxWarps * kWarpWidth && aligned16(a.x) && aligned16(a.dout) &&
         aligned16(a.dresidual) && aligned16(a.dx) && aligned16(a.weight);
}

template <class T>
void launch_any(Queue& queue, const Args<T>& a, int64_t chunks) {
  backward_dx_any<T>
      <<<narrow<uint32_t>(a.rows), 32u * static_cast<unsigned>(a.warps), 0, stream_of(queue)>>>(a);
  const dim3 grid(narrow<uint32_t>(ceil_div(a.width, kFewThreads)), static_cast<unsigned>(chunks));
  backward_dweight_any<T><<<grid, kFewThreads, 0, stream_of(queue)>>>(a);
}

template <class T>
void backward(Queue& queue, const NormBackward& op) {
  Args<T> a{.x = op.x.as<T>(),
            .dout = op.dout.as<T>(),
            .dresidual = op.dresidual.empty() ? nullptr : op.dresidual.as<T>(),
            .weight = op.weight.as<float>(),
            .rstd = op.rstd.as<float>(),
            .dx = op.dx.as<T>(),
            .partials = nullptr,
            .rows = op.x.dim(0),
            .width = op.x.dim(1),
            .chunk = tokens_per_chunk(op.x.dim(0)),
            .warps = 1};
  if (a.rows == 0 || a.width == 0) return;
  a.warps = static_cast<int>(std::clamp<int64_t>(ceil_div(a.width, kWarpWidth), 1, kMaxWarps));
  const int64_t chunks = ceil_div(a.rows, a.chunk);
  Workspace workspace(queue);
  a.partials = workspace.take<float>(chunks * a.width);
  if constexpr (std::is_same_v<T, Bf16>) {
    if (!fits_chunks(a)) {
      launch_any(queue, a, chunks);
    } else if (a.warps <= 16) {
      launch_chunks<512, 2>(queue, a, chunks);
    } else {
      launch_chunks<1024, 1>(queue, a, chunks);
    }
  } else {
    launch_any(queue, a, chunks);
  }
  check_launch(op.kName);
  add_partials(queue, op.kName, a.partials, chunks, a.width, op.dweight.as<float>(), a.width, nullptr);
}

}  // namespace

void run(Queue& queue, const NormBackward& op) {
  for_float_type(op.x.dtype, [&](auto type) { backward<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cuda
