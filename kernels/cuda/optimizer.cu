// Every element by itself, in the operations of the CPU body one by one; four neighbours a thread where the
// tensors can be read as vectors. What is F32 and what is BF16 is known at run time: the branches are the
// same for all threads, and loads are issued before any of them is decoded.
#include "kernels/ops/optimizer.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/load.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kQuad = 4;

// A tensor of either type, and one that is known to be BF16.
struct Stream {
  void* data;
  bool is_bf16;
};
struct NarrowStream {
  void* data;
  static constexpr bool is_bf16 = true;
};

Stream stream(const TensorView& view) {
  return {view.empty() ? nullptr : view.data, view.dtype == DType::kBf16};
}

// N elements as they lie in memory: a word each, or two a word when they are BF16 and N is four.
template <int N>
struct Raw {
  uint32_t word[N];
};

template <class S>
__device__ __forceinline__ Raw<kQuad> load_raw(const S& s, int64_t i, Raw<kQuad>) {
  if (s.is_bf16) {
    const uint2 r = __ldcs(reinterpret_cast<const uint2*>(static_cast<const Bf16*>(s.data) + i));
    return {{r.x, r.y, 0, 0}};
  }
  const uint4 r = __ldcs(reinterpret_cast<const uint4*>(static_cast<const float*>(s.data) + i));
  return {{r.x, r.y, r.z, r.w}};
}
template <class S>
__device__ __forceinline__ Raw<1> load_raw(const S& s, int64_t i, Raw<1>) {
  if (s.is_bf16) return {{static_cast<const Bf16*>(s.data)[i].bits}};
  return {{static_cast<const uint32_t*>(s.data)[i]}};
}

template <int N>
__device__ __forceinline__ void decode(const Raw<N>& raw, bool is_bf16, float (&out)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const uint32_t narrow_bits = k % 2 ? raw.word[k / 2] & 0xFFFF0000u : raw.word[k / 2] << 16;
    out[k] = float_of(is_bf16 ? narrow_bits : raw.word[k]);
  }
}

__device__ __forceinline__ void store(const float (&in)[kQuad], float* p) {
  __stcs(reinterpret_cast<float4*>(p), make_float4(in[0], in[1], in[2], in[3]));
}
__device__ __forceinline__ void store(const float (&in)[1], float* p) { *p = in[0]; }
__device__ __forceinline__ void store(const Bf16 (&in)[kQuad], Bf16* p) {
  const uint32_t low = in[0].bits | static_cast<uint32_t>(in[1].bits) << 16;
  const uint32_t high = in[2].bits | static_cast<uint32_t>(in[3].bits) << 16;
  __stcs(reinterpret_cast<uint2*>(p), make_uint2(low, high));
}
__device__ __forceinline__ void store(const Bf16 (&in)[1], Bf16* p) { *p = in[0]; }

// The keys of Philox's rounds, made once: draws are what bounds a step with BF16 state.
struct RoundKeys {
  static constexpr int kRounds = 10;
  uint32_t lo[kRounds], hi[kRounds];
};

RoundKeys round_keys(PhiloxKey key) {
  RoundKeys keys;
  for (int r = 0; r < RoundKeys::kRounds; ++r) {
    keys.lo[r] = key.lo;
    keys.hi[r] = key.hi;
    key.lo += 0x9E3779B9u;
    key.hi += 0xBB67AE85u;
  }
  return keys;
}

// site_draw of kernels/base/philox.h.
__device__ __forceinline__ PhiloxBits draw_one(const RoundKeys& keys, uint64_t index) {
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32), c2 = 0, c3 = 0;
#pragma unroll
  for (int r = 0; r < RoundKeys::kRounds; ++r) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ keys.lo[r];
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ keys.hi[r];
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
  }
  return {{c0, c1, c2, c3}};
}

// The draws of N elements; a store uses one word of each.
template <int N>
struct Draws {
  PhiloxBits bits[N];
};

template <int N>
__device__ __forceinline__ Draws<N> draw(bool needed, const RoundKeys& keys, int64_t first) {
  Draws<N> draws = {};
  if (!needed) return draws;
#pragma unroll
  for (int k = 0; k < N; ++k) draws.bits[k] = draw_one(keys, static_cast<uint64_t>(first + k));
  return draws;
}

