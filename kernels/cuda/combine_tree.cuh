// The tree over experts that halves [0, E) at floor((a + b) / 2), restricted to the experts that one token
// chose: which neighbours in the order of experts merge first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/load.cuh"

namespace fp4t::cuda {

// One expert's output for a token.
struct Leaf {
  int32_t expert, row;
  float gate;
};

// Depth of the node at which experts a < b part.
__device__ inline int split_depth(int32_t a, int32_t b, int32_t num_experts) {
  int32_t low = 0, high = num_experts;
  int depth = 0;
  while (true) {
    const int32_t middle = low + (high - low) / 2;
    if (a < middle && b >= middle) return depth;
    if (b < middle) {
      high = middle;
    } else {
      low = middle;
    }
    ++depth;
  }
}

// Up to 7 merges "leaf a += leaf b", a < b, in an order that has the parts of each sum ready before it.
// Leaves are numbered by choice, not by expert, so that their columns can be fetched before the tree is
// known; leaf 0 ends with everything. (Which side of a sum comes first matters to no bit of it.)
struct MergeList {
  uint32_t first, last;  // a byte a merge, four each
  __device__ int code(int m) const { return static_cast<int>((m < 4 ? first : last) >> (8 * (m % 4)) & 63u); }
};

// By one warp for up to 8 leaves, whose experts its first lanes hold. False if an expert comes twice.
__device__ inline bool plan_merges(int32_t expert, int count, int32_t num_experts, int lane,
                                   MergeList& list) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  int rank = 0;
  bool twice = false;
  for (int i = 0; i < count; ++i) {
    const int32_t other = __shfl_sync(kAll, expert, i);
    rank += other < expert ? 1 : 0;
    twice = twice || (other == expert && i != lane && lane < count);
  }
  if (__any_sync(kAll, twice)) return false;
  // From here on, lane i stands for the leaf with the i-th lowest expert, and for the split before it.
  int choice = lane;
  for (int i = 0; i < count; ++i) {
    if (__shfl_sync(kAll, rank, i) == lane) choice = i;
  }
  expert = __shfl_sync(kAll, expert, choice);
  const int32_t before = __shfl_up_sync(kAll, expert, 1);
  const bool split = lane > 0 && lane < count;
  const int depth = split ? split_depth(before, expert, num_experts) : -1;

  // The parts of a split reach to the nearest shallower splits, [left, lane) and [lane, right). Deeper splits
  // come first; equally deep ones do not meet.
  int left = 0, right = count, order = 0;
  for (int i = 1; i < count; ++i) {
    const int other = __shfl_sync(kAll, depth, i);
    if (i < lane && other < depth) left = i;
    if (i > lane && other < depth && right == count) right = i;
    order += other > depth || (other == depth && i < lane) ? 1 : 0;
  }
  // A sum stands where the first chosen of its leaves does.
  int a = 8, b = 8;
  for (int i = 0; i < count; ++i) {
    const int other = __shfl_sync(kAll, choice, i);
    if (i >= left && i < lane) a = min(a, other);
    if (i >= lane && i < right) b = min(b, other);
  }
  const uint32_t byte = static_cast<uint32_t>(min(a, b) * 8 + max(a, b)) << (8 * (order % 4));
  list.first = __reduce_or_sync(kAll, split && order < 4 ? byte : 0u);
  list.last = __reduce_or_sync(kAll, split && order >= 4 ? byte : 0u);
  return true;
}

// v[a] += v[b] for code = 8 a + b. The branches keep all indices known to the compiler, so that v stays in
// registers.
template <int kCount>
__device__ __forceinline__ void merge(float (&v)[8][kCount], int code) {
  const auto add = [&](int a, int b) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) v[a][k] = v[a][k] + v[b][k];
  };
#define FP4T_MERGE(a, b) \
  case 8 * a + b:        \
    add(a, b);           \
    break
  switch (code) {
    FP4T_MERGE(0, 1);
    FP4T_MERGE(0, 2);
    FP4T_MERGE(0, 3);
    FP4T_MERGE(0, 4);
    FP4T_MERGE(0, 5);
    FP4T_MERGE(0, 6);
    FP4T_MERGE(0, 7);
    FP4T_MERGE(1, 2);
    FP4T_MERGE(1, 3);
    FP4T_MERGE(1, 4);
    FP4T_MERGE(1, 5);
    FP4T_MERGE(1, 6);
    FP4T_MERGE(1, 7);
    FP4T_MERGE(2, 3);
    FP4T_MERGE(2, 4);
    FP4T_MERGE(2, 5);
    FP4T_MERGE(2, 6);
    FP4T_MERGE(2, 7);
    FP4T_MERGE(3, 4);
    FP4T_MERGE(3, 5);
    FP4T_MERGE(3, 6);
    FP4T_MERGE(3, 7);
    FP4T_MERGE(4, 5);
    FP4T_MERGE(4, 6);
    FP4T_MERGE(4, 7);
    FP4T_MERGE(5, 6);
    FP4T_MERGE(5, 7);
    FP4T_MERGE(6, 7);
  }
#undef FP4T_MERGE
}

// kCount elements, one by one or as a vector.
template <class T, int kCount>
__device__ __forceinline__ void load_some(const T* p, float (&out)[kCount]) {
  static_assert(kCount == 1 || kCount == kVector);
  if constexpr (kCount == 1) {
    out[0] = to_f32(p[0]);
  } else {
    load_vector(p, out);
  }
}
template <class T, int kCount>
__device__ __forceinline__ void store_some(const float (&in)[kCount], T* p) {
  static_assert(kCount == 1 || kCount == kVector);
  if constexpr (kCount == 1) {
    p[0] = from_f32<T>(in[0]);
  } else {
    store_vector(in, p);
  }
}

}  // namespace fp4t::cuda
