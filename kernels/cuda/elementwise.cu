// Streams: each thread loads, computes and stores whole vectors, so that aliased operands need no care.
#include "kernels/ops/elementwise.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/round_rows.h"
#include "kernels/cuda/swiglu.cuh"
#include "kernels/cuda/swiglu_round.h"
#include "kernels/formats/math.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;

// body.vector(i) for whole vectors and body.element(i) for what is left, over [0, n).
template <bool kVectors, class Body>
__global__ void __launch_bounds__(kThreads) stream(int64_t n, Body body) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  const int64_t vectors = kVectors ? n / kVector : 0;
  for (int64_t v = thread; v < vectors; v += stride) body.vector(v * kVector);
  for (int64_t i = vectors * kVector + thread; i < n; i += stride) body.element(i);
}

template <class Body>
void launch(Queue& queue, const char* op, int64_t n, bool vectors, const Body& body) {
  if (n == 0) return;
  const Context& c = context_of(queue);
  const int64_t work = ceil_div(n, vectors ? kVector : 1);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(work, kThreads), c.sm_count * 16));
  if (vectors) {
    stream<true><<<blocks, kThreads, 0, c.stream>>>(n, body);
  } else {
    stream<false><<<blocks, kThreads, 0, c.stream>>>(n, body);
  }
  check_launch(op);
}

// out[i] = map(a[i], b[i]); b may be null where `map` ignores it.
template <class A, class B, class Out, class Map>
struct Pointwise {
  const A* a;
  const B* b;
  Out* out;
  Map map;

  __device__ void vector(int64_t i) const {
    float x[kVector], y[kVector] = {};
    load_vector(a + i, x);
    if (b) load_vector(b + i, y);
#pragma unroll
    for (int k = 0; k < kVector; ++k) x[k] = map(x[k], y[k]);
    store_vector(x, out + i);
  }
  __device__ void element(int64_t i) const {
    out[i] = from_f32<Out>(map(to_f32(a[i]), b ? to_f32(b[i]) : 0.0f));
  }
};

struct AddMap {
  __device__ float operator()(float x, float y) const { return x + y; }
};
struct CopyMap {
  __device__ float operator()(float x, float) const { return x; }
};
struct CombineMap {
  float a, b;
  bool two;
  __device__ float operator()(float x, float y) const { return two ? a * x + b * y : a * x; }
};

template <class A, class B, class Out, class Map>
void pointwise(Queue& queue, const char* op, const A* a, const B* b, Out* out, int64_t n, const Map& map) {
  launch(queue, op, n, aligned16(a) && aligned16(b) && aligned16(out),
         Pointwise<A, B, Out, Map>{a, b, out, map});
}

// Where element i of [rows, width] stands in [rows, 2 * width]. A 64-bit division costs as much as all the
// rest of an element; up to 2^31 elements it is a multiplication (Granlund and Montgomery 1994, their
// section 4, for dividends below 2^31).
struct HalfRows {
  int64_t width;
  uint32_t magic = 0;
  int shift = 0;
  bool narrow = false;

  HalfRows(int64_t columns, int64_t elements) : width(columns) {
    narrow = elements > 0 && elements < int64_t{1} << 31;
    if (!narrow) return;
    while (int64_t{1} << shift < width) ++shift;
    magic = static_cast<uint32_t>(
        ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - static_cast<uint64_t>(width))) /
            static_cast<uint64_t>(width) +
        1);
  }
  __device__ int64_t place(int64_t i) const {
    if (!narrow) return i + i / width * width;
    const auto n = static_cast<uint32_t>(i);
    return i + static_cast<int64_t>((__umulhi(n, magic) + n) >> shift) * width;
  }
};

// Whether e^-|x| needs no care for subnormal results, for all of a vector; false with a NaN.
__device__ __forceinline__ bool all_within_87(const float (&x)[kVector]) {
  bool within = true;
#pragma unroll
  for (int k = 0; k < kVector; ++k) within = within && fabsf(x[k]) <= 87.0f;
  return within;
}

// kClamped: with a limit.
template <class T, bool kClamped>
struct Swiglu {
  const T* gate_up;
  T* out;
  HalfRows rows;
  int64_t width;
  float limit;

  __device__ void clamp(float& gate, float& up) const {
    if constexpr (kClamped) {
      gate = limit_above(gate, limit);
      up = limit_below(limit_above(up, limit), -limit);
    }
  }
  __device__ void vector(int64_t i) const {
    const T* row = gate_up + rows.place(i);
    float gate[kVector], up[kVector];
    load_vector(row, gate);
    load_vector(row + width, up);
#pragma unroll
    for (int k = 0; k < kVector; ++k) clamp(gate[k], up[k]);
    if (all_within_87(gate)) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float e = exp_f32_87(-fabsf(gate[k]));
        gate[k] = gate[k] * fp4t::detail::over_one_plus(gate[k] < 0.0f ? e : 1.0f, e) * up[k];
      }
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k) gate[k] = silu_f32(gate[k]) * up[k];
    }
    store_computed(gate, out + i);
  }
  __device__ void element(int64_t i) const {
    const T* row = gate_up + rows.place(i);
    float gate = to_f32(row[0]), up = to_f32(row[width]);
    clamp(gate, up);
    out[i] = from_f32<T>(silu_f32(gate) * up);
  }
};

