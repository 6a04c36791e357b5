// A block takes a row. Forward reads it once (with top_p three to five times more, from L2), backward reads
// it once and writes its gradient.
#include "kernels/ops/loss.h"

#include <algorithm>

#include "kernels/cuda/bf16_pair.cuh"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/loss_top_p.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int32_t kIgnored = -1;

struct Rows {
  const float* logits;
  const int32_t* targets;
  int64_t rows;
  RowLayout layout;
  float temperature, top_p;
  FaultSink sink;

  // The target of a row; what is out of range is reported and ignored.
  __device__ int64_t target(int64_t t) const {
    const int32_t target = targets[t];
    if (target >= kIgnored && target < layout.vocab) return target;
    if (threadIdx.x == 0) report(sink, FaultKind::kIndex, t, target);
    return kIgnored;
  }
};

struct ForwardOut {
  float *log_prob, *lse, *entropy;
};

template <bool kVector, bool kEntropy, bool kTopP>
__global__ void __launch_bounds__(kMaxRowThreads, 2) forward(Rows in, ForwardOut out) {
  __shared__ RowScratch scratch;
  for (int64_t t = blockIdx.x; t < in.rows; t += gridDim.x) {
    const float* row = in.logits + t * in.layout.vocab;
    const int64_t target = in.target(t);
    RowTotals totals = row_totals < kVector, kEntropy && !kTopP > (row, in.layout, in.temperature, scratch);
    if constexpr (kTopP) {
      __shared__ MassScratch mass;
      if (totals.finite()) {
        const float largest = totals.max / in.temperature;
        const TopP set = find_top_p(row, in.layout.vocab, in.temperature, largest, in.top_p, mass);
        totals =
            set_totals<kVector, kEntropy>(row, in.layout, in.temperature, totals.max, set, target, scratch);
      }
    }
    if (threadIdx.x != 0) continue;
    const float log_sum = log_f32(totals.sum), largest = totals.max / in.temperature;
    const bool ignored = target == kIgnored;
    out.lse[t] = largest + log_sum;
    out.log_prob[t] = ignored ? 0.0f : row[target] / in.temperature - largest - log_sum;
    if constexpr (kEntropy) {
      // What clamped distances have added stands for nothing.
      const float mean = totals.moment / totals.sum / in.temperature;
      out.entropy[t] = ignored ? 0.0f : log_sum - (fabsf(mean) < 0x1p-100f ? 0.0f : mean);
    }
  }
}

// Weights of one row's log_prob, lse and entropy in the loss.
struct RowWeights {
  float log_prob, lse, entropy;
};

template <class T>
struct BackwardOut {
  const float *lse, *entropy, *d_log_prob, *d_lse, *d_entropy;
  T* dlogits;

  __device__ RowWeights weights(int64_t t) const {
    return {d_log_prob[t], d_lse ? d_lse[t] : 0.0f, d_entropy ? d_entropy[t] : 0.0f};
  }
};

__device__ __forceinline__ void store_quad(const float* in, float* p) {
  *reinterpret_cast<float4*>(p) = make_float4(in[0], in[1], in[2], in[3]);
}
__device__ __forceinline__ void store_quad(const float* in, Bf16* p) {
  *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(in[0], in[1]), pack_bf16(in[2], in[3]));
}

// Stores what for_quads() gave, at its places.
template <bool kVector, class T, int kCount>
__device__ __forceinline__ void store_quads(const float (&x)[kCount], T* row, const RowLayout& layout,
                                            int64_t at) {
#pragma unroll
  for (int q = 0; q < kCount / 4; ++q) {
    const int64_t begin = at + q * quad_width<kVector>();
    if constexpr (kVector) {
      if (begin < layout.vocab) store_quad(x + 4 * q, row + begin);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t i = begin + j * layout.step;
        if (i < layout.vocab) row[i] = from_f32<T>(x[4 * q + j]);
      }
    }
  }
}

template <bool kVector, class T>
__device__ void store_zeros(T* row, const RowLayout& layout) {
  const float zeros[4] = {};
  const int64_t width = quad_width<kVector>(), first = first_element<kVector>(layout);
  for (int64_t begin = 0; begin < layout.vocab; begin += width) {
    store_quads<kVector>(zeros, row, layout, begin + first);
  }
}

