// Scores, choice and the counting sort by expert (row_sort.cuh). Few tokens need the first of its launches
// alone: their blocks are one cluster and read each other's words.
#include <algorithm>
#include <limits>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/row_sort.cuh"
#include "kernels/formats/math.h"
#include "kernels/ops/moe.h"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kMostWarps = 16;  // of the first
constexpr int kCluster = 8;     // most blocks of a cluster that every GPU with clusters takes

struct RouteArgs {
  const float *logits, *bias;
  float *scores, *gates;
  int32_t *experts, *offsets, *row_of, *token_of;
  const int32_t* replay;  // null: none
  int32_t* differs;
  FaultSink sink;
  int64_t tokens, blocks;
  int num_experts, top_k;
  int rows;  // tokens of one block, at most 32
  bool softmax, normalise;
  float gate_scale;
  bool together;    // all blocks are one cluster
  uint32_t* masks;  // [experts][blocks]
  int32_t* bases;   // [experts][blocks], the expert's tokens in earlier blocks
  int32_t* counts;  // [experts]
};

// Shared memory of the first launch, in words. Keys and choices are there for `warps` warps.
struct RouteShared {
  int stride, sums, masks, offsets, scratch, keys, chosen, total;
};
__host__ __device__ inline RouteShared route_shared(int num_experts, int top_k, int rows, int warps) {
  RouteShared s{};
  s.stride = num_experts | 1;  // odd: a thread a row reads without bank conflicts
  s.sums = rows * s.stride;
  s.masks = s.sums + 32;
  s.offsets = s.masks + num_experts;
  s.scratch = s.offsets + num_experts;
  s.keys = s.scratch + kScanScratch;
  s.chosen = s.keys + warps * num_experts;
  s.total = s.chosen + warps * top_k;
  return s;
}

// Choice `at` of the flat [T, k] is expert e of token r of the block.
__device__ void write_choice(const RouteArgs& a, int64_t at, int r, const float* row, float chosen_sum,
                             uint32_t e, uint32_t* masks) {
  const float divisor = a.normalise ? chosen_sum : 1.0f;
  const float share = divisor == 0.0f ? 0.0f : row[e] / divisor;
  a.gates[at] = share * a.gate_scale;
  a.experts[at] = static_cast<int32_t>(e);
  atomicOr(&masks[e], 1u << r);
}

// The experts that the token is to take, or null.
__device__ const int32_t* replay_of(const RouteArgs& a, int64_t token) {
  const int32_t* given = a.replay ? a.replay + token * a.top_k : nullptr;
  return given && given[0] >= 0 ? given : nullptr;
}

__device__ bool holds(const int32_t* given, int top_k, uint32_t index) {
  for (int j = 0; j < top_k; ++j) {
    if (given[j] == static_cast<int32_t>(index)) return true;
  }
  return false;
}

