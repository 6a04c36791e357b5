// The top-p set of a row and sums in index order over a row, by one block, in integers: no order of
// summation matters, so the set and the drawn token are those of the CPU.
#pragma once

#include "kernels/base/numeric.h"
#include "kernels/cuda/loss_row.cuh"

namespace fp4t::cuda {

inline constexpr int kMassBins = 2048;
// Above every distance whose weight is at least one unit of 2^-30.
inline constexpr float kEmptyDistance = 21.0f;
// Bins of the first round for each unit of distance: a power of two, so that borders are exact.
inline constexpr float kBinsPerUnit = 64.0f;
static_assert(kEmptyDistance * kBinsPerUnit <= kMassBins);

struct MassScratch {
  uint32_t low[kMassBins], high[kMassBins];  // of 64-bit masses: shared memory adds 32 bits in one step
  int64_t warp_mass[kMaxRowWarps];
  int64_t found;  // an index
};

__device__ __forceinline__ void add_mass(MassScratch& scratch, int bin, uint32_t mass) {
  const uint32_t before = atomicAdd(&scratch.low[bin], mass);
  if (before + mass < before) atomicAdd(&scratch.high[bin], 1u);
}
__device__ __forceinline__ int64_t mass_of(const MassScratch& scratch, int bin) {
  return static_cast<int64_t>(uint64_t{scratch.high[bin]} << 32 | scratch.low[bin]);
}

// Orders tokens by falling probability: the bits of the distance from the largest.
__device__ __forceinline__ int32_t distance_key(float x, float largest) {
  return static_cast<int32_t>(bits_of(x - largest) & 0x7FFFFFFFu);
}

// Calls body(value, index) for every `step`-th value; several loads are under way at a time.
template <class Body>
__device__ __forceinline__ void for_each_value(const float* row, int64_t begin, int64_t end, int64_t step,
                                               const Body& body) {
  constexpr int kLoads = 8;
  int64_t i = begin;
  for (; i + (kLoads - 1) * step < end; i += kLoads * step) {
    float x[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) x[j] = row[i + j * step];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) body(x[j], i + j * step);
  }
  for (; i < end; i += step) body(row[i], i);
}

// The first index whose prefix sum of mass(value, index) exceeds threshold(total); masses are not negative
// and threshold(total) < total. Narrows the row to one warp's piece until a thread holds an element.
template <class Mass, class Threshold>
__device__ int64_t locate(const float* row, int64_t vocab, MassScratch& scratch, const Mass& mass,
                          const Threshold& threshold) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  int64_t begin = 0, end = vocab, above = -1;  // -1: the total is not known yet
  while (true) {
    const int64_t piece = align_up(ceil_div(end - begin, warps), 32);
    const int64_t from = begin + warp * piece, to = min(from + piece, end);
    int64_t own = 0;
    for_each_value(row, from + lane, to, 32, [&](float x, int64_t i) { own += mass(x, i); });
    const int64_t total = warp_sum(own);
    if (lane == 0) scratch.warp_mass[warp] = total;
    __syncthreads();
    if (above < 0) {
      int64_t all = 0;
      for (int w = 0; w < warps; ++w) all += scratch.warp_mass[w];
      above = threshold(all);
    }
    int w = 0;
    while (w + 1 < warps && scratch.warp_mass[w] <= above) above -= scratch.warp_mass[w++];
    __syncthreads();
    begin += w * piece;
    end = min(begin + piece, end);
    if (piece > 32) continue;
    if (warp == 0) {
      int64_t prefix = begin + lane < end ? mass(row[begin + lane], begin + lane) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int64_t before = __shfl_up_sync(0xFFFFFFFFu, prefix, step);
        if (lane >= step) prefix += before;
      }
      const unsigned exceed = __ballot_sync(0xFFFFFFFFu, prefix > above);
      if (lane == 0) scratch.found = begin + (exceed ? __ffs(static_cast<int>(exceed)) - 1 : 0);
    }
    __syncthreads();
    const int64_t found = scratch.found;
    __syncthreads();
    return found;
  }
}

// Tokens nearer than `key`, and of those at it the ones up to index `last`.
struct TopP {
  int32_t key;
  int64_t last;
  __device__ bool holds(int32_t of_token, int64_t index) const {
    return of_token < key || (of_token == key && index <= last);
  }
};

// A stretch of keys that holds the border of the set, and how they fall into bins.
struct KeyRange {
  int32_t low, high;  // both inside
  int32_t shift;      // -1: by distance