// With p = softmax over the set and z = logits / temperature:
//   d log_prob / dz_i = [i = target] - p_i,  d lse / dz_i = p_i,  d entropy / dz_i = -p_i (log p_i + entropy)
template <bool kVector, bool kTopP, class T>
__global__ void __launch_bounds__(kMaxRowThreads, kTopP ? 2 : 3) backward(Rows in, BackwardOut<T> out) {
  const RowLayout& layout = in.layout;
  for (int64_t t = blockIdx.x; t < in.rows; t += gridDim.x) {
    const float* row = in.logits + t * layout.vocab;
    T* grad = out.dlogits + t * layout.vocab;
    const int64_t target = in.target(t);
    const RowWeights w = out.weights(t);
    if (target == kIgnored || (w.log_prob == 0.0f && w.lse == 0.0f && w.entropy == 0.0f)) {
      store_zeros<kVector>(grad, layout);
      continue;
    }
    bool masked = false;
    float largest = 0.0f;
    TopP set{};
    if constexpr (kTopP) {
      __shared__ RowScratch scratch;
      __shared__ MassScratch mass;
      const RowTotals totals = row_totals<kVector, false>(row, layout, in.temperature, scratch);
      // Without a finite sum there is no set, and the NaN of lse stays visible.
      masked = totals.finite();
      largest = totals.max / in.temperature;
      if (masked) set = find_top_p(row, layout.vocab, in.temperature, largest, in.top_p, mass);
    }
    const float lse = out.lse[t], inverse = 1.0f / in.temperature;
    // p (constant - entropy's weight * log p), over the temperature.
    float constant = (w.lse - w.log_prob) - (w.entropy == 0.0f ? 0.0f : w.entropy * out.entropy[t]);
    constant = fabsf(lse) < -kMinusInf ? constant / in.temperature : float_of(0x7FC00000u);
    const float slope = -w.entropy / in.temperature, at_target = w.log_prob / in.temperature;
    for_quads<kVector, kTopP ? 1 : 2>(row, layout, [&](const auto& x, int64_t at) {
      constexpr int kCount = sizeof(x) / sizeof(float);
      float g[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float log_p = __fmaf_rn(x[j], inverse, -lse);
        float p = exp2_scaled(fmaxf(log_p, -87.0f), kLog2E);
        p = log_p < -87.0f ? 0.0f : p;
        if constexpr (kTopP) {
          const int64_t i = at + j / 4 * quad_width<kVector>() + j % 4 * layout.step;
          const bool inside = i == target || set.holds(distance_key(x[j] / in.temperature, largest), i);
          p = masked && !inside ? 0.0f : p;
        }
        g[j] = p * (w.entropy != 0.0f && p != 0.0f ? constant + slope * log_p : constant);
      }
      if (target >= at && target < at + kCount / 4 * quad_width<kVector>()) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const int64_t i = at + j / 4 * quad_width<kVector>() + j % 4 * layout.step;
          if (i == target) g[j] = g[j] + at_target;
        }
      }
      store_quads<kVector>(g, grad, layout, at);
    });
  }
}

template <class Op>
Rows rows_of(const Queue& queue, const Op& op) {
  return {op.logits.template as<float>(),
          op.targets.template as<int32_t>(),
          op.logits.dim(0),
          row_layout(op.logits.dim(1)),
          op.temperature,
          op.top_p,
          fault_sink(queue, op.kName)};
}

// One block a row, by hardware's own schedule; beyond a billion rows blocks take several.
unsigned grid_of(const Rows& rows) {
  return static_cast<unsigned>(std::min<int64_t>(rows.rows, int64_t{1} << 30));
}

// Calls body(true_type{}) or body(false_type{}).
template <class Body>
void for_flag(bool flag, const Body& body) {
  if (flag) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

}  // namespace

void run(Queue& queue, const LogProbForward& op) {
  const Rows rows = rows_of(queue, op);
  if (rows.rows == 0) return;
  const ForwardOut out{op.log_prob.as<float>(), op.lse.as<float>(),
                       op.entropy.empty() ? nullptr : op.entropy.as<float>()};
  const int64_t vocab = rows.layout.vocab;
  for_flag(has_vectors(vocab, rows.logits), [&](auto vectors) {
    for_flag(out.entropy != nullptr, [&](auto entropy) {
      for_flag(op.top_p < 1.0f, [&](auto top_p) {
        forward<vectors.value, entropy.value, top_p.value>
            <<<grid_of(rows), row_threads(vocab), 0, stream_of(queue)>>>(rows, out);
      });
    });
  });
  check_launch(op.kName);
}

void run(Queue& queue, const LogProbBackward& op) {
  const Rows rows = rows_of(queue, op);
  if (rows.rows == 0) return;
  const auto optional = [](const TensorView& v) { return v.empty() ? nullptr : v.as<float>(); };
  const int64_t vocab = rows.layout.vocab;
  for_float_type(op.dlogits.dtype, [&](auto type) {
    using T = decltype(type);
    const BackwardOut<T> out{op.lse.as<float>(), optional(op.entropy),   op.d_log_prob.as<float>(),
                             optional(op.d_lse), optional(op.d_entropy), op.dlogits.as<T>()};
    for_flag(has_vectors(vocab, rows.logits) && aligned16(out.dlogits), [&](auto vectors) {
      for_flag(op.top_p < 1.0f, [&](auto top_p) {
        backward<vectors.value, top_p.value, T>
            <<<grid_of(rows), row_threads(vocab), 0, stream_of(queue)>>>(rows, out);
      });
    });
  });
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
