// Scores, choice and the counting sort by expert.
// A block takes 32 tokens, so that "which of my tokens chose expert e" is one word: its population count is
// the block's count, and the bits below a token's own are its rank. Three launches: the choice with those
// words, a prefix sum over the blocks of each expert, the rows. Up to 32 tokens need the first alone.
#include <algorithm>
#include <limits>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/scan.cuh"
#include "kernels/formats/math.h"
#include "kernels/ops/moe.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256;  // of the second and third launch
constexpr int kScanScratch = 32;

struct RouteArgs {
  const float *logits, *bias;
  float *scores, *gates;
  int32_t *experts, *offsets, *row_of, *token_of;
  int64_t tokens, blocks;
  int num_experts, top_k;
  int rows;  // tokens of one block, at most 32
  bool softmax, normalise;
  float gate_scale;
  uint32_t* masks;  // [experts][blocks]
  int32_t* bases;   // [experts][blocks], the expert's tokens in earlier blocks
  int32_t* counts;  // [experts]
};

// Shared memory of the first launch, in words.
struct RouteShared {
  int stride, sums, masks, keys, chosen, total;
};
__host__ __device__ inline RouteShared route_shared(int num_experts, int top_k, int rows, int warps) {
  RouteShared s{};
  s.stride = num_experts | 1;  // odd: a thread a row reads without bank conflicts
  s.sums = rows * s.stride;
  s.masks = s.sums + 32;
  s.keys = s.masks + num_experts;
  s.chosen = s.keys + warps * num_experts;
  s.total = s.chosen + warps * top_k + kScanScratch;
  return s;
}

// exp(logit - max), or the finished sigmoid.
__device__ void unnormalised(const RouteArgs& a, int64_t token, float* row, int lane) {
  const float* logits = a.logits + token * a.num_experts;
  if (!a.softmax) {
    for (int e = lane; e < a.num_experts; e += 32) row[e] = sigmoid_f32(logits[e]);
    return;
  }
  float m = float_of(0xFF800000u);
  for (int e = lane; e < a.num_experts; e += 32) {
    row[e] = logits[e];
    m = fmaxf(m, row[e]);
  }
  m = warp_max(m);
  for (int e = lane; e < a.num_experts; e += 32) row[e] = exp_f32(row[e] - m);
}

// Unsigned integers in the order of the floats; NaN as +inf, -0 as +0; 0 is below all of them.
__device__ uint32_t sortable(float x) {
  const uint32_t bits = x == x ? bits_of(x + 0.0f) : 0x7F800000u;
  return bits ^ ((bits >> 31) != 0 ? 0xFFFFFFFFu : 0x80000000u);
}

// The largest of this lane's keys, the lowest index among equals.
struct Best {
  uint32_t key = 0, index = 0xFFFFFFFFu;
  __device__ void see(uint32_t k, int e) {
    if (k > key) key = k, index = static_cast<uint32_t>(e);
  }
};

// Finishes the scores of one token, chooses, writes scores, experts and gates, marks the choice in `masks`.
__device__ void choose(const RouteArgs& a, int64_t token, int r, float* row, float sum, uint32_t* keys,
                       int32_t* chosen, uint32_t* masks, int lane) {
  const int n = a.num_experts;
  float* scores = a.scores + token * n;
  Best best;
  for (int e = lane; e < n; e += 32) {
    const float s = a.softmax ? row[e] / sum : row[e];
    row[e] = s;
    scores[e] = s;
    keys[e] = sortable(s + a.bias[e]);
    best.see(keys[e], e);
  }
  __syncwarp();
  float chosen_sum = 0.0f;  // in the order of choice
  for (int j = 0; j < a.top_k; ++j) {
    const uint32_t top = __reduce_max_sync(0xFFFFFFFFu, best.key);
    const uint32_t index = __reduce_min_sync(0xFFFFFFFFu, best.key == top ? best.index : 0xFFFFFFFFu);
    if (best.index == index) {
      keys[index] = 0;
      best = Best{};
      for (int e = lane; e < n; e += 32) best.see(keys[e], e);
    }
    chosen_sum = chosen_sum + row[index];
    if (lane == 0) chosen[j] = static_cast<int32_t>(index);
  }
  __syncwarp();
  const float divisor = a.normalise ? chosen_sum : 1.0f;
  for (int j = lane; j < a.top_k; j += 32) {
    const int32_t e = chosen[j];
    const float share = divisor == 0.0f ? 0.0f : row[e] / divisor;
    a.gates[token * a.top_k + j] = share * a.gate_scale;
    a.experts[token * a.top_k + j] = e;
    atomicOr(&masks[e], 1u << r);
  }
  __syncwarp();  // the next token uses `keys` and `chosen` again
}

