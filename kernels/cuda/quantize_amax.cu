// The largest magnitude of every group (or row), after its rotation. A maximum depends on no order, so
// warps meet in atomic maxima of the bits of non-negative floats.
#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/quantize_amax.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kWarpChunk = 4096;  // elements that a warp reads at a time

// Largest magnitude of elements [begin, end) as BF16 bits, of what this lane reads.
__device__ uint32_t scan_run(const uint16_t* x, int64_t begin, int64_t end, bool vectors) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // The whole vectors of the run; what lies before and after is read one by one.
  int64_t from = vectors ? min((begin + 7) / 8 * 8, end) : end;
  const int64_t to = vectors ? max(end / 8 * 8, from) : end;
  uint32_t top = 0;
#pragma unroll 4
  for (int64_t i = from + 8 * lane; i < to; i += 256) {
    const uint4 q = *reinterpret_cast<const uint4*>(x + i);
    top = larger_pair(larger_pair(larger_pair(larger_pair(top, q.x), q.y), q.z), q.w);
  }
  for (int64_t i = begin + lane; i < from; i += 32) top = larger_pair(top, x[i]);
  for (int64_t i = to + lane; i < end; i += 32) top = larger_pair(top, x[i]);
  return max(top & 0x7FFFu, top >> 16 & 0x7FFFu);
}

// Without a rotation a group is a contiguous run of x, read from end to end.
__global__ void __launch_bounds__(kQuantThreads) scan_groups(QuantJob job, bool vectors) {
  const int64_t warp = (int64_t{blockIdx.x} * kQuantThreads + threadIdx.x) / 32;
  const int64_t warps = int64_t{gridDim.x} * kQuantThreads / 32;
  const QuantSpan last = job.spans[job.groups - 1];
  const int64_t first = job.spans[0].begin * job.cols, end = (last.begin + last.count) * job.cols;
  for (int64_t chunk = first / kWarpChunk + warp; chunk * kWarpChunk < end; chunk += warps) {
    int64_t at = max(chunk * kWarpChunk, first);
    const int64_t chunk_end = min((chunk + 1) * kWarpChunk, end);
    int32_t low = 0, high = job.groups;  // the last group that begins at or before `at`
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (job.spans[middle].begin * job.cols <= at ? low : high) = middle;
    }
    for (int32_t g = low; at < chunk_end && g < job.groups; ++g) {
      const int64_t group_end = (job.spans[g].begin + job.spans[g].count) * job.cols;
      const int64_t run_end = min(chunk_end, group_end);
      if (run_end <= at) continue;
      const uint32_t top = scan_run(job.x, at, run_end, vectors);
      raise_amax(job.amax + g, top << 16);
      at = run_end;
    }
  }
}

template <bool kColumn>
__global__ void __launch_bounds__(kQuantThreads) scan_tiles(QuantJob job) {
  __shared__ ColumnTile staged;
  const bool row_scope = job.spec.scale_scope == ScaleScope::kRow;
  int row, block;
  place_of_thread(false, row, block);
  float top = 0.0f;
  int32_t group = -1;
  const auto flush = [&] {
    raise_amax(job.amax + max(group, 0), group >= 0 ? bits_of(finish_amax(job.spec, top)) : 0u);
    top = 0.0f;
  };
  for (TileWalk walk(job); walk.valid(); walk.next(job)) {
    const QuantTile& t = walk.t;
    if (!row_scope && t.group != group) {
      flush();
      group = t.group;
    }
    if constexpr (kColumn) {
      __syncthreads();
      load_column_tile(job, t, staged);
      __syncthreads();
    }
#pragma unroll
    for (int pass = 0; pass < kTilePasses; ++pass) {
      const int r = row + 32 * pass;
      uint32_t word[8];
      float v[kQuantBlock];
      if constexpr (kColumn) {
        fetch_column(staged, r, block, word);
      } else {
        fetch_row(job, t, r, block, word);
      }
      widen(word, v);
      if (job.spec.hadamard != 0) rotate_lanes(job.signs, job.spec.hadamard, block, v);
      const float mine = block_max(v);
      if (!row_scope) {
        top = fmaxf(top, mine);
        continue;
      }
      float of_row = mine;
      for (int step = 1; step < 8; step *= 2)
        of_row = fmaxf(of_row, __shfl_xor_sync(0xFFFFFFFFu, of_row, step));
      if (block == 0 && t.row0 + r < t.rows) {
        raise_one(job.amax + t.begin + t.row0 + r, bits_of(finish_amax(job.spec, of_row)));
      }
    }
  }
  if (!row_scope) flush();
}

}  // namespace

void launch_amax(Queue& queue, const QuantJob& job) {
  const Context& c = context_of(queue);
  if (job.spec.hadamard == 0 && job.spec.scale_scope == ScaleScope::kTensor) {
    const bool vectors = reinterpret_cast<uintptr_t>(job.x) % 16 == 0;
    scan_groups<<<static_cast<unsigned>(c.sm_count * 8), kQuantThreads, 0, c.stream>>>(job, vectors);
  } else if (job.column) {
    scan_tiles<true><<<tile_grid(c), kQuantThreads, 0, c.stream>>>(job);
  } else {
    scan_tiles<false><<<tile_grid(c), kQuantThreads, 0, c.stream>>>(job);
  }
  check_launch(Quantize::kName);
}

}  // namespace fp4t::cuda
