// A stable counting sort of rows by keys, of which a row may have several, all different.
// A block takes 32 rows, so that "which of my rows have key k" is one word: its population count is the
// block's count, and the bits below a row's own are its place among the block's. Three launches: those words,
// a prefix sum over the blocks of each key, the places.
#pragma once

#include "kernels/cuda/context.h"
#include "kernels/cuda/scan.cuh"

namespace fp4t::cuda {

constexpr int kSortThreads = 256;
constexpr int kSortRows = 32;
constexpr int kScanScratch = 32;

struct SortSpace {
  uint32_t* masks;  // [keys][blocks]
  int32_t* bases;   // [keys][blocks], the key's rows in earlier blocks
  int32_t* counts;  // [keys]
  int keys;
  int64_t blocks;
};

// offsets[k], in shared memory: count(k') of all keys before k. Returns the sum of all; ends with a barrier.
template <class Count>
__device__ int key_offsets(int keys, const Count& count, int32_t* offsets, int* scratch) {
  int carry = 0;
  for (int first = 0; first < keys; first += static_cast<int>(blockDim.x)) {
    const int k = first + static_cast<int>(threadIdx.x);
    int total = 0;
    const int before = block_exclusive_sum(k < keys ? count(k) : 0, scratch, total);
    if (k < keys) offsets[k] = carry + before;
    carry += total;
  }
  __syncthreads();
  return carry;
}

namespace {

// One block a key.
__global__ void __launch_bounds__(kSortThreads) count_key_before(SortSpace s) {
  __shared__ int scratch[kScanScratch];
  const uint32_t* masks = s.masks + blockIdx.x * s.blocks;
  int32_t* bases = s.bases + blockIdx.x * s.blocks;
  int carry = 0;
  for (int64_t first = 0; first < s.blocks; first += kSortThreads) {
    const int64_t b = first + threadIdx.x;
    int total = 0;
    const int before = block_exclusive_sum(b < s.blocks ? __popc(masks[b]) : 0, scratch, total);
    if (b < s.blocks) bases[b] = carry + before;
    carry += total;
  }
  if (threadIdx.x == 0) s.counts[blockIdx.x] = carry;
}

// The second launch.
inline void count_before(const Context& c, const char* op, const SortSpace& s) {
  count_key_before<<<static_cast<unsigned>(s.keys), kSortThreads, 0, c.stream>>>(s);
  check_launch(op);
}

}  // namespace

}  // namespace fp4t::cuda