// offsets[e], in shared memory: tokens of the experts before e. Block 0 writes the tensor too.
template <class Count>
__device__ void expert_offsets(const RouteArgs& a, const Count& count, int32_t* offsets, int* scratch) {
  int carry = 0;
  for (int first = 0; first < a.num_experts; first += static_cast<int>(blockDim.x)) {
    const int e = first + static_cast<int>(threadIdx.x);
    int total = 0;
    const int before = block_exclusive_sum(e < a.num_experts ? count(e) : 0, scratch, total);
    if (e < a.num_experts) {
      offsets[e] = carry + before;
      if (blockIdx.x == 0) a.offsets[e] = carry + before;
    }
    carry += total;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) a.offsets[a.num_experts] = carry;
  __syncthreads();
}

// Rows of this block's tokens; base(e) is the first row of expert e for this block.
template <class Base, class Mask>
__device__ void place(const RouteArgs& a, const Base& base, const Mask& mask) {
  const int64_t first = int64_t{blockIdx.x} * a.rows;
  const int64_t left = a.tokens - first;
  const int pairs = static_cast<int>(left < a.rows ? left : a.rows) * a.top_k;
  for (int i = static_cast<int>(threadIdx.x); i < pairs; i += static_cast<int>(blockDim.x)) {
    const int r = i / a.top_k;
    const int32_t e = a.experts[first * a.top_k + i];
    const int32_t row = base(e) + __popc(mask(e) & ((1u << r) - 1));
    a.row_of[first * a.top_k + i] = row;
    a.token_of[row] = static_cast<int32_t>(first + r);
  }
}

