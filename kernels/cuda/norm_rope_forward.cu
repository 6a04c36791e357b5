// With many tokens a block has a chunk of them, a warp every eighth; its lanes fetch their part of the next
// heads into shared memory while they work. With few, a group of lanes takes a few heads, so that more
// groups have work. The arithmetic of a head is the same in both.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/norm_rope.cuh"
#include "kernels/ops/norm.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 2;  // of one token that a group takes together when tokens are few
constexpr int64_t kManyTokens = 2048;
constexpr int kStages = 6;

template <class T>
struct Args {
  const T* qkv;
  const int32_t* positions;
  const float *cos, *sin, *q_weight, *k_weight;
  float eps;
  T* out;
  float* rstd;
  int64_t units, tokens, chunk, width, max_position;
  int heads, rotated, total, half, lanes;  // rotated: query and key heads; total: those of values too
  FaultSink sink;
};

template <class T>
__device__ __forceinline__ bool position_is_good(const Args<T>& a, int64_t token, int32_t position) {
  if (position >= 0 && position < a.max_position) return true;
  report(a.sink, FaultKind::kIndex, token, position);
  return false;
}

// Normalises and rotates a head's pair; all lanes of the head take part.
__device__ __forceinline__ float head_rstd(const Pair& p, int lanes, int half, float eps) {
  Dot dot;
  add_pair(dot, p, p);
  return reciprocal_rms(head_sum(dot.sum(), lanes), 2 * half, eps);
}

__device__ __forceinline__ void work(const Args<Bf16>& a, const HeadWalk& walk, const HeadWalk::Place& p,
                                     const Angles& angles, bool good, const float* weights, RawPair raw) {
  const HeadKind kind = walk.kind(p);
  const int head = walk.head(p);
  const bool valid = good && head >= 0;
  if (kind != HeadKind::kValue) {
    Pair x = {};
    if (valid) x = decode_pair(raw);
    if (a.q_weight) {
      const float r = head_rstd(x, a.lanes, a.half, a.eps);
      const float* weight = weights + (kind == HeadKind::kQuery ? 0 : 2 * a.half);
      if (valid) {
        scale_pair(x, r);
        multiply_pair(x, load_weight_pair(weight + walk.column, a.half));
        if (walk.column == 0) a.rstd[p.token * a.rotated + head] = r;
      }
    }
    rotate(x, angles.cos, angles.sin);
    raw = encode_pair(x);
  }
  if (valid) {
    store_raw_pair(raw, a.out + p.token * a.width + int64_t{head} * 2 * a.half + walk.column, a.half);
  }
}

// Shared memory: the stages, then both weights.
__global__ void __launch_bounds__(kThreads, 2) forward_chunk(const __grid_constant__ Args<Bf16> a) {
  extern __shared__ uint4 shared[];
  float* weights = reinterpret_cast<float*>(shared + kStages * 2 * kThreads);
  if (a.q_weight) {
    const int dim = 2 * a.half;
    for (int d = static_cast<int>(threadIdx.x); d < 2 * dim; d += kThreads) {
      weights[d] = d < dim ? a.q_weight[d] : a.k_weight[d - dim];
    }
    __syncthreads();
  }
  const HeadWalk walk(a.heads, a.rotated - a.heads, a.half, a.lanes, true, int64_t{blockIdx.x} * a.chunk,
                      min(a.tokens, (int64_t{blockIdx.x} + 1) * a.chunk));
  Angles angles(walk, a.positions);
  uint4* slots = shared + threadIdx.x;
  const auto fetch_heads = [&](const HeadWalk::Place& p, int stage) {
    if (const int head = walk.head(p); head >= 0) {
      const Bf16* from = a.qkv + p.token * a.width + int64_t{head} * 2 * a.half + walk.column;
      fetch(slots + 2 * stage * kThreads, from);
      fetch(slots + (2 * stage + 1) * kThreads, from + a.half);
    }
    fetch_commit();
  };
  HeadWalk::Place fetched = walk.begin(), now = fetched;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    fetch_heads(fetched, s);
    walk.advance(fetched);
  }
  bool good = true;
  int stage = 0;
  for (int64_t left = walk.steps(); left > 0; --left) {
    fetch_heads(fetched, stage == 0 ? kStages - 1 : stage - 1);
    walk.advance(fetched);
    if (now.block == 0) {
      good = angles.begin(walk, now.token, a.cos, a.sin, a.max_position);
      if (!good && threadIdx.x % 32 == 0) report(a.sink, FaultKind::kIndex, now.token, angles.position);
    }
    fetch_wait<kStages - 1>();
    work(a, walk, now, angles, good, weights,
         {slots[2 * stage * kThreads], slots[(2 * stage + 1) * kThreads]});
    walk.advance(now);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
}

