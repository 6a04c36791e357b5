// The threads that hold a row of the output compute it 16 values at a time, meet for the row's largest
// magnitude, and round it.
#include "kernels/cuda/swiglu_round.h"

#include <limits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/round_rows.cuh"
#include "kernels/cuda/swiglu.cuh"

namespace fp4t::cuda {

namespace {

__global__ void __launch_bounds__(kRoundThreads)
    swiglu_round_kernel(const Bf16* gate_up, float limit, Bf16* out, RoundJob job) {
  __shared__ uint32_t scratch[kRoundWarps];
  wait_for_previous();
  const RoundPlace place(job);
  const int64_t width = job.cols;
  const int blocks = place.row < job.rows ? static_cast<int>(width / kQuantBlock) : 0;
  const Bf16* row = gate_up + place.row * 2 * width;
  Bf16* to = out + place.row * width;
  const auto compute = [&](int b, uint32_t(&word)[8]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float gate[kVector], up[kVector];
      const int at = b * kQuantBlock + h * kVector;
      load_vector(row + at, gate);
      load_vector(row + width + at, up);
#pragma unroll
      for (int k = 0; k < kVector; ++k) gate[k] = swiglu(gate[k], up[k], limit);
#pragma unroll
      for (int i = 0; i < 4; ++i) word[4 * h + i] = pack_bf16(gate[2 * i], gate[2 * i + 1]);
    }
    store_block16(word, to + b * kQuantBlock);
  };
  uint32_t held[8] = {};
  if (place.thread < blocks) compute(place.thread, held);
  for (int b = place.thread + job.threads; b < blocks; b += job.threads) {
    uint32_t word[8];
    compute(b, word);
  }
  round_row(job, place, to, held, scratch);  // a thread reads back what it wrote itself
}

}  // namespace

bool swiglu_rounds(const SwigluForward& op) {
  return op.out.dtype == DType::kBf16 && aligned16(op.gate_up.data) && aligned16(op.out.data) &&
         aligned16(op.rounded.values.data);
}

void swiglu_and_round(Queue& queue, const SwigluForward& op) {
  const float limit = op.clamp > 0.0f ? op.clamp : std::numeric_limits<float>::infinity();
  const RoundJob job = round_job(op.rounded);
  if (job.rows == 0) return;
  launch_early(queue, op.kName, swiglu_round_kernel, dim3(static_cast<unsigned>(round_blocks(job))),
               kRoundThreads, 0, op.gate_up.as<Bf16>(), limit, op.out.as<Bf16>(), job);
}

}  // namespace fp4t::cuda
