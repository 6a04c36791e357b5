// Rows to experts and back.
// A token's tree of sums depends on the experts that it chose. One warp works it out for its token, as the
// list of merges in an order that suits the tree, while the first columns are on their way; then every lane
// holds 8 columns of all leaves in registers and follows the list, with branches that the warp takes as one.
#include "kernels/ops/moe.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/combine_tree.cuh"
#include "kernels/cuda/context.h"
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/gather.cuh"
#include "kernels/cuda/gemm_ptx.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLeaves = 8;              // of the fast path
constexpr int kColumns = 32 * kVector;  // that a warp holds at a time

// A BF16 or F32 tensor whose type is looked at where it is read.
struct AnyFloat {
  void* data;
  bool bf16;

  template <int kCount>
  __device__ void load(int64_t at, float (&out)[kCount]) const {
    if (bf16) {
      load_some(static_cast<const Bf16*>(data) + at, out);
    } else {
      load_some(static_cast<const float*>(data) + at, out);
    }
  }
  template <int kCount>
  __device__ void store(int64_t at, const float (&in)[kCount]) const {
    if (bf16) {
      store_some(in, static_cast<Bf16*>(data) + at);
    } else {
      store_some(in, static_cast<float*>(data) + at);
    }
  }
};
AnyFloat any_float(const TensorView& t) { return {t.empty() ? nullptr : t.data, t.dtype == DType::kBf16}; }

struct CombineArgs {
  const void* y;
  const int32_t *row_of, *experts;
  const float* gates;  // may be null
  AnyFloat shared, residual, out;
  int64_t tokens, width, rows;
  int num_experts, top_k;
  int segments;  // warps of a token, each with its share of the columns
  bool partial;
  FaultSink sink;
};

template <int kCount>
__device__ void add(const AnyFloat& addend, int64_t place, float (&x)[kCount]) {
  if (!addend.data) return;
  float other[kCount];
  addend.load(place, other);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = x[i] + other[i];
}

// What follows the tree, and the rounding.
template <int kCount>
__device__ void finish(const CombineArgs& a, int64_t place, float (&x)[kCount]) {
  add(a.shared, place, x);
  add(a.residual, place, x);
  a.out.store(place, x);
}

// This lane's leaf; lanes from top_k on hold none. False, for the whole warp, if an index is out of range.
__device__ bool load_leaf(const CombineArgs& a, int64_t token, int lane, Leaf& leaf) {
  bool good = true;
  if (lane < a.top_k) {
    const int64_t i = token * a.top_k + lane;
    leaf = {a.experts[i], a.row_of[i], a.gates ? a.gates[i] : 1.0f};
    good = leaf.expert >= 0 && leaf.expert < a.num_experts && leaf.row >= 0 && leaf.row < a.rows;
    good = good || (a.partial && leaf.expert == -1);
    if (!good) {
      const bool expert = leaf.expert < 0 || leaf.expert >= a.num_experts;
      report(a.sink, FaultKind::kIndex, i, expert ? leaf.expert : leaf.row);
    }
  }
  return __all_sync(0xFFFFFFFFu, good);
}

// Moves the leaves that are here to the first lanes, in their order; returns how many there are.
__device__ int keep_present(const CombineArgs& a, int lane, Leaf& leaf) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  if (!a.partial) return a.top_k;
  const unsigned here = __ballot_sync(kAll, lane < a.top_k && leaf.expert >= 0);
  const int count = __popc(here);
  const int from = lane < count ? static_cast<int>(__fns(here, 0, lane + 1)) : lane;
  leaf = {__shfl_sync(kAll, leaf.expert, from), __shfl_sync(kAll, leaf.row, from),
          __shfl_sync(kAll, leaf.gate, from)};
  return count;
}

// Columns [256 i, 256 (i + 1)) of a token's leaves on their way through shared memory, kStages ahead; every
// lane reads back what it copied itself.
constexpr int kStages = 2;
template <class T>
struct LeafStages {
  static constexpr int kLaneBytes = kVector * static_cast<int>(sizeof(T));
  // Of a warp, with room for so many leaves.
  static __host__ __device__ int stage_bytes(int leaves) { return leaves * 32 * kLaneBytes; }