// a.units: tokens x ceil(total / kHeads).
__global__ void __launch_bounds__(kThreads) forward_few(const __grid_constant__ Args<Bf16> a) {
  wait_for_previous();
  const int lane = static_cast<int>(threadIdx.x) % a.lanes, sets = (a.total + kHeads - 1) / kHeads;
  const int64_t unit = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / a.lanes;
  int set = 0;
  const int64_t token = divide(unit, sets, set);
  const int head = set * kHeads;
  bool active = unit < a.units && lane * kVector < a.half;
  const int64_t half = a.half, at = token * a.width + int64_t{head} * 2 * half + lane * kVector;
  const int32_t position = active ? a.positions[token] : 0;
  RawPair raw[kHeads];
#pragma unroll
  for (int s = 0; s < kHeads; ++s) {
    if (active && head + s < a.total) {
      raw[s] = load_raw_pair(a.qkv + at + s * 2 * half, half);
    } else {
      raw[s] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    }
  }
  active = active && position_is_good(a, token, position);
  float cos[kVector] = {}, sin[kVector] = {};
  if (active && head < a.rotated) {
    load_vector(a.cos + position * half + lane * kVector, cos);
    load_vector(a.sin + position * half + lane * kVector, sin);
  }
  const float* loaded = nullptr;
  Pair weight = {};
#pragma unroll
  for (int s = 0; s < kHeads; ++s) {
    const bool is_rotated = head + s < a.rotated, mine = active && head + s < a.total;
    Pair p = decode_pair(raw[s]);
    if (a.q_weight) {
      const float r = head_rstd(p, a.lanes, a.half, a.eps);
      const float* wanted = head + s < a.heads ? a.q_weight : a.k_weight;
      if (mine && is_rotated) {
        if (wanted != loaded) weight = load_weight_pair(wanted + lane * kVector, half), loaded = wanted;
        scale_pair(p, r);
        multiply_pair(p, weight);
        if (lane == 0) a.rstd[token * a.rotated + head + s] = r;
      }
    }
    if (is_rotated) {
      rotate(p, cos, sin);
      raw[s] = encode_pair(p);
    }
    if (mine) store_raw_pair(raw[s], a.out + at + s * 2 * half, half);
  }
}

