// Balance of the routing: its statistics, its gradient, the bias that corrects it. A warp takes a token.
#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/formats/math.h"
#include "kernels/ops/moe.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTokensPerBlock = 32;  // of the statistics

// Of a row of logits; every lane has them.
struct Softmax {
  float max, sum;
  __device__ float log_sum() const { return max + log_f32(sum); }
};
__device__ Softmax softmax(const float* logits, int n, int lane) {
  Softmax s{float_of(0xFF800000u), 0.0f};
  for (int e = lane; e < n; e += 32) s.max = fmaxf(s.max, logits[e]);
  s.max = warp_max(s.max);
  for (int e = lane; e < n; e += 32) s.sum += exp_f32(logits[e] - s.max);
  s.sum = warp_sum(s.sum);
  return s;
}

struct Statistics {
  const float *logits, *scores;
  const int32_t* offsets;
  int64_t tokens;
  int num_experts;
  bool sigmoid;
  double* partials;  // [blocks][2]: z, and scores weighted by the counts of their experts
};

__global__ void __launch_bounds__(kThreads) sum_statistics(Statistics a) {
  __shared__ double sums[kWarps][2];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  double z = 0.0, weighted = 0.0;
  for (int r = warp; r < kTokensPerBlock; r += kWarps) {
    const int64_t token = int64_t{blockIdx.x} * kTokensPerBlock + r;
    if (token >= a.tokens) break;
    const double lse = double{softmax(a.logits + token * a.num_experts, a.num_experts, lane).log_sum()};
    z += lse * lse;
    const float* scores = a.scores + token * a.num_experts;
    double dot = 0.0, total = 0.0;
    for (int e = lane; e < a.num_experts; e += 32) {
      dot += double{scores[e]} * (a.offsets[e + 1] - a.offsets[e]);
      total += double{scores[e]};
    }
    dot = warp_sum(dot);
    total = a.sigmoid ? warp_sum(total) : 1.0;
    if (total != 0.0) weighted += dot / total;
  }
  if (lane == 0) sums[warp][0] = z, sums[warp][1] = weighted;
  __syncthreads();
  if (threadIdx.x < 2) {
    double total = 0.0;
    for (int w = 0; w < kWarps; ++w) total += sums[w][threadIdx.x];
    a.partials[2 * int64_t{blockIdx.x} + threadIdx.x] = total;
  }
}

__global__ void __launch_bounds__(kThreads)
    add_statistics(Statistics a, int64_t blocks, int64_t top_k, double* sums, int64_t* load) {
  __shared__ double scratch[33];
  for (int e = static_cast<int>(threadIdx.x); e < a.num_experts; e += kThreads) {
    load[e] += a.offsets[e + 1] - a.offsets[e];
  }
  if (blocks == 0) return;
  double z = 0.0, weighted = 0.0;
  for (int64_t b = threadIdx.x; b < blocks; b += kThreads) {
    z += a.partials[2 * b];
    weighted += a.partials[2 * b + 1];
  }
  z = block_sum(z, scratch);
  weighted = block_sum(weighted, scratch);
  if (threadIdx.x != 0) return;
  sums[0] += z;
  sums[1] += static_cast<double>(a.num_experts) * weighted / static_cast<double>(a.tokens * top_k);
}

struct Gradient {
  const float *logits, *scores, *dgates;
  const int32_t *experts, *offsets;
  float* dlogits;
  int64_t tokens;
  int num_experts, top_k;
  bool is_softmax, normalise;
  float gate_scale, aux_coefficient, z_coefficient;
  FaultSink sink;
};

// d total / d score of the chosen, into `ds` (zeros before). False if an expert is out of range.
__device__ bool add_gates(const Gradient& a, int64_t token, const float* scores, float* ds, int lane) {
  const int32_t* experts = a.experts + token * a.top_k;
  const float* dgates = a.dgates + token * a.top_k;
  bool good = true;
  for (int j = lane; j < a.top_k; j += 32) {
    if (experts[j] >= 0 && experts[j] < a.num_experts) continue;
    report(a.sink, FaultKind::kIndex, token * a.top_k + j, experts[j]);
    good = false;
  }
  if (!__all_sync(0xFFFFFFFFu, good)) return false;
  if (!a.normalise) {
    for (int j = lane; j < a.top_k; j += 32) ds[experts[j]] = a.gate_scale * dgates[j];
    return true;
  }
  float sum = 0.0f, mean = 0.0f;
  for (int j = lane; j < a.top_k; j += 32) sum += scores[experts[j]];
  sum = warp_sum(sum);
  if (sum == 0.0f) return true;  // the gates are the constant 0
  for (int j = lane; j < a.top_k; j += 32) mean += dgates[j] * (scores[experts[j]] / sum);
  mean = warp_sum(mean);
  for (int j = lane; j < a.top_k; j += 32) ds[experts[j]] = a.gate_scale * (dgates[j] - mean) / sum;
  return true;
}

// The auxiliary loss is the sum over tokens and e of aux[e] * p_e; p is the score, or the score by its sum
// for sigmoid. Each lane keeps to its own elements of `ds`.
__device__ void add_aux(const Gradient& a, const float* aux, const float* scores, float* ds, int lane) {
  const int n = a.num_experts;
  if (a.is_softmax) {
    for (int e = lane; e < n; e += 32) ds[e] = ds[e] + aux[e];
    return;
  }
  float sum = 0.0f, mean = 0.0f;
  for (int e = lane; e < n; e += 32) sum += scores[e];
  sum = warp_sum(sum);
  if (sum == 0.0f) return;
  for (int e = lane; e < n; e += 32) mean += aux[e] * (scores[e] / sum);
  mean = warp_sum(mean);
  for (int e = lane; e < n; e += 32) ds[e] = ds[e] + (aux[e] - mean) / sum;
}