// The j-th of the given experts; what is out of range or there before is reported, and the own choice stays.
__device__ uint32_t given_expert(const RouteArgs& a, const int32_t* given, int64_t token, int j, uint32_t own,
                                 int lane) {
  const int32_t e = given[j];
  const bool good = e >= 0 && e < a.num_experts && !holds(given, j, static_cast<uint32_t>(e));
  if (!good && lane == 0) report(a.sink, FaultKind::kIndex, token, e);
  return good ? static_cast<uint32_t>(e) : own;
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

// What a lane holds of a token: experts lane, lane + 32, ..., kPer of them.
template <int kPer>
struct Lane {
  int lane, n;
  float bias[kPer];

  __device__ Lane(const RouteArgs& a, int l) : lane(l), n(a.num_experts) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) bias[i] = lane + 32 * i < n ? a.bias[lane + 32 * i] : 0.0f;
  }

  // exp(logit - max), or the finished sigmoid, into `row`.
  __device__ void unnormalised(const RouteArgs& a, int64_t token, float* row) const {
    const float* logits = a.logits + token * n;
    float x[kPer], m = float_of(0xFF800000u);
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[i] = lane + 32 * i < n ? logits[lane + 32 * i] : float_of(0xFF800000u);
    if (a.softmax) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) m = fmaxf(m, x[i]);
      m = warp_max(m);
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (lane + 32 * i < n) row[lane + 32 * i] = a.softmax ? exp_f32(x[i] - m) : sigmoid_f32(x[i]);
    }
  }

  // Finishes the scores of one token, chooses, writes scores, experts and gates, marks the choice in `masks`.
  // Up to 32 choices, one a lane.
  __device__ void choose(const RouteArgs& a, int64_t token, int r, float* row, float sum,
                         uint32_t* masks) const {
    float* scores = a.scores + token * n;
    uint32_t keys[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      keys[i] = 0;
      if (lane + 32 * i >= n) continue;
      const float s = a.softmax ? row[lane + 32 * i] / sum : row[lane + 32 * i];
      row[lane + 32 * i] = s;
      scores[lane + 32 * i] = s;
      keys[i] = sortable(s + bias[i]);
    }
    __syncwarp();
    float chosen_sum = 0.0f;  // in the order of choice
    uint32_t mine = 0;
    const int32_t* given = replay_of(a, token);
    bool differs = false;
    for (int j = 0; j < a.top_k; ++j) {
      Best best;
#pragma unroll
      for (int i = 0; i < kPer; ++i) best.see(keys[i], lane + 32 * i);
      const uint32_t top = __reduce_max_sync(0xFFFFFFFFu, best.key);
      const uint32_t index = __reduce_min_sync(0xFFFFFFFFu, best.key == top ? best.index : 0xFFFFFFFFu);
#pragma unroll
      for (int i = 0; i < kPer; ++i) keys[i] = index == static_cast<uint32_t>(lane + 32 * i) ? 0 : keys[i];
      uint32_t taken = index;
      if (given) {
        differs = differs || !holds(given, a.top_k, index);
        taken = given_expert(a, given, token, j, index, lane);
      }
      chosen_sum = chosen_sum + row[taken];
      mine = lane == j ? taken : mine;
    }
    if (a.replay && lane == 0) a.differs[token] = differs;
    if (lane < a.top_k) write_choice(a, token * a.top_k + lane, r, row, chosen_sum, mine, masks);
    __syncwarp();
  }
};

// More experts or choices than registers take: the same from shared memory.
template <>
struct Lane<0> {
  int lane, n;
  uint32_t* keys;  // of this warp
  int32_t* chosen;

  __device__ void unnormalised(const RouteArgs& a, int64_t token, float* row) const {
    const float* logits = a.logits + token * n;
    float m = float_of(0xFF800000u);
    for (int e = lane; e < n; e += 32) m = fmaxf(m, logits[e]);
    m = warp_max(m);
    for (int e = lane; e < n; e += 32) row[e] = a.softmax ? exp_f32(logits[e] - m) : sigmoid_f32(logits[e]);
  }

  __device__ void choose(const RouteArgs& a, int64_t token, int r, float* row, float sum,
                         uint32_t* masks) const {
    Best best;
    for (int e = lane; e < n; e += 32) {
      row[e] = a.softmax ? row[e] / sum : row[e];
      a.scores[token * n + e] = row[e];
      keys[e] = sortable(row[e] + a.bias[e]);
      best.see(keys[e], e);
    }
    __syncwarp();
    float chosen_sum = 0.0f;
    const int32_t* given = replay_of(a, token);
    bool differs = false;
    for (int j = 0; j < a.top_k; ++j) {
      const uint32_t top = __reduce_max_sync(0xFFFFFFFFu, best.key);
      const uint32_t index = __reduce_min_sync(0xFFFFFFFFu, best.key == top ? best.index : 0xFFFFFFFFu);
      if (best.index == index) {
        keys[index] = 0;
        best = Best{};
        for (int e = lane; e < n; e += 32) best.see(keys[e], e);
      }
      uint32_t taken = index;
      if (given) {
        differs = differs || !holds(given, a.top_k, index);
        taken = given_expert(a, given, token, j, index, lane);
      }
      chosen_sum = chosen_sum + row[taken];
      if (lane == 0) chosen[j] = static_cast<int32_t>(taken);
    }
    if (a.replay && lane == 0) a.differs[token] = differs;
    __syncwarp();
    for (int j = lane; j < a.top_k; j += 32) {
      write_choice(a, token * a.top_k + j, r, row, chosen_sum, static_cast<uint32_t>(chosen[j]), masks);
    }
    __syncwarp();  // the next token uses `keys` and `chosen` again
  }
};

