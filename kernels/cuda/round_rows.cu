#include "kernels/cuda/round_rows.cuh"

#include "kernels/cuda/load.cuh"

namespace fp4t::cuda {

namespace {

// Values that a producer has written, in any alignment.
__global__ void __launch_bounds__(kRoundThreads) round_written(RoundJob job, const Bf16* x, bool vectors) {
  __shared__ uint32_t scratch[kRoundWarps];
  const RoundPlace place(job);
  const int64_t blocks = place.row < job.rows ? job.cols / kQuantBlock : 0;
  const Bf16* row = x + place.row * job.cols;
  const auto load = [&](int64_t b, uint32_t(&word)[8]) {
    if (vectors) return load_block16(row + b * kQuantBlock, word);
    const Bf16* p = row + b * kQuantBlock;
#pragma unroll
    for (int i = 0; i < 8; ++i) word[i] = p[2 * i].bits | static_cast<uint32_t>(p[2 * i + 1].bits) << 16;
  };
  uint32_t top = 0;
  for (int64_t b = place.thread; b < blocks; b += job.threads) {
    uint32_t word[8];
    load(b, word);
    top = max(top, magnitude_bits(word));
  }
  top = row_largest(job, top, scratch);
  if (place.row >= job.rows) return;
  const TensorScale scale =
      nvfp4_tensor_scale(job.spec.scale_rule, job.spec.scale_round, job.spec.headroom, float_of(top));
  if (place.thread == 0) job.scale[place.row] = scale.decode;
  for (int64_t b = place.thread; b < blocks; b += job.threads) {
    uint32_t word[8], rounded[8];
    load(b, word);
    round_block(job.spec, scale, word, rounded);
    Bf16* out = job.values + place.row * job.cols + b * kQuantBlock;
    if (vectors) {
      store_block16(rounded, out);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[2 * i].bits = static_cast<uint16_t>(rounded[i]);
      out[2 * i + 1].bits = static_cast<uint16_t>(rounded[i] >> 16);
    }
  }
}

}  // namespace

void round_rows(Queue& queue, const char* op, const TensorView& x, const RoundedRows& out) {
  const RoundJob job = round_job(out);
  if (job.rows == 0) return;
  round_written<<<static_cast<unsigned>(round_blocks(job)), kRoundThreads, 0, stream_of(queue)>>>(
      job, x.as<Bf16>(), aligned16(x.data) && aligned16(job.values));
  check_launch(op);
}

}  // namespace fp4t::cuda
