// Every op works on blocks that are loaded, computed and stored whole: aliased operands need no care.
#include "kernels/ops/elementwise.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/round_rows.h"
#include "kernels/cpu/rows.h"
#include "kernels/formats/math.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

// body(token, first, count) over the rows of a [tokens, width] tensor, each in blocks.
template <class Body>
void for_row_blocks(Queue& queue, int64_t tokens, int64_t width, const Body& body) {
  parallel_for(queue, tokens, rows_per_chunk(width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < width; i += kBlock) body(t, i, std::min(kBlock, width - i));
    }
  });
}

// NaN passes through both.
inline float limit_above(float x, float limit) { return x > limit ? limit : x; }
inline float limit_below(float x, float limit) { return x < limit ? limit : x; }

// No clamp is a clamp at infinity.
float clamp_limit(float clamp) { return clamp > 0.0f ? clamp : std::numeric_limits<float>::infinity(); }

template <class T>
void swiglu_forward(Queue& queue, const SwigluForward& op) {
  const int64_t width = op.out.dim(1);
  const float limit = clamp_limit(op.clamp);
  const T* gate_up = op.gate_up.as<T>();
  T* out = op.out.as<T>();
  for_row_blocks(queue, op.out.dim(0), width, [&](int64_t t, int64_t first, int64_t count) {
    float gate[kBlock], up[kBlock];
    load_row(gate_up + 2 * t * width + first, gate, count);
    load_row(gate_up + (2 * t + 1) * width + first, up, count);
    for (int64_t i = 0; i < count; ++i) {
      const float g = limit_above(gate[i], limit);
      gate[i] = silu_f32(g) * limit_below(limit_above(up[i], limit), -limit);
    }
    store_row(gate, out + t * width + first, count);
  });
}

// A clamped operand has gradient zero.
template <class T>
void swiglu_backward(Queue& queue, const SwigluBackward& op) {
  const int64_t width = op.dout.dim(1);
  const float limit = clamp_limit(op.clamp);
  const T *gate_up = op.gate_up.as<T>(), *dout = op.dout.as<T>();
  T* dgate_up = op.dgate_up.as<T>();
  for_row_blocks(queue, op.dout.dim(0), width, [&](int64_t t, int64_t first, int64_t count) {
    float gate[kBlock], up[kBlock], grad[kBlock];
    load_row(gate_up + 2 * t * width + first, gate, count);
    load_row(gate_up + (2 * t + 1) * width + first, up, count);
    load_row(dout + t * width + first, grad, count);
    for (int64_t i = 0; i < count; ++i) {
      const float g = limit_above(gate[i], limit), u = limit_below(limit_above(up[i], limit), -limit);
      const float dgate = grad[i] * u * silu_grad_f32(g), dup = grad[i] * silu_f32(g);
      gate[i] = gate[i] > limit ? 0.0f : dgate;
      up[i] = std::fabs(up[i]) > limit ? 0.0f : dup;
    }
    store_row(gate, dgate_up + 2 * t * width + first, count);
    store_row(up, dgate_up + (2 * t + 1) * width + first, count);
  });
}

template <class A, class B, class Out>
void add(Queue& queue, const A* a, const B* b, Out* out, int64_t n) {
  for_blocks(queue, n, [&](int64_t first, int64_t count) {
    float x[kBlock], y[kBlock];
    load_row(a + first, x, count);
    load_row(b + first, y, count);
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] + y[i];
    store_row(x, out + first, count);
  });
}

}  // namespace

void run(Queue& queue, const SwigluForward& op) {
  for_float_type(op.out.dtype, [&](auto type) { swiglu_forward<decltype(type)>(queue, op); });
  if (!op.rounded.empty()) round_rows(queue, op.out, op.rounded);
}

void run(Queue& queue, const SwigluBackward& op) {
  for_float_type(op.dout.dtype, [&](auto type) { swiglu_backward<decltype(type)>(queue, op); });
}

void run(Queue& queue, const Add& op) {
  for_float_type(op.a.dtype, [&](auto a) {
    for_float_type(op.b.dtype, [&](auto b) {
      for_float_type(op.out.dtype, [&](auto out) {
        add(queue, op.a.as<decltype(a)>(), op.b.as<decltype(b)>(), op.out.as<decltype(out)>(),
            op.out.elements());
      });
    });
  });
}

void run(Queue& queue, const Cast& op) {
  for_float_type(op.x.dtype, [&](auto from) {
    for_float_type(op.out.dtype, [&](auto to) {
      const auto* x = op.x.as<decltype(from)>();
      auto* out = op.out.as<decltype(to)>();
      for_blocks(queue, op.out.elements(), [&](int64_t first, int64_t count) {
        float block[kBlock];
        load_row(x + first, block, count);
        store_row(block, out + first, count);
      });
    });
  });
}

void run(Queue& queue, const LinearCombination& op) {
  const float *x = op.x.as<float>(), *y = op.y.empty() ? nullptr : op.y.as<float>();
  float* out = op.out.as<float>();
  for_blocks(queue, op.out.elements(), [&](int64_t first, int64_t count) {
    float sum[kBlock], term[kBlock];
    load_row(x + first, sum, count);
    for (int64_t i = 0; i < count; ++i) sum[i] = op.a * sum[i];
    if (y) {
      load_row(y + first, term, count);
      for (int64_t i = 0; i < count; ++i) sum[i] = sum[i] + op.b * term[i];
    }
    store_row(sum, out + first, count);
  });
}

}  // namespace fp4t::cpu