__global__ void choose_experts(RouteArgs a) {
  extern __shared__ float shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const RouteShared at = route_shared(a.num_experts, a.top_k, a.rows, warps);
  float *rows = shared, *sums = shared + at.sums;
  auto* masks = reinterpret_cast<uint32_t*>(shared + at.masks);
  auto* all_keys = reinterpret_cast<uint32_t*>(shared + at.keys);
  auto* chosen = reinterpret_cast<int32_t*>(shared + at.chosen) + warp * a.top_k;
  auto* scratch = reinterpret_cast<int*>(shared + at.total - kScanScratch);

  const int64_t first = int64_t{blockIdx.x} * a.rows;
  const int64_t left = a.tokens - first;
  const int count = static_cast<int>(left < a.rows ? left : a.rows);
  for (int e = static_cast<int>(threadIdx.x); e < a.num_experts; e += static_cast<int>(blockDim.x)) {
    masks[e] = 0;
  }
  for (int r = warp; r < count; r += warps) unnormalised(a, first + r, rows + r * at.stride, lane);
  __syncthreads();
  if (a.softmax && static_cast<int>(threadIdx.x) < count) {
    const float* row = rows + static_cast<int>(threadIdx.x) * at.stride;
    float sum = 0.0f;
#pragma unroll 16
    for (int e = 0; e < a.num_experts; ++e) sum = sum + row[e];
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
  for (int r = warp; r < count; r += warps) {
    choose(a, first + r, r, rows + r * at.stride, a.softmax ? sums[r] : 1.0f, all_keys + warp * a.num_experts,
           chosen, masks, lane);
  }
  __syncthreads();
  if (gridDim.x == 1) {
    auto* offsets = reinterpret_cast<int32_t*>(all_keys);
    expert_offsets(
        a, [&](int e) { return __popc(masks[e]); }, offsets, scratch);
    place(
        a, [&](int e) { return offsets[e]; }, [&](int e) { return masks[e]; });
    return;
  }
  for (int e = static_cast<int>(threadIdx.x); e < a.num_experts; e += static_cast<int>(blockDim.x)) {
    a.masks[e * a.blocks + blockIdx.x] = masks[e];
  }
}

// One block an expert.
__global__ void __launch_bounds__(kThreads) count_before(RouteArgs a) {
  __shared__ int scratch[kScanScratch];
  const uint32_t* masks = a.masks + blockIdx.x * a.blocks;
  int32_t* bases = a.bases + blockIdx.x * a.blocks;
  int carry = 0;
  for (int64_t first = 0; first < a.blocks; first += kThreads) {
    const int64_t b = first + threadIdx.x;
    int total = 0;
    const int before = block_exclusive_sum(b < a.blocks ? __popc(masks[b]) : 0, scratch, total);
    if (b < a.blocks) bases[b] = carry + before;
    carry += total;
  }
  if (threadIdx.x == 0) a.counts[blockIdx.x] = carry;
}

__global__ void __launch_bounds__(kThreads) place_rows(RouteArgs a) {
  extern __shared__ int32_t offsets[];
  __shared__ int scratch[kScanScratch];
  expert_offsets(
      a, [&](int e) { return a.counts[e]; }, offsets, scratch);
  place(
      a, [&](int e) { return offsets[e] + a.bases[e * a.blocks + blockIdx.x]; },
      [&](int e) { return a.masks[e * a.blocks + blockIdx.x]; });
}

// Tokens and warps of a block: as many as fit in shared memory.
struct RoutePlan {
  int rows, warps;
  int64_t shared_bytes;
};
RoutePlan route_plan(int num_experts, int top_k, int64_t shared_limit) {
  RoutePlan plan{32, 16, 0};
  while (true) {
    plan.shared_bytes = int64_t{4} * route_shared(num_experts, top_k, plan.rows, plan.warps).total;
    if (plan.shared_bytes <= shared_limit) return plan;
    FP4T_CHECK(plan.rows > 1, "route: ", num_experts, " experts need ", plan.shared_bytes,
               " bytes of shared memory, this GPU has ", shared_limit);
    plan.rows /= 2;
    plan.warps = std::min(plan.warps, plan.rows);
  }
}

}  // namespace

void run(Queue& queue, const Route& op) {
  const Context& c = context_of(queue);
  const int num_experts = narrow<int>(op.logits.dim(1)), top_k = narrow<int>(op.top_k);
  const RoutePlan plan = route_plan(num_experts, top_k, c.shared_bytes_per_block);
  const int64_t tokens = op.logits.dim(0), blocks = std::max<int64_t>(1, ceil_div(tokens, plan.rows));
  Workspace workspace(queue);
  RouteArgs a{op.logits.as<float>(),
              op.bias.as<float>(),
              op.scores.as<float>(),
              op.gates.as<float>(),
              op.experts.as<int32_t>(),
              op.offsets.as<int32_t>(),
              op.row_of.as<int32_t>(),
              op.token_of.as<int32_t>(),
              tokens,
              blocks,
              num_experts,
              top_k,
              plan.rows,
              op.kind == RouterKind::kSoftmax,
              op.normalise,
              op.gate_scale,
              nullptr,
              nullptr,
              nullptr};
  if (blocks > 1) {
    a.masks = workspace.take<uint32_t>(num_experts * blocks);
    a.bases = workspace.take<int32_t>(num_experts * blocks);
    a.counts = workspace.take<int32_t>(num_experts);
  }
  FP4T_CUDA(cudaFuncSetAttribute(choose_experts, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(plan.shared_bytes)));
  const auto grid = static_cast<unsigned>(blocks);
  choose_experts<<<grid, static_cast<unsigned>(plan.warps * 32), static_cast<size_t>(plan.shared_bytes),
                   c.stream>>>(a);
  check_launch(op.kName);
  if (blocks == 1) return;
  count_before<<<static_cast<unsigned>(num_experts), kThreads, 0, c.stream>>>(a);
  check_launch(op.kName);
  const int64_t offset_bytes = int64_t{4} * num_experts;
  FP4T_CUDA(cudaFuncSetAttribute(place_rows, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(offset_bytes)));
  place_rows<<<grid, kThreads, static_cast<size_t>(offset_bytes), c.stream>>>(a);
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