// f32_to_bf16_stochastic of four; no NaN among them.
__device__ __forceinline__ uint2 round_finite(const float (&x)[kQuad], const Draws<kQuad>& draws, int word) {
  uint32_t sum[kQuad];
#pragma unroll
  for (int k = 0; k < kQuad; ++k) sum[k] = bits_of(x[k]) + (draws.bits[k].word[word] >> 16);
  return make_uint2(__byte_perm(sum[0], sum[1], 0x7632), __byte_perm(sum[2], sum[3], 0x7632));
}

// Stores by the tensor's own rounding and leaves in x what was stored.
template <int N, class S>
__device__ __forceinline__ void store(float (&x)[N], const Draws<N>& draws, int word, const S& s, int64_t i) {
  if (!s.is_bf16) {
    store(x, static_cast<float*>(s.data) + i);
    return;
  }
  Bf16* to = static_cast<Bf16*>(s.data) + i;
  if constexpr (N == kQuad) {
    const float probe = (x[0] + x[1]) + (x[2] + x[3]);
    if (probe == probe) {
      const uint2 pairs = round_finite(x, draws, word);
      __stcs(reinterpret_cast<uint2*>(to), pairs);
      decode(Raw<kQuad>{{pairs.x, pairs.y, 0, 0}}, true, x);
      return;
    }
  }
  Bf16 rounded[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    rounded[k] = f32_to_bf16_stochastic(x[k], draws.bits[k].word[word] >> 16);
    x[k] = bf16_to_f32(rounded[k]);
  }
  store(rounded, to);
}

template <int N>
__device__ __forceinline__ void store_copy(const float (&stored_master)[N], Bf16* copy, int64_t i) {
  if (!copy) return;
  Bf16 rounded[N];
#pragma unroll
  for (int k = 0; k < N; ++k) rounded[k] = f32_to_bf16(stored_master[k]);
  store(rounded, copy + i);
}

template <class State>
struct Adam {
  Stream grad;
  State master, m, v;
  Bf16* copy;
  const float* grad_scale;
  float lr, beta1, rest1, beta2, rest2, eps, weight_decay, bias1, bias2;
  RoundKeys keys;
  int64_t first;
  bool random;

  template <int N>
  __device__ void apply(int64_t i) const {
    const Raw<N> raw_g = load_raw(grad, i, Raw<N>{}), raw_m = load_raw(m, i, Raw<N>{}),
                 raw_v = load_raw(v, i, Raw<N>{}), raw_w = load_raw(master, i, Raw<N>{});
    const float scale = *grad_scale;
    float g[N], m1[N], v1[N], w[N];
    decode(raw_g, grad.is_bf16, g);
    decode(raw_m, m.is_bf16, m1);
    decode(raw_v, v.is_bf16, v1);
    decode(raw_w, master.is_bf16, w);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      g[k] = g[k] * scale;
      m1[k] = beta1 * m1[k] + rest1 * g[k];
      v1[k] = beta2 * v1[k] + rest2 * (g[k] * g[k]);
      const float step = m1[k] * bias1 / (sqrtf(v1[k] * bias2) + eps) + weight_decay * w[k];
      w[k] = w[k] - lr * step;
    }
    const Draws<N> draws = draw<N>(random, keys, first + i);
    store(w, draws, 0, master, i);
    store(m1, draws, 1, m, i);
    store(v1, draws, 2, v, i);
    store_copy(w, copy, i);
  }
};

struct Momentum {
  Stream grad, momentum;
  const float* grad_scale;
  float* update;
  float beta;
  RoundKeys keys;
  int64_t first;

  template <int N>
  __device__ void apply(int64_t i) const {
    const Raw<N> raw_g = load_raw(grad, i, Raw<N>{}), raw_m = load_raw(momentum, i, Raw<N>{});
    const float scale = *grad_scale;
    float g[N], m[N];
    decode(raw_g, grad.is_bf16, g);
    decode(raw_m, momentum.is_bf16, m);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      g[k] = g[k] * scale;
      m[k] = beta * m[k] + g[k];
      g[k] = g[k] + beta * m[k];
    }
    const Draws<N> draws = draw<N>(momentum.is_bf16, keys, first + i);
    store(m, draws, 1, momentum, i);
    store(g, update + i);
  }
};

struct Apply {
  Stream update, master;
  Bf16* copy;
  float lr, scale, weight_decay;
  RoundKeys keys;
  int64_t first;