  const T* y;
  int64_t width;
  int count, lane;
  int32_t row;  // this lane's leaf's
  char* memory;
  int stage_size;

  __device__ char* place(int stage, int leaf, int part) const {
    return memory + stage * stage_size + leaf * 32 * kLaneBytes + part * 512 + lane * 16;
  }
  __device__ void load(int stage, int64_t column) const {
#pragma unroll
    for (int i = 0; i < kLeaves; ++i) {
      if (i >= count) break;
      const T* from = y + __shfl_sync(0xFFFFFFFFu, row, i) * width + column;
#pragma unroll
      for (int part = 0; part < kLaneBytes / 16; ++part) {
        if (column < width)
          cp_async16(shared_address(place(stage, i, part)), from + part * (16 / sizeof(T)), 16);
      }
    }
    cp_async_commit();
  }
  __device__ void get(int stage, int leaf, float (&out)[kVector]) const {
    if constexpr (sizeof(T) == 2) {
      load_vector(reinterpret_cast<const T*>(place(stage, leaf, 0)), out);
    } else {
      const float4 a = *reinterpret_cast<const float4*>(place(stage, leaf, 0));
      const float4 b = *reinterpret_cast<const float4*>(place(stage, leaf, 1));
      out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
      out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2) combine(CombineArgs a) {
  extern __shared__ __align__(16) char shared[];
  wait_for_previous();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t token = warp / a.segments;
  if (token >= a.tokens) return;
  Leaf leaf{};
  if (!load_leaf(a, token, lane, leaf)) return;
  const int count = keep_present(a, lane, leaf);
  const int stage_size = LeafStages<T>::stage_bytes(a.top_k);
  const LeafStages<T> leaves{static_cast<const T*>(a.y),
                             a.width,
                             count,
                             lane,
                             leaf.row,
                             shared + static_cast<int>(threadIdx.x) / 32 * kStages * stage_size,
                             stage_size};
  const int64_t stride = int64_t{a.segments} * kColumns;
  int64_t c = warp % a.segments * kColumns + lane * kVector;
#pragma unroll
  for (int s = 0; s < kStages; ++s) leaves.load(s, c + s * stride);
  MergeList merges{};
  if (!plan_merges(leaf.expert, count, a.num_experts, lane, merges)) {
    if (lane == 0) report(a.sink, FaultKind::kIndex, token * a.top_k, leaf.expert);  // twice for one token
    cp_async_wait<0>();
    return;
  }
  // The warp stays together for the shuffles in load(); lanes beyond the width do nothing else.
  for (int stage = 0; c - lane * kVector < a.width;
       c += stride, stage = stage + 1 == kStages ? 0 : stage + 1) {
    float v[kLeaves][kVector];
    cp_async_wait<kStages - 1>();
    __syncwarp();
    if (count == 0) {  // of a token whose choices are all elsewhere
#pragma unroll
      for (int k = 0; k < kVector; ++k) v[0][k] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kLeaves; ++i) {
      if (i >= count) break;
      const float gate = __shfl_sync(0xFFFFFFFFu, leaf.gate, i);
      leaves.get(stage, i, v[i]);
      if (!a.gates) continue;
#pragma unroll
      for (int k = 0; k < kVector; ++k) v[i][k] = gate * v[i][k];
    }
    leaves.load(stage, c + kStages * stride);
    for (int m = 0; m < count - 1; ++m) merge(v, merges.code(m));
    if (c < a.width) finish(a, token * a.width + c, v[0]);
  }
}

// The general path: any number of leaves, kCount columns a thread. Leaves arrive in the order of experts and
// are merged as soon as the tree allows, from a stack in shared memory.
constexpr int kStackThreads = 128;

// In words of shared memory: leaves as loaded and sorted, merges after each leaf, split depths, the stack.
struct StackShared {
  int sorted, merges, depth, stack, total;
};
__host__ __device__ inline StackShared stack_shared(int top_k, int levels, int count) {
  StackShared s{};
  s.sorted = 3 * top_k;
  s.merges = s.sorted + 3 * top_k;
  s.depth = s.merges + top_k;
  s.stack = s.depth + top_k + 1;
  const int deepest = top_k < levels + 1 ? top_k : levels + 1;
  s.total = s.stack + deepest * kStackThreads * count;
  return s;
}

// Fills leaves, merges and depths of a token. Returns the number of leaves, for the whole block -1 after a
// fault.
__device__ int plan_stack(const CombineArgs& a, int64_t token, Leaf* loaded, Leaf* sorted, int* merges,
                          int* depth) {
  bool good = true;
  for (int j = static_cast<int>(threadIdx.x); j < a.top_k; j += kStackThreads) {
    const int64_t i = token * a.top_k + j;
    const Leaf leaf{a.experts[i], a.row_of[i], a.gates ? a.gates[i] : 1.0f};
    const bool expert = leaf.expert >= 0 && leaf.expert < a.num_experts;
    const bool absent = a.partial && leaf.expert == -1;
    if (!absent && (!expert || leaf.row < 0 || leaf.row >= a.rows)) {
      report(a.sink, FaultKind::kIndex, i, expert ? leaf.row : leaf.expert);
      good = false;
    }
    loaded[j] = leaf;
    merges[j] = 0;
  }
  if (!__syncthreads_and(good)) return -1;
  int count = a.top_k;
  for (int i = 0; a.partial && i < a.top_k; ++i) count -= loaded[i].expert < 0 ? 1 : 0;
  for (int j = static_cast<int>(threadIdx.x); j < a.top_k; j += kStackThreads) {
    if (loaded[j].expert < 0) continue;
    int rank = 0;
    bool once = true;
    for (int i = 0; i < a.top_k; ++i) {
      rank += loaded[i].expert >= 0 && loaded[i].expert < loaded[j].expert ? 1 : 0;
      if (i != j && loaded[i].expert == loaded[j].expert) once = false;
    }
    if (once) {
      sorted[rank] = loaded[j];
    } else {  // twice for one token: of the same rank
      report(a.sink, FaultKind::kIndex, token * a.top_k + j, loaded[j].expert);
      good = false;
    }
  }
  if (!__syncthreads_and(good)) return -1;
  for (int j = static_cast<int>(threadIdx.x); j <= count; j += kStackThreads) {
    depth[j] = j == 0 || j == count ? -1 : split_depth(sorted[j - 1].expert, sorted[j].expert, a.num_experts);
  }
  __syncthreads();
  // The node that splits leaves j - 1 and j is complete with the last leaf before a shallower split.
  for (int j = 1 + static_cast<int>(threadIdx.x); j < count; j += kStackThreads) {
    int last = j;
    while (depth[last + 1] > depth[j]) ++last;
    atomicAdd(&merges[last], 1);
  }
  __syncthreads();
  return count;
}

template <class T, int kCount>
__global__ void __launch_bounds__(kStackThreads) combine_stack(CombineArgs a, int levels) {
  extern __shared__ __align__(16) char shared[];
  float* words = reinterpret_cast<float*>(shared);
  const StackShared at = stack_shared(a.top_k, levels, kCount);
  auto *loaded = reinterpret_cast<Leaf*>(words), *sorted = reinterpret_cast<Leaf*>(words + at.sorted);
  auto* merges = reinterpret_cast<int*>(words + at.merges);
  auto* depth = reinterpret_cast<int*>(words + at.depth);
  float* stack = words + at.stack + threadIdx.x;  // [depth][kCount][threads]
  const T* y = static_cast<const T*>(a.y);
  for (int64_t token = blockIdx.x; token < a.tokens; token += gridDim.x) {
    const int count = plan_stack(a, token, loaded, sorted, merges, depth);
    if (count >= 0) {
      for (int64_t c = int64_t{threadIdx.x} * kCount; c < a.width; c += kStackThreads * kCount) {
        float x[kCount] = {};
        int top = 0;
        for (int i = 0; i < count; ++i) {
          load_some(y + sorted[i].row * a.width + c, x);
          if (a.gates) {
#pragma unroll
            for (int k = 0; k < kCount; ++k) x[k] = sorted[i].gate * x[k];
          }
          for (int m = merges[i]; m > 0; --m) {
            --top;
#pragma unroll
            for (int k = 0; k < kCount; ++k) x[k] = stack[(top * kCount + k) * kStackThreads] + x[k];
          }
          if (i + 1 == count) break;
#pragma unroll
          for (int k = 0; k < kCount; ++k) stack[(top * kCount + k) * kStackThreads] = x[k];
          ++top;
        }
        finish(a, token * a.width + c, x);
      }
    }
    __syncthreads();  // the next token uses the plan's memory again
  }
}

template <class T, int kCount>
void launch_stack(Queue& queue, const CombineArgs& a) {
  const Context& c = context_of(queue);
  int levels = 0;
  while ((int64_t{1} << levels) < a.num_experts) ++levels;
  const int64_t bytes = int64_t{4} * stack_shared(a.top_k, levels, kCount).total;
  FP4T_CHECK(bytes <= c.shared_bytes_per_block, CombineExperts::kName, ": top ", a.top_k, " needs ", bytes,
             " bytes of shared memory, this GPU has ", c.shared_bytes_per_block);
  FP4T_CUDA(cudaFuncSetAttribute(combine_stack<T, kCount>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(bytes)));
  const int64_t blocks = std::min<int64_t>(a.tokens, int64_t{c.sm_count} * 64);
  combine_stack<T, kCount>
      <<<static_cast<unsigned>(blocks), kStackThreads, static_cast<size_t>(bytes), c.stream>>>(a, levels);
}

bool vectors_fit(const CombineExperts& op) {
  return op.out.dim(1) % kVector == 0 && aligned16(op.y.data) && aligned16(op.shared.data) &&
         aligned16(op.residual.data) && aligned16(op.out.data);
}

template <class T>
void launch_combine(Queue& queue, CombineArgs a, bool vectors) {
  if (!vectors) return launch_stack<T, 1>(queue, a);
  if (a.top_k > kLeaves) return launch_stack<T, kVector>(queue, a);
  const Context& c = context_of(queue);
  // Few tokens share their columns among warps, so that all of the GPU reads.
  const int64_t most = ceil_div(a.width, kColumns), wanted = int64_t{c.sm_count} * 16;
  a.segments = static_cast<int>(std::clamp<int64_t>(ceil_div(wanted, a.tokens), 1, most));
  const int64_t blocks = ceil_div(a.tokens * a.segments, kWarps);
  const int bytes = kWarps * kStages * LeafStages<T>::stage_bytes(a.top_k);
  FP4T_CUDA(cudaFuncSetAttribute(combine<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  launch_early(queue, CombineExperts::kName, combine<T>, dim3(static_cast<unsigned>(blocks)), kThreads, bytes,
               a);
}

}  // namespace

void run(Queue& queue, const PermuteRows& op) {
  const int64_t row_bytes = op.x.dim(1) * dtype_bytes(op.x.dtype);
  if (op.row_of.empty() || row_bytes % 16 != 0 || !aligned16(op.x.data) || !aligned16(op.out.data)) {
    return gather(queue, op.kName, op.x, op.token_of, op.out);
  }
  scatter(queue, op.kName, op.x, op.row_of, op.out);
}

void run(Queue& queue, const CombineExperts& op) {
  if (op.out.elements() == 0) return;
  const CombineArgs a{op.y.data,
                      op.row_of.as<int32_t>(),
                      op.experts.as<int32_t>(),
                      op.gates.empty() ? nullptr : op.gates.as<float>(),
                      any_float(op.shared),
                      any_float(op.residual),
                      any_float(op.out),
                      op.out.dim(0),
                      op.out.dim(1),
                      op.y.dim(0),
                      narrow<int>(op.num_experts),
                      narrow<int>(op.row_of.dim(1)),
                      1,
                      op.partial,
                      fault_sink(queue, op.kName)};
  for_float_type(op.y.dtype, [&](auto type) { launch_combine<decltype(type)>(queue, a, vectors_fit(op)); });
  check_launch(op.kName);
}

}  // namespace fp4t::cuda