// offsets[e], in shared memory: tokens of the experts before e. Block 0 writes the tensor too.
template <class Count>
__device__ void expert_offsets(const RouteArgs& a, const Count& count, int32_t* offsets, int* scratch) {
  const int total = key_offsets(a.num_experts, count, offsets, scratch);
  if (blockIdx.x != 0) return;
  for (int e = static_cast<int>(threadIdx.x); e < a.num_experts; e += static_cast<int>(blockDim.x)) {
    a.offsets[e] = offsets[e];
  }
  if (threadIdx.x == 0) a.offsets[a.num_experts] = total;
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

template <int kPer>
__global__ void __launch_bounds__(kMostWarps * 32) choose_experts(RouteArgs a) {
  extern __shared__ float shared[];
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int warp = thread / 32, warps = threads / 32;
  const RouteShared at = route_shared(a.num_experts, a.top_k, a.rows, kPer == 0 ? warps : 0);
  float *rows = shared, *sums = shared + at.sums;
  auto* masks = reinterpret_cast<uint32_t*>(shared + at.masks);
  auto* offsets = reinterpret_cast<int32_t*>(shared + at.offsets);
  auto* scratch = reinterpret_cast<int*>(shared + at.scratch);
  const auto lane = [&] {
    if constexpr (kPer > 0) {
      return Lane<kPer>(a, thread % 32);
    } else {
      return Lane<0>{thread % 32, a.num_experts,
                     reinterpret_cast<uint32_t*>(shared + at.keys) + warp * a.num_experts,
                     reinterpret_cast<int32_t*>(shared + at.chosen) + warp * a.top_k};
    }
  }();

  const int64_t first = int64_t{blockIdx.x} * a.rows;
  const int64_t left = a.tokens - first;
  const int count = static_cast<int>(left < a.rows ? left : a.rows);
  for (int e = thread; e < a.num_experts; e += threads) masks[e] = 0;
  for (int r = warp; r < count; r += warps) lane.unnormalised(a, first + r, rows + r * at.stride);
  __syncthreads();
  if (a.softmax && thread < count) {
    const float* row = rows + thread * at.stride;
    float sum = 0.0f;
#pragma unroll 16
    for (int e = 0; e < a.num_experts; ++e) sum = sum + row[e];
    sums[thread] = sum;
  }
  __syncthreads();
  for (int r = warp; r < count; r += warps) {
    lane.choose(a, first + r, r, rows + r * at.stride, a.softmax ? sums[r] : 1.0f, masks);
  }
  __syncthreads();
  if (gridDim.x == 1) {
    expert_offsets(
        a, [&](int e) { return __popc(masks[e]); }, offsets, scratch);
    place(
        a, [&](int e) { return offsets[e]; }, [&](int e) { return masks[e]; });
    return;
  }
  for (int e = thread; e < a.num_experts; e += threads) a.masks[e * a.blocks + blockIdx.x] = masks[e];
  if (!a.together) return;
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  const auto before = [&](int e, int64_t blocks) {
    int tokens = 0;
    for (int64_t b = 0; b < blocks; ++b) tokens += __popc(a.masks[e * a.blocks + b]);
    return tokens;
  };
  expert_offsets(
      a, [&](int e) { return before(e, a.blocks); }, offsets, scratch);
  place(
      a, [&](int e) { return offsets[e] + before(e, blockIdx.x); }, [&](int e) { return masks[e]; });
}

__global__ void __launch_bounds__(kSortThreads) place_rows(RouteArgs a) {
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
  bool registers;
  int rows, warps;
  int64_t shared_bytes;
};
RoutePlan route_plan(int num_experts, int top_k, int64_t shared_limit) {
  RoutePlan plan{num_experts <= 512 && top_k <= 32, 32, kMostWarps, 0};
  while (true) {
    const RouteShared shared = route_shared(num_experts, top_k, plan.rows, plan.registers ? 0 : plan.warps);
    plan.shared_bytes = int64_t{4} * shared.total;
    if (plan.shared_bytes <= shared_limit) return plan;
    FP4T_CHECK(plan.rows > 1, "route: ", num_experts, " experts need ", plan.shared_bytes,
               " bytes of shared memory, this GPU has ", shared_limit);
    plan.rows /= 2;
    plan.warps = std::min(plan.warps, plan.rows);
  }
}

// Few tokens over the blocks of one cluster, whose number is a power of two.
void spread(int64_t tokens, RoutePlan& plan, int64_t& blocks) {
  const int64_t rows = std::max<int64_t>(4, ceil_div(tokens, kCluster));
  if (tokens <= rows || rows > plan.rows) return;
  plan.rows = static_cast<int>(rows);
  plan.warps = std::min(plan.warps, plan.rows);
  const int64_t needed = ceil_div(tokens, rows);
  for (blocks = 1; blocks < needed;) blocks *= 2;
}

template <int kPer>
void launch_choose(const Context& c, const RoutePlan& plan, const RouteArgs& a) {
  FP4T_CUDA(cudaFuncSetAttribute(choose_experts<kPer>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(plan.shared_bytes)));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(a.blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.warps * 32));
  config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config.stream = c.stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(a.blocks);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = a.together ? 2 : 1;
  FP4T_CUDA(cudaLaunchKernelEx(&config, choose_experts<kPer>, a));
}

}  // namespace

