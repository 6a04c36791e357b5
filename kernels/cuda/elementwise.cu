// Streams: each thread loads, computes and stores whole vectors, so that aliased operands need no care.
#include "kernels/ops/elementwise.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/load.cuh"
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

// NaN passes through both.
__device__ float limit_above(float x, float limit) { return x > limit ? limit : x; }
__device__ float limit_below(float x, float limit) { return x < limit ? limit : x; }

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

template <class T>
struct Swiglu {
  const T* gate_up;
  T* out;
  HalfRows rows;
  int64_t width;
  float limit;

  __device__ float value(float gate, float up) const {
    return silu_f32(limit_above(gate, limit)) * limit_below(limit_above(up, limit), -limit);
  }
  __device__ void vector(int64_t i) const {
    const T* row = gate_up + rows.place(i);
    float gate[kVector], up[kVector];
    load_vector(row, gate);
    load_vector(row + width, up);
#pragma unroll
    for (int k = 0; k < kVector; ++k) gate[k] = value(gate[k], up[k]);
    store_vector(gate, out + i);
  }
  __device__ void element(int64_t i) const {
    const T* row = gate_up + rows.place(i);
    out[i] = from_f32<T>(value(to_f32(row[0]), to_f32(row[width])));
  }
};

// A clamped operand has gradient zero.
template <class T>
struct SwigluGrad {
  const T* gate_up;
  const T* dout;
  T* dgate_up;
  HalfRows rows;
  int64_t width;
  float limit;

  __device__ void value(float& gate, float& up, float grad) const {
    const float g = limit_above(gate, limit), u = limit_below(limit_above(up, limit), -limit);
    const float dgate = grad * u * silu_grad_f32(g), dup = grad * silu_f32(g);
    gate = gate > limit ? 0.0f : dgate;
    up = fabsf(up) > limit ? 0.0f : dup;
  }
  __device__ void vector(int64_t i) const {
    const int64_t at = rows.place(i);
    float gate[kVector], up[kVector], grad[kVector];
    load_vector(gate_up + at, gate);
    load_vector(gate_up + at + width, up);
    load_vector(dout + i, grad);
#pragma unroll
    for (int k = 0; k < kVector; ++k) value(gate[k], up[k], grad[k]);
    store_vector(gate, dgate_up + at);
    store_vector(up, dgate_up + at + width);
  }
  __device__ void element(int64_t i) const {
    const int64_t at = rows.place(i);
    float gate = to_f32(gate_up[at]), up = to_f32(gate_up[at + width]);
    value(gate, up, to_f32(dout[i]));
    dgate_up[at] = from_f32<T>(gate);
    dgate_up[at + width] = from_f32<T>(up);
  }
};

// No clamp is a clamp at infinity.
float clamp_limit(float clamp) { return clamp > 0.0f ? clamp : std::numeric_limits<float>::infinity(); }

}  // namespace

void run(Queue& queue, const SwigluForward& op) {
  for_float_type(op.out.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t width = op.out.dim(1);
    const Swiglu<T> body{op.gate_up.as<T>(), op.out.as<T>(), HalfRows(width, op.out.elements()), width,
                         clamp_limit(op.clamp)};
    launch(queue, op.kName, op.out.elements(),
           width % kVector == 0 && aligned16(body.gate_up) && aligned16(body.out), body);
  });
}

void run(Queue& queue, const SwigluBackward& op) {
  for_float_type(op.dout.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t width = op.dout.dim(1);
    const SwigluGrad<T> body{op.gate_up.as<T>(),
                             op.dout.as<T>(),
                             op.dgate_up.as<T>(),
                             HalfRows(width, op.dout.elements()),
                             width,
                             clamp_limit(op.clamp)};
    launch(
        queue, op.kName, op.dout.elements(),
        width % kVector == 0 && aligned16(body.gate_up) && aligned16(body.dout) && aligned16(body.dgate_up),
        body);
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