// a.units: tokens x total. A head may be wider than what its lanes hold at once: it is read twice.
template <class T>
__global__ void __launch_bounds__(kThreads) forward_any(const __grid_constant__ Args<T> a) {
  const int lane = static_cast<int>(threadIdx.x) % a.lanes;
  const int64_t unit = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / a.lanes;
  int head = 0;
  const int64_t token = divide(unit, a.total, head), half = a.half;
  const int32_t position = unit < a.units ? a.positions[token] : 0;
  const bool active = unit < a.units && position_is_good(a, token, position);
  const bool is_rotated = head < a.rotated, norm = a.q_weight && is_rotated;
  const T* x = a.qkv + token * a.width + head * 2 * half;
  const int64_t first = active ? lane * kVector : half, stride = int64_t{a.lanes} * kVector;
  Pair p;
  Dot dot;
  for (int64_t i = first; i < half; i += stride) {
    load_pair(x, i, half, p);
    add_pair(dot, p, p);
  }
  const float r = reciprocal_rms(head_sum(dot.sum(), a.lanes), 2 * half, a.eps);
  for (int64_t i = first; i < half; i += stride) {
    load_pair(x, i, half, p);
    if (norm) {
      Pair weight;
      load_pair(head < a.heads ? a.q_weight : a.k_weight, i, half, weight);
      scale_pair(p, r);
      multiply_pair(p, weight);
    }
    if (is_rotated) {
      float cos[kVector], sin[kVector];
      load_part(a.cos + position * half, i, half, cos);
      load_part(a.sin + position * half, i, half, sin);
      rotate(p, cos, sin);
    }
    store_pair(p, a.out + token * a.width + head * 2 * half, i, half);
  }
  if (active && norm && lane == 0) a.rstd[token * a.rotated + head] = r;
}

bool fits_registers(const Args<Bf16>& a) {
  return head_in_registers(2 * a.half) && aligned16(a.qkv) && aligned16(a.out) && aligned16(a.cos) &&
         aligned16(a.sin) && aligned16(a.q_weight) && aligned16(a.k_weight);
}

template <class T>
uint32_t blocks_of(const Args<T>& a) {
  return narrow<uint32_t>(ceil_div(a.units, kThreads / a.lanes));
}

void launch_fast(Queue& queue, Args<Bf16> a, int64_t total) {
  if (a.tokens < kManyTokens) {
    a.units = a.tokens * ceil_div(total, kHeads);
    return launch_early(queue, QkNormRopeForward::kName, forward_few, dim3(blocks_of(a)), kThreads, 0, a);
  }
  const int bytes = kStages * 2 * kThreads * 16 + 4 * a.half * static_cast<int>(sizeof(float));
  FP4T_CUDA(cudaFuncSetAttribute(forward_chunk, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  forward_chunk<<<static_cast<unsigned>(ceil_div(a.tokens, a.chunk)), kThreads, static_cast<size_t>(bytes),
                  stream_of(queue)>>>(a);
}

template <class T>
void forward(Queue& queue, const QkNormRopeForward& op) {
  const bool norm = !op.q_weight.empty();
  const int64_t tokens = op.qkv.dim(0), rotated = op.heads + op.kv_heads, total = rotated + op.kv_heads;
  Args<T> a{.qkv = op.qkv.as<T>(),
            .positions = op.positions.as<int32_t>(),
            .cos = op.cos.as<float>(),
            .sin = op.sin.as<float>(),
            .q_weight = norm ? op.q_weight.as<float>() : nullptr,
            .k_weight = norm ? op.k_weight.as<float>() : nullptr,
            .eps = op.eps,
            .out = op.out.as<T>(),
            .rstd = norm ? op.rstd.as<float>() : nullptr,
            .units = tokens * total,
            .tokens = tokens,
            .chunk = tokens_per_chunk(tokens),
            .width = op.qkv.dim(1),
            .max_position = op.cos.dim(0),
            .heads = narrow<int>(op.heads),
            .rotated = narrow<int>(rotated),
            .total = narrow<int>(total),
            .half = narrow<int>(op.head_dim / 2),
            .lanes = lanes_of_head(op.head_dim),
            .sink = fault_sink(queue, op.kName)};
  if (tokens == 0) return;
  if constexpr (std::is_same_v<T, Bf16>) {
    if (fits_registers(a)) {
      launch_fast(queue, a, total);
      check_launch(op.kName);
      return;
    }
  }
  forward_any<T><<<blocks_of(a), kThreads, 0, stream_of(queue)>>>(a);
  check_launch(op.kName);
}

}  // namespace

void run(Queue& queue, const QkNormRopeForward& op) {
  for_float_type(op.qkv.dtype, [&](auto type) { forward<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cuda
