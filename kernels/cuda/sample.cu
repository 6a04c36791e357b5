// Sampling by the inverse of the cumulative distribution, in integers, as on the CPU: weights are summed
// exactly in fixed point and compared with a 24-bit draw. A block takes a row and reads it twice (with top_p
// three to five times more, from L2): totals, then masses in index order.
#include "kernels/ops/sample.h"

#include <algorithm>

#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/loss_top_p.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

struct Draw {
  const float* logits;
  int64_t rows;
  RowLayout layout;
  float temperature, top_p;
  bool greedy;  // temperature is 1 then
  PhiloxKey key;
  const int64_t* sample_ids;
  const int32_t* positions;
  int32_t* tokens;
  float* log_prob;
  FaultSink sink;

  __device__ uint32_t draw24(int64_t b) const { return token_draw(key, sample_ids[b], positions[b]); }
};

// floor(total * draw / 2^24), without overflow.
__device__ __forceinline__ int64_t share(int64_t total, uint32_t draw24) {
  const int64_t high = total >> 24, low = total & 0xFFFFFF;
  return high * draw24 + ((low * draw24) >> 24);
}

// The lowest index of the largest logit.
__device__ int64_t find_largest(const float* row, int64_t vocab, float largest, MassScratch& scratch) {
  return locate(
      row, vocab, scratch, [&](float x, int64_t) { return int64_t{x == largest ? 1 : 0}; },
      [](int64_t) { return int64_t{0}; });
}

template <bool kVector>
__global__ void __launch_bounds__(kMaxRowThreads, 2) draw_rows(Draw in) {
  __shared__ RowScratch scratch;
  __shared__ MassScratch mass;
  const int64_t vocab = in.layout.vocab;
  for (int64_t b = blockIdx.x; b < in.rows; b += gridDim.x) {
    const float* row = in.logits + b * vocab;
    RowTotals totals = row_totals<kVector, false>(row, in.layout, in.temperature, scratch);
    if (!totals.finite()) {
      if (threadIdx.x == 0) {
        report(in.sink, FaultKind::kNonFinite, b, in.positions[b]);
        in.tokens[b] = 0;
        in.log_prob[b] = totals.sum;
      }
      continue;
    }
    const float largest = totals.max / in.temperature;
    const bool restricted = in.top_p < 1.0f;
    TopP set{};
    if (restricted) {
      set = find_top_p(row, vocab, in.temperature, largest, in.top_p, mass);
      totals = set_totals<kVector, false>(row, in.layout, in.temperature, totals.max, set, -1, scratch);
    }
    int64_t token;
    if (in.greedy) {
      token = find_largest(row, vocab, largest, mass);
    } else {
      const bool divide = in.temperature != 1.0f;
      const auto mass_of = [&](float logit, int64_t i) {
        const float x = divide ? logit / in.temperature : logit;
        if (restricted && !set.holds(distance_key(x, largest), i)) return int64_t{0};
        return int64_t{fixed_point(weight_of(x, largest))};
      };
      const uint32_t draw24 = in.draw24(b);
      token = locate(row, vocab, mass, mass_of, [&](int64_t total) { return share(total, draw24); });
    }
    if (threadIdx.x == 0) {
      in.tokens[b] = static_cast<int32_t>(token);
      in.log_prob[b] = row[token] / in.temperature - largest - log_f32(totals.sum);
    }
  }
}

}  // namespace

void run(Queue& queue, const SampleTokens& op) {
  const int64_t rows = op.logits.dim(0), vocab = op.logits.dim(1);
  if (rows == 0) return;
  const bool greedy = op.temperature == 0.0f;
  const Draw in{op.logits.as<float>(),
                rows,
                row_layout(vocab),
                greedy ? 1.0f : op.temperature,
                op.top_p,
                greedy,
                op.key,
                op.sample_ids.as<int64_t>(),
                op.positions.as<int32_t>(),
                op.tokens.as<int32_t>(),
                op.log_prob.as<float>(),
                fault_sink(queue, op.kName)};
  const auto grid = static_cast<unsigned>(std::min<int64_t>(rows, int64_t{1} << 30));
  const int threads = row_threads(vocab);
  if (has_vectors(vocab, in.logits)) {
    draw_rows<true><<<grid, threads, 0, stream_of(queue)>>>(in);
  } else {
    draw_rows<false><<<grid, threads, 0, stream_of(queue)>>>(in);
  }
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
