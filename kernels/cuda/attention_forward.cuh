// What the attention kernels of a row's keys share: the walk over its splits.
#pragma once

#include "kernels/cuda/attention_tile.cuh"

namespace fp4t::cuda {

// A thread's rows over the splits so far. The sum of the earlier splits lies in shared memory, element i of a
// thread at [i][kThreads], so that no two threads meet.
template <int kD, int kThreads>
struct SplitSum {
  float* shared;  // [kD / 2][kThreads], from this thread's element on
  float m[2], l[2];
  bool any;

  // Takes the split that ends here: its O, and its state with l in parts. Leaves O empty.
  __device__ __forceinline__ void add(float c, Fragment<kD>& o, SoftmaxState& state) {
    join(c, o, state);
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) shared[(4 * j + i) * kThreads] = o[j][i];
    }
    any = true;
    clear<kD>(o);
    state.clear();
  }

  // As add, but the whole sum is left in `o`.
  __device__ __forceinline__ void join(float c, Fragment<kD>& o, const SoftmaxState& state) {
    if (!any) {
#pragma unroll
      for (int h = 0; h < 2; ++h) m[h] = state.m[h], l[h] = row_sum(state.l[h]);
      return;
    }
    const Merge merge[2] = {Merge(c, state.m[0], row_sum(state.l[0]), m[0], l[0]),
                            Merge(c, state.m[1], row_sum(state.l[1]), m[1], l[1])};
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[j][i] = merge[i / 2](shared[(4 * j + i) * kThreads], o[j][i]);
    }
  }
};

// One thread's part of columns [first, first + kN) of a row of the result, from O / l.
template <int kN>
__device__ __forceinline__ void store_row(const Fragment<kN>& o, int h, float l, int columns, Bf16* row,
                                          int first = 0) {
  const float inverse = 1.0f / l;
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    if (first + 8 * j < columns) {
      *reinterpret_cast<uint32_t*>(row + first + 8 * j + lane * 2) =
          pack_bf16(o[j][2 * h] * inverse, o[j][2 * h + 1] * inverse);
    }
  }
}

}  // namespace fp4t::cuda