  __device__ int bin(int32_t key) const {
    if (shift < 0) return static_cast<int>(float_of(static_cast<uint32_t>(key)) * kBinsPerUnit);
    return (key - low) >> shift;
  }
  __device__ KeyRange narrowed(int bin) const {
    KeyRange next{};
    if (shift < 0) {
      next.low = static_cast<int32_t>(bits_of(static_cast<float>(bin) / kBinsPerUnit));
      next.high = static_cast<int32_t>(bits_of(static_cast<float>(bin + 1) / kBinsPerUnit)) - 1;
    } else {
      next.low = low + (bin << shift);
      next.high = min(next.low + ((1 << shift) - 1), high);
    }
    int32_t wide = (next.high - next.low) >> 11;
    while (wide > 0) wide >>= 1, ++next.shift;
    return next;
  }
};

struct BinFound {
  int bin;
  int64_t before, mass;  // of the bins before, of the bin itself
};

// The first bin at which the running mass reaches `needed`, which the first round computes from the total.
__device__ inline BinFound find_bin(MassScratch& scratch, float top_p, int64_t before, int64_t& needed) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32, per_warp = kMassBins / warps;
  int64_t own = 0;
  for (int i = lane; i < per_warp; i += 32) own += mass_of(scratch, warp * per_warp + i);
  own = warp_sum(own);
  if (lane == 0) scratch.warp_mass[warp] = own;
  __syncthreads();
  if (needed < 0) {
    int64_t total = 0;
    for (int w = 0; w < warps; ++w) total += scratch.warp_mass[w];
    const double part = ceil(static_cast<double>(top_p) * static_cast<double>(total));
    needed = max(int64_t{1}, static_cast<int64_t>(part));
  }
  int w = 0;
  while (w + 1 < warps && before + scratch.warp_mass[w] < needed) before += scratch.warp_mass[w++];
  int bin = w * per_warp;
  const int end = bin + per_warp;
  while (bin + 1 < end && before + mass_of(scratch, bin) < needed) before += mass_of(scratch, bin++);
  const BinFound found{bin, before, mass_of(scratch, bin)};
  __syncthreads();
  return found;
}

// The set of a row that has a distribution.
__device__ inline TopP find_top_p(const float* row, int64_t vocab, float temperature, float largest,
                                  float top_p, MassScratch& scratch) {
  KeyRange range{0, static_cast<int32_t>(bits_of(kEmptyDistance)), -1};
  const bool divide = temperature != 1.0f;
  int64_t needed = -1;
  BinFound found{0, 0, 0};
  do {
    for (int i = static_cast<int>(threadIdx.x); i < kMassBins; i += static_cast<int>(blockDim.x)) {
      scratch.low[i] = scratch.high[i] = 0;
    }
    __syncthreads();
    for_each_value(row, int64_t{threadIdx.x}, vocab, int64_t{blockDim.x}, [&](float logit, int64_t) {
      const float x = divide ? logit / temperature : logit;
      const int32_t key = distance_key(x, largest);
      if (key < range.low || key > range.high) return;
      const int32_t mass = fixed_point(weight_of(x, largest));
      if (mass > 0) add_mass(scratch, range.bin(key), static_cast<uint32_t>(mass));
    });
    __syncthreads();
    found = find_bin(scratch, top_p, found.before, needed);
    range = range.narrowed(found.bin);
  } while (range.low < range.high);
  // Of the equally probable tokens at the border, the lower indices until the mass is reached.
  const int32_t key = range.low;
  const int64_t each = fixed_point(weight_of(-float_of(static_cast<uint32_t>(key)), 0.0f));
  const int64_t inside = ceil_div(needed - found.before, each);
  if (inside * each >= found.mass) return {key, vocab};
  const int64_t last = locate(
      row, vocab, scratch,
      [&](float x, int64_t) { return int64_t{distance_key(x / temperature, largest) == key ? 1 : 0}; },
      [&](int64_t) { return inside - 1; });
  return {key, last};
}

// Totals over the set of a row that has a distribution, and over its target (-1: none) in any case.
template <bool kVector, bool kMoment>
__device__ __forceinline__ RowTotals set_totals(const float* row, const RowLayout& layout, float temperature,
                                                float max, const TopP& set, int64_t target,
                                                RowScratch& scratch) {
  const Scale scale(temperature);
  const float largest = max / temperature;
  RunningTotals<kMoment> running{scale};
  running.max = max;
  for_quads<kVector, kSummedQuads>(row, layout, [&](const auto& x, int64_t at) {
    constexpr int kCount = sizeof(x) / sizeof(float);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int64_t i = at + j / 4 * quad_width<kVector>() + j % 4 * layout.step;
      if (!set.holds(distance_key(x[j] / temperature, largest), i) && i != target) continue;
      const float distance = scale.distance(x[j], max), weight = scale.weight(distance);
      running.sum[j % 4] += weight;
      if constexpr (kMoment) running.moment[j % 4] += weight * distance;
    }
  });
  return block_merge<kMoment>(running.totals(), scale, scratch);
}

}  // namespace fp4t::cuda
