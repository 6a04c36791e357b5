// The sum of squares of a row is `dot` of lanes.h: its order depends on the width alone.
#include "kernels/ops/norm.h"

#include <cmath>

#include "kernels/base/numeric.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/partials.h"
#include "kernels/cpu/round_rows.h"
#include "kernels/cpu/rows.h"
#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

float reciprocal_rms(const float* x, int64_t n, float eps) {
  return 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
}

// dx = rstd * (g - xhat * mean(g * xhat)), g = dout * w, xhat = x * rstd; dweight += dout * xhat.
// x becomes xhat, dout becomes dx.
void norm_backward_row(float* __restrict x, float* __restrict dout, const float* __restrict weight,
                       float* __restrict dweight, float rstd, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    x[i] = x[i] * rstd;
    dweight[i] = dweight[i] + dout[i] * x[i];
    dout[i] = dout[i] * weight[i];
  }
  const float mean = dot(dout, x, n) / static_cast<float>(n);
  for (int64_t i = 0; i < n; ++i) dout[i] = rstd * (dout[i] - x[i] * mean);
}

template <class T>
void norm_forward(Queue& queue, const NormForward& op) {
  const int64_t width = op.x.dim(1);
  const T *x = op.x.as<T>(), *residual = op.residual.empty() ? nullptr : op.residual.as<T>();
  T *sum = residual ? op.sum.as<T>() : nullptr, *out = op.out.as<T>();
  const float* weight = op.weight.as<float>();
  float* rstd = op.rstd.as<float>();
  parallel_for(queue, op.x.dim(0), rows_per_chunk(width), [&](int64_t begin, int64_t end) {
    const Scratch scratch(2 * width);
    float* __restrict row = scratch.get(), * __restrict other = row + width;
    for (int64_t t = begin; t < end; ++t) {
      load_row(x + t * width, row, width);
      if (residual) {
        load_row(residual + t * width, other, width);
        for (int64_t i = 0; i < width; ++i) row[i] = to_f32(from_f32<T>(row[i] + other[i]));
        store_row(row, sum + t * width, width);
      }
      const float r = reciprocal_rms(row, width, op.eps);
      for (int64_t i = 0; i < width; ++i) row[i] = row[i] * r * weight[i];
      store_row(row, out + t * width, width);
      rstd[t] = r;
    }
  });
}

template <class T>
void norm_backward(Queue& queue, const NormBackward& op) {
  const int64_t tokens = op.x.dim(0), width = op.x.dim(1);
  const T *x = op.x.as<T>(), *dout = op.dout.as<T>();
  const T* dresidual = op.dresidual.empty() ? nullptr : op.dresidual.as<T>();
  const float *weight = op.weight.as<float>(), *rstd = op.rstd.as<float>();
  T* dx = op.dx.as<T>();
  Partials partials(tokens, width);
  parallel_for(queue, tokens, kTokensPerPartial, [&](int64_t begin, int64_t end) {
    const Scratch scratch(3 * width);
    float *row = scratch.get(), *grad = row + width, *__restrict past = grad + width;
    float* dweight = partials.zeroed(begin);
    for (int64_t t = begin; t < end; ++t) {
      load_row(x + t * width, row, width);
      load_row(dout + t * width, grad, width);
      norm_backward_row(row, grad, weight, dweight, rstd[t], width);
      if (dresidual) {
        load_row(dresidual + t * width, past, width);
        for (int64_t i = 0; i < width; ++i) grad[i] = grad[i] + past[i];
      }
      store_row(grad, dx + t * width, width);
    }
  });
  partials.add_to(queue, op.dweight.as<float>());
}

// (a, b) rotated by the angle of each pair.
void rotate(float* __restrict a, float* __restrict b, const float* __restrict cos,
            const float* __restrict sin, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = a[i], y = b[i];
    a[i] = x * cos[i] - y * sin[i];
    b[i] = y * cos[i] + x * sin[i];
  }
}

void rotate_back(float* __restrict a, float* __restrict b, const float* __restrict cos,
                 const float* __restrict sin, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = a[i], y = b[i];
    a[i] = x * cos[i] + y * sin[i];
    b[i] = y * cos[i] - x * sin[i];
  }
}

int64_t checked_position(int32_t position, int64_t max_position, const char* op) {
  FP4T_CHECK(position >= 0 && position < max_position, op, ": position ", position, " outside a table of ",
             max_position);
  return position;
}

