// In registers, a group of lanes takes several neighbouring heads of one token: it has more loads on their
// way, and one set of angles.
#include "kernels/cuda/norm_rope.cuh"
#include "kernels/ops/norm.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 4;  // of one token that a group takes together

template <class T>
struct Args {
  const T* qkv;
  const int32_t* positions;
  const float *cos, *sin, *q_weight, *k_weight;
  float eps;
  T* out;
  float* rstd;
  int64_t units, width, max_position;
  int heads, rotated, total, half, lanes;  // rotated: query and key heads; total: those of values too
  FaultSink sink;
};

template <class T>
__device__ __forceinline__ bool position_is_good(const Args<T>& a, int64_t token, int32_t position) {
  if (position >= 0 && position < a.max_position) return true;
  report(a.sink, FaultKind::kIndex, token, position);
  return false;
}

// a.units: tokens x ceil(total / kHeads).
__global__ void __launch_bounds__(kThreads, 2) forward_in_registers(const __grid_constant__ Args<Bf16> a) {
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
      Dot dot;
      add_pair(dot, p, p);
      const float r = reciprocal_rms(head_sum(dot.sum(), a.lanes), 2 * half, a.eps);
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
            .width = op.qkv.dim(1),
            .max_position = op.cos.dim(0),
            .heads = narrow<int>(op.heads),
            .rotated = narrow<int>(rotated),
            .total = narrow<int>(total),
            .half = narrow<int>(op.head_dim / 2),
            .lanes = lanes_of_head(op.head_dim),
            .sink = fault_sink(queue, op.kName)};
  if (tokens == 0) return;
  bool fast = false;
  if constexpr (std::is_same_v<T, Bf16>) {
    fast = head_in_registers(op.head_dim) && aligned16(a.qkv) && aligned16(a.out) && aligned16(a.cos) &&
           aligned16(a.sin) && aligned16(a.q_weight) && aligned16(a.k_weight);
    if (fast) a.units = tokens * ceil_div(total, kHeads);
  }
  const auto blocks = narrow<uint32_t>(ceil_div(a.units, kThreads / a.lanes));
  if constexpr (std::is_same_v<T, Bf16>) {
    if (fast) forward_in_registers<<<blocks, kThreads, 0, stream_of(queue)>>>(a);
  }
  if (!fast) forward_any<T><<<blocks, kThreads, 0, stream_of(queue)>>>(a);
  check_launch(op.kName);
}

}  // namespace

void run(Queue& queue, const QkNormRopeForward& op) {
  for_float_type(op.qkv.dtype, [&](auto type) { forward<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cuda