// A clamped operand has gradient zero.
template <class T, bool kClamped>
struct SwigluGrad {
  const T* gate_up;
  const T* dout;
  T* dgate_up;
  HalfRows rows;
  int64_t width;
  float limit;

  // exp(e) for e = -|gate|.
  template <class Exp>
  __device__ void value(float& gate, float& up, float grad, const Exp& exp) const {
    const float g = kClamped ? limit_above(gate, limit) : gate;
    const float u = kClamped ? limit_below(limit_above(up, limit), -limit) : up;
    const SiluGrad silu = silu_and_grad(g, exp(-fabsf(g)));
    const float dgate = grad * u * silu.grad, dup = grad * silu.value;
    gate = kClamped && gate > limit ? 0.0f : dgate;
    up = kClamped && fabsf(up) > limit ? 0.0f : dup;
  }
  __device__ void vector(int64_t i) const {
    const int64_t at = rows.place(i);
    float gate[kVector], up[kVector], grad[kVector];
    load_vector(gate_up + at, gate);
    load_vector(gate_up + at + width, up);
    load_vector(dout + i, grad);
    if (all_within_87(gate)) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) value(gate[k], up[k], grad[k], [](float x) { return exp_f32_87(x); });
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k) value(gate[k], up[k], grad[k], [](float x) { return exp_f32(x); });
    }
    store_computed(gate, dgate_up + at);
    store_computed(up, dgate_up + at + width);
  }
  __device__ void element(int64_t i) const {
    const int64_t at = rows.place(i);
    float gate = to_f32(gate_up[at]), up = to_f32(gate_up[at + width]);
    value(gate, up, to_f32(dout[i]), [](float x) { return exp_f32(x); });
    dgate_up[at] = from_f32<T>(gate);
    dgate_up[at + width] = from_f32<T>(up);
  }
};

}  // namespace

void run(Queue& queue, const SwigluForward& op) {
  if (!op.rounded.empty() && swiglu_rounds(op)) return swiglu_and_round(queue, op);
  const int64_t n = op.out.elements(), width = op.out.dim(1);
  const bool vectors = width % kVector == 0 && aligned16(op.gate_up.data) && aligned16(op.out.data);
  for_float_type(op.out.dtype, [&](auto type) {
    using T = decltype(type);
    const HalfRows rows(width, n);
    if (op.clamp > 0.0f) {
      launch(queue, op.kName, n, vectors,
             Swiglu<T, true>{op.gate_up.as<T>(), op.out.as<T>(), rows, width, op.clamp});
    } else {
      launch(queue, op.kName, n, vectors,
             Swiglu<T, false>{op.gate_up.as<T>(), op.out.as<T>(), rows, width, 0.0f});
    }
  });
  if (!op.rounded.empty()) round_rows(queue, op.kName, op.out, op.rounded);
}

void run(Queue& queue, const SwigluBackward& op) {
  const int64_t n = op.dout.elements(), width = op.dout.dim(1);
  const bool vectors = width % kVector == 0 && aligned16(op.gate_up.data) && aligned16(op.dout.data) &&
                       aligned16(op.dgate_up.data);
  for_float_type(op.dout.dtype, [&](auto type) {
    using T = decltype(type);
    const HalfRows rows(width, n);
    const T *gate_up = op.gate_up.as<T>(), *dout = op.dout.as<T>();
    T* dgate_up = op.dgate_up.as<T>();
    if (op.clamp > 0.0f) {
      launch(queue, op.kName, n, vectors,
             SwigluGrad<T, true>{gate_up, dout, dgate_up, rows, width, op.clamp});
    } else {
      launch(queue, op.kName, n, vectors, SwigluGrad<T, false>{gate_up, dout, dgate_up, rows, width, 0.0f});
    }
  });
}

void run(Queue& queue, const Add& op) {
  for_float_type(op.a.dtype, [&](auto a) {
    for_float_type(op.b.dtype, [&](auto b) {
      for_float_type(op.out.dtype, [&](auto out) {
        pointwise(queue, op.kName, op.a.as<decltype(a)>(), op.b.as<decltype(b)>(), op.out.as<decltype(out)>(),
                  op.out.elements(), AddMap{});
      });
    });
  });
}

void run(Queue& queue, const Cast& op) {
  for_float_type(op.x.dtype, [&](auto from) {
    for_float_type(op.out.dtype, [&](auto to) {
      const float* none = nullptr;
      pointwise(queue, op.kName, op.x.as<decltype(from)>(), none, op.out.as<decltype(to)>(),
                op.out.elements(), CopyMap{});
    });
  });
}

void run(Queue& queue, const LinearCombination& op) {
  const float* y = op.y.empty() ? nullptr : op.y.as<float>();
  pointwise(queue, op.kName, op.x.as<float>(), y, op.out.as<float>(), op.out.elements(),
            CombineMap{op.a, op.b, y != nullptr});
}

}  // namespace fp4t::cuda