template <class T>
void qk_norm_rope_forward(Queue& queue, const QkNormRopeForward& op) {
  const int64_t dim = op.head_dim, half = dim / 2, rotated = op.heads + op.kv_heads;
  const int64_t width = (rotated + op.kv_heads) * dim, max_position = op.cos.dim(0);
  const bool norm = !op.q_weight.empty();
  const T* qkv = op.qkv.as<T>();
  T* out = op.out.as<T>();
  const int32_t* positions = op.positions.as<int32_t>();
  const float *cos = op.cos.as<float>(), *sin = op.sin.as<float>();
  parallel_for(queue, op.qkv.dim(0), rows_per_chunk(width), [&](int64_t begin, int64_t end) {
    const Scratch scratch(width);
    float* __restrict row = scratch.get();
    for (int64_t t = begin; t < end; ++t) {
      const int64_t angle = checked_position(positions[t], max_position, op.kName) * half;
      load_row(qkv + t * width, row, width);
      for (int64_t h = 0; h < rotated; ++h) {
        float* __restrict head = row + h * dim;
        if (norm) {
          const float* __restrict weight = (h < op.heads ? op.q_weight : op.k_weight).template as<float>();
          const float r = reciprocal_rms(head, dim, op.eps);
          for (int64_t i = 0; i < dim; ++i) head[i] = head[i] * r * weight[i];
          op.rstd.as<float>()[t * rotated + h] = r;
        }
        rotate(head, head + half, cos + angle, sin + angle, half);
      }
      store_row(row, out + t * width, width);
    }
  });
}

template <class T>
void qk_norm_rope_backward(Queue& queue, const QkNormRopeBackward& op) {
  const int64_t dim = op.head_dim, half = dim / 2, rotated = op.heads + op.kv_heads;
  const int64_t tokens = op.qkv.dim(0), width = (rotated + op.kv_heads) * dim, max_position = op.cos.dim(0);
  const bool norm = !op.q_weight.empty();
  const T *qkv = op.qkv.as<T>(), *dout = op.dout.as<T>();
  T* dqkv = op.dqkv.as<T>();
  const int32_t* positions = op.positions.as<int32_t>();
  const float *cos = op.cos.as<float>(), *sin = op.sin.as<float>();
  Partials partials(norm ? tokens : 0, 2 * dim);
  parallel_for(queue, tokens, kTokensPerPartial, [&](int64_t begin, int64_t end) {
    const Scratch scratch(2 * width);
    float *grad = scratch.get(), *row = grad + width;
    float* dweight = norm ? partials.zeroed(begin) : nullptr;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t angle = checked_position(positions[t], max_position, op.kName) * half;
      load_row(dout + t * width, grad, width);
      if (norm) load_row(qkv + t * width, row, rotated * dim);
      for (int64_t h = 0; h < rotated; ++h) {
        float* head = grad + h * dim;
        rotate_back(head, head + half, cos + angle, sin + angle, half);
        if (norm) {
          const bool query = h < op.heads;
          norm_backward_row(row + h * dim, head, (query ? op.q_weight : op.k_weight).template as<float>(),
                            dweight + (query ? 0 : dim), op.rstd.as<float>()[t * rotated + h], dim);
        }
      }
      store_row(grad, dqkv + t * width, width);
    }
  });
  if (norm) {
    partials.add_to(queue, 0, dim, op.dq_weight.as<float>());
    partials.add_to(queue, dim, dim, op.dk_weight.as<float>());
  }
}

}  // namespace

void run(Queue& queue, const NormForward& op) {
  for_float_type(op.x.dtype, [&](auto type) { norm_forward<decltype(type)>(queue, op); });
  if (!op.rounded.empty()) round_rows(queue, op.out, op.rounded);
}
void run(Queue& queue, const NormBackward& op) {
  for_float_type(op.x.dtype, [&](auto type) { norm_backward<decltype(type)>(queue, op); });
}
void run(Queue& queue, const QkNormRopeForward& op) {
  for_float_type(op.qkv.dtype, [&](auto type) { qk_norm_rope_forward<decltype(type)>(queue, op); });
}
void run(Queue& queue, const QkNormRopeBackward& op) {
  for_float_type(op.qkv.dtype, [&](auto type) { qk_norm_rope_backward<decltype(type)>(queue, op); });
}

}  // namespace fp4t::cpu
