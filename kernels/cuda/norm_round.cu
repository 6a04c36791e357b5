// The norm of few rows, and the norm that also rounds them for a product: every warp of a block works out the
// statistics of its row, in the order of norm_forward.cu, then a thread normalises and rounds 16 values.
#include "kernels/cuda/norm_round.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/norm_rows.cuh"
#include "kernels/cuda/round_rows.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kVectors = 8;  // of a lane, while it takes the sum
constexpr int64_t kWidest = 32 * kVectors * kVector;
constexpr int64_t kFewRows = 1024;  // worth a block each

struct Args {
  const Bf16 *x, *residual;
  const float* weight;
  float eps;
  Bf16 *sum, *out;
  float* rstd;
  RoundJob round;
};

// x, or x + residual rounded.
__device__ __forceinline__ uint4 read(const Args& a, int64_t at) {
  const uint4 raw = load_raw(a.x + at);
  if (!a.residual) return raw;
  float left[kVector], right[kVector];
  decode(raw, left);
  decode(load_raw(a.residual + at), right);
#pragma unroll
  for (int k = 0; k < kVector; ++k) left[k] = left[k] + right[k];
  return encode(left);
}

__global__ void __launch_bounds__(kRoundThreads) norm_round_kernel(const __grid_constant__ Args a) {
  __shared__ uint32_t scratch[kRoundWarps];
  wait_for_previous();
  const RoundPlace place(a.round);
  const int64_t width = a.round.cols, begin = place.row * width;
  const bool there = place.row < a.round.rows;
  const int lane = static_cast<int>(threadIdx.x) % 32, column = place.thread * kQuantBlock;
  const bool mine = there && column < width;
  uint4 own[2] = {};
  float weight[2][kVector] = {};
  if (mine) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      own[h] = read(a, begin + column + h * kVector);
      load_vector(a.weight + column + h * kVector, weight[h]);
    }
  }
  uint4 raw[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int at = (j * 32 + lane) * kVector;
    raw[j] = there && at < width ? read(a, begin + at) : make_uint4(0, 0, 0, 0);
  }
  Dot dot;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float values[kVector];
    decode(raw[j], values);
    dot.add(values, values);
  }
  const float r = reciprocal_rms(warp_sum(dot.sum()), width, a.eps);
  uint32_t word[8] = {};
  if (mine) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (a.residual) store_raw(own[h], a.sum + begin + column + h * kVector);
      float values[kVector];
      decode(own[h], values);
#pragma unroll
      for (int k = 0; k < kVector; ++k) values[k] = values[k] * r * weight[h][k];
      const uint4 out = encode(values);
      store_raw(out, a.out + begin + column + h * kVector);
      word[4 * h] = out.x, word[4 * h + 1] = out.y, word[4 * h + 2] = out.z, word[4 * h + 3] = out.w;
    }
    if (place.thread == 0) a.rstd[place.row] = r;
  }
  if (a.round.values) round_row(a.round, place, a.out + begin, word, scratch);
}

}  // namespace

bool norm_rounds(const NormForward& op) {
  const int64_t rows = op.x.dim(0), width = op.x.dim(1);
  if (op.rounded.empty() && (rows > kFewRows || width % kQuantBlock != 0)) return false;
  // All warps of a row read what one of them writes to.
  const bool in_place = !op.sum.empty() && (op.sum.data == op.x.data || op.sum.data == op.residual.data);
  return op.x.dtype == DType::kBf16 && width <= kWidest && !in_place && aligned16(op.x.data) &&
         aligned16(op.residual.data) && aligned16(op.weight.data) && aligned16(op.sum.data) &&
         aligned16(op.out.data) && aligned16(op.rounded.values.data);
}

void norm_and_round(Queue& queue, const NormForward& op) {
  const bool residual = !op.residual.empty();
  Args a{op.x.as<Bf16>(),
         residual ? op.residual.as<Bf16>() : nullptr,
         op.weight.as<float>(),
         op.eps,
         residual ? op.sum.as<Bf16>() : nullptr,
         op.out.as<Bf16>(),
         op.rstd.as<float>(),
         op.rounded.empty() ? round_job({{}, op.out, op.rstd}) : round_job(op.rounded)};
  if (op.rounded.empty()) a.round.values = nullptr;
  if (a.round.rows == 0) return;
  launch_early(queue, op.kName, norm_round_kernel, dim3(static_cast<unsigned>(round_blocks(a.round))),
               kRoundThreads, 0, a);
}

}  // namespace fp4t::cuda