__device__ void token_gradient(const Gradient& a, int64_t token, const float* aux, float* ds, int lane) {
  const int n = a.num_experts;
  const float *logits = a.logits + token * n, *scores = a.scores + token * n;
  float* dlogits = a.dlogits + token * n;
  for (int e = lane; e < n; e += 32) ds[e] = 0.0f;
  __syncwarp();
  if (!add_gates(a, token, scores, ds, lane)) return;
  __syncwarp();
  if (a.aux_coefficient != 0.0f) add_aux(a, aux, scores, ds, lane);
  float dot = 0.0f;
  if (a.is_softmax) {
    for (int e = lane; e < n; e += 32) dot += scores[e] * ds[e];
    dot = warp_sum(dot);
  }
  const bool with_z = a.z_coefficient != 0.0f;
  const Softmax s = with_z ? softmax(logits, n, lane) : Softmax{0.0f, 1.0f};
  const float factor = 2.0f * a.z_coefficient * s.log_sum();
  for (int e = lane; e < n; e += 32) {
    float d = a.is_softmax ? scores[e] * (ds[e] - dot) : ds[e] * (scores[e] * (1.0f - scores[e]));
    if (with_z) d = d + factor * (exp_f32(logits[e] - s.max) / s.sum);
    dlogits[e] = d;
  }
  __syncwarp();  // the next token uses `ds` again
}

__global__ void route_gradient(Gradient a) {
  extern __shared__ float shared[];
  const int n = a.num_experts, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  float *aux = shared, *ds = shared + (1 + warp) * n;
  const double rows = static_cast<double>(a.tokens * a.top_k);
  for (int e = static_cast<int>(threadIdx.x); e < n; e += static_cast<int>(blockDim.x)) {
    const double count = a.offsets[e + 1] - a.offsets[e];
    aux[e] = static_cast<float>(double{a.aux_coefficient} * n * count / rows);
  }
  __syncthreads();
  for (int64_t token = int64_t{blockIdx.x} * warps + warp; token < a.tokens;
       token += int64_t{gridDim.x} * warps) {
    token_gradient(a, token, aux, ds, lane);
  }
}

__global__ void __launch_bounds__(kThreads)
    update_expert_bias(const int64_t* load, int64_t n, float rate, float* bias) {
  __shared__ long long scratch[33];
  long long total = 0;
  for (int64_t e = threadIdx.x; e < n; e += kThreads) total += load[e];
  total = block_sum(total, scratch);
  for (int64_t e = threadIdx.x; e < n; e += kThreads) {
    // mean - load, times n: in integers, so that balanced experts get exactly no move.
    const int64_t below_mean = total - load[e] * n;
    if (below_mean > 0) bias[e] = bias[e] + rate;
    if (below_mean < 0) bias[e] = bias[e] - rate;
  }
}

}  // namespace

void run(Queue& queue, const RouterStats& op) {
  const Context& c = context_of(queue);
  const int64_t tokens = op.logits.dim(0), blocks = ceil_div(tokens, kTokensPerBlock);
  Workspace workspace(queue);
  const Statistics a{op.logits.as<float>(),
                     op.scores.as<float>(),
                     op.offsets.as<int32_t>(),
                     tokens,
                     narrow<int>(op.logits.dim(1)),
                     op.kind == RouterKind::kSigmoid,
                     workspace.take<double>(2 * blocks)};
  if (blocks > 0) {
    sum_statistics<<<static_cast<unsigned>(blocks), kThreads, 0, c.stream>>>(a);
    check_launch(op.kName);
  }
  add_statistics<<<1, kThreads, 0, c.stream>>>(a, blocks, op.top_k, op.sums.as<double>(),
                                               op.load.as<int64_t>());
  check_launch(op.kName);
}

void run(Queue& queue, const RouteBackward& op) {
  const Context& c = context_of(queue);
  const int64_t tokens = op.logits.dim(0), n = op.logits.dim(1);
  if (tokens == 0) return;
  const Gradient a{op.logits.as<float>(),
                   op.scores.as<float>(),
                   op.dgates.as<float>(),
                   op.experts.as<int32_t>(),
                   op.offsets.as<int32_t>(),
                   op.dlogits.as<float>(),
                   tokens,
                   narrow<int>(n),
                   narrow<int>(op.experts.dim(1)),
                   op.kind == RouterKind::kSoftmax,
                   op.normalise,
                   op.gate_scale,
                   op.aux_coefficient,
                   op.z_coefficient,
                   fault_sink(queue, op.kName)};
  int64_t warps = kWarps;
  while (warps > 1 && (1 + warps) * n * 4 > c.shared_bytes_per_block) warps /= 2;
  const int64_t shared_bytes = (1 + warps) * n * 4;
  FP4T_CHECK(shared_bytes <= c.shared_bytes_per_block, op.kName, ": ", n, " experts need ", shared_bytes,
             " bytes of shared memory, this GPU has ", c.shared_bytes_per_block);
  FP4T_CUDA(cudaFuncSetAttribute(route_gradient, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes)));
  const int64_t blocks = std::min<int64_t>(ceil_div(tokens, warps), int64_t{c.sm_count} * 32);
  route_gradient<<<static_cast<unsigned>(blocks), static_cast<unsigned>(32 * warps),
                   static_cast<size_t>(shared_bytes), c.stream>>>(a);
  check_launch(op.kName);
}

void run(Queue& queue, const UpdateExpertBias& op) {
  if (op.load.dim(0) == 0) return;
  update_expert_bias<<<1, kThreads, 0, stream_of(queue)>>>(op.load.as<int64_t>(), op.load.dim(0), op.rate,
                                                           op.bias.as<float>());
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