  template <int N>
  __device__ void apply(int64_t i) const {
    const Raw<N> raw_u = load_raw(update, i, Raw<N>{}), raw_w = load_raw(master, i, Raw<N>{});
    float u[N], w[N];
    decode(raw_u, update.is_bf16, u);
    decode(raw_w, master.is_bf16, w);
#pragma unroll
    for (int k = 0; k < N; ++k) w[k] = w[k] - lr * (scale * u[k] + weight_decay * w[k]);
    const Draws<N> draws = draw<N>(master.is_bf16, keys, first + i);
    store(w, draws, 0, master, i);
    store_copy(w, copy, i);
  }
};

// Quads from the start, what is left one by one. `go` null or 1, or nothing is changed.
template <class Body>
__global__ void __launch_bounds__(kThreads)
    update(const __grid_constant__ Body body, int64_t n, int64_t quads, const int32_t* go) {
  if (go && *go == 0) return;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread < quads) {
    body.template apply<kQuad>(thread * kQuad);
  } else if (const int64_t i = quads * kQuad + (thread - quads); i < n) {
    body.template apply<1>(i);
  }
}

template <class Body>
void launch(Queue& queue, const char* op, const Body& body, int64_t n, bool vectors, const TensorView& go) {
  if (n == 0) return;
  const int64_t quads = vectors ? n / kQuad : 0, threads = quads + (n - quads * kQuad);
  update<<<narrow<uint32_t>(ceil_div(threads, kThreads)), kThreads, 0, stream_of(queue)>>>(
      body, n, quads, go.empty() ? nullptr : go.as<int32_t>());
  check_launch(op);
}

bool all_aligned(std::initializer_list<const TensorView*> views) {
  return std::all_of(views.begin(), views.end(),
                     [](const TensorView* v) { return v->empty() || aligned16(v->data); });
}

bool stores_bf16(const TensorView& view) { return view.dtype == DType::kBf16; }
Bf16* copy_of(const TensorView& view) { return view.empty() ? nullptr : view.as<Bf16>(); }

}  // namespace

void run(Queue& queue, const AdamWStep& op) {
  const bool master = stores_bf16(op.master), m = stores_bf16(op.m), v = stores_bf16(op.v);
  const auto launch_with = [&](const auto& w, const auto& first_moment, const auto& second_moment) {
    const Adam<std::decay_t<decltype(w)>> body{.grad = stream(op.grad),
                                               .master = w,
                                               .m = first_moment,
                                               .v = second_moment,
                                               .copy = copy_of(op.copy),
                                               .grad_scale = op.grad_scale.as<float>(),
                                               .lr = op.lr,
                                               .beta1 = op.beta1,
                                               .rest1 = 1.0f - op.beta1,
                                               .beta2 = op.beta2,
                                               .rest2 = 1.0f - op.beta2,
                                               .eps = op.eps,
                                               .weight_decay = op.weight_decay,
                                               .bias1 = op.bias1,
                                               .bias2 = op.bias2,
                                               .keys = round_keys(op.store_key),
                                               .first = op.first_element,
                                               .random = master || m || v};
    launch(queue, op.kName, body, op.master.elements(),
           all_aligned({&op.grad, &op.master, &op.m, &op.v, &op.copy}), op.apply);
  };
  if (master && m && v) {
    launch_with(NarrowStream{op.master.data}, NarrowStream{op.m.data}, NarrowStream{op.v.data});
  } else {
    launch_with(stream(op.master), stream(op.m), stream(op.v));
  }
}

void run(Queue& queue, const MuonMomentum& op) {
  const Momentum body{.grad = stream(op.grad),
                      .momentum = stream(op.momentum),
                      .grad_scale = op.grad_scale.as<float>(),
                      .update = op.update.as<float>(),
                      .beta = op.beta,
                      .keys = round_keys(op.store_key),
                      .first = op.first_element};
  launch(queue, op.kName, body, op.momentum.elements(), all_aligned({&op.grad, &op.momentum, &op.update}),
         op.apply);
}

void run(Queue& queue, const ApplyUpdate& op) {
  const Apply body{.update = stream(op.update),
                   .master = stream(op.master),
                   .copy = copy_of(op.copy),
                   .lr = op.lr,
                   .scale = op.scale,
                   .weight_decay = op.weight_decay,
                   .keys = round_keys(op.store_key),
                   .first = op.first_element};
  launch(queue, op.kName, body, op.master.elements(), all_aligned({&op.update, &op.master, &op.copy}),
         op.apply);
}

}  // namespace fp4t::cuda