void run(Queue& queue, const Route& op) {
  const Context& c = context_of(queue);
  const int num_experts = narrow<int>(op.logits.dim(1)), top_k = narrow<int>(op.top_k);
  RoutePlan plan = route_plan(num_experts, top_k, c.shared_bytes_per_block);
  const int64_t tokens = op.logits.dim(0);
  int64_t blocks = std::max<int64_t>(1, ceil_div(tokens, plan.rows));
  spread(tokens, plan, blocks);
  Workspace workspace(queue);
  RouteArgs a{op.logits.as<float>(),
              op.bias.as<float>(),
              op.scores.as<float>(),
              op.gates.as<float>(),
              op.experts.as<int32_t>(),
              op.offsets.as<int32_t>(),
              op.row_of.as<int32_t>(),
              op.token_of.as<int32_t>(),
              op.replay.empty() ? nullptr : op.replay.as<int32_t>(),
              op.replay.empty() ? nullptr : op.differs.as<int32_t>(),
              fault_sink(queue, op.kName),
              tokens,
              blocks,
              num_experts,
              top_k,
              plan.rows,
              op.kind == RouterKind::kSoftmax,
              op.normalise,
              op.gate_scale,
              blocks > 1 && blocks <= kCluster && tokens <= blocks * plan.rows,
              nullptr,
              nullptr,
              nullptr};
  if (blocks > 1) {
    a.masks = workspace.take<uint32_t>(num_experts * blocks);
    a.bases = workspace.take<int32_t>(num_experts * blocks);
    a.counts = workspace.take<int32_t>(num_experts);
  }
  const auto choose = !plan.registers      ? launch_choose<0>
                      : num_experts <= 128 ? launch_choose<4>
                      : num_experts <= 256 ? launch_choose<8>
                                           : launch_choose<16>;
  choose(c, plan, a);
  if (blocks == 1 || a.together) return;
  count_before(c, op.kName, {a.masks, a.bases, a.counts, num_experts, blocks});
  const int64_t offset_bytes = int64_t{4} * num_experts;
  FP4T_CUDA(cudaFuncSetAttribute(place_rows, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(offset_bytes)));
  place_rows<<<static_cast<unsigned>(blocks), kSortThreads, static_cast<size_t>(offset_bytes), c.stream>>>(a);
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
