// The small kernels around a Quantize, of one block each: the layout of its groups before, its statistics
// after.
#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/quantize.cuh"
#include "kernels/cuda/reduce.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kGroupThreads = 1024;

// Inclusive sums over the block, in place of x; `scratch` holds kGroupThreads values.
__device__ int64_t block_prefix(int64_t x, int64_t* scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  scratch[thread] = x;
  for (int step = 1; step < kGroupThreads; step *= 2) {
    __syncthreads();
    const int64_t before = thread >= step ? scratch[thread - step] : 0;
    __syncthreads();
    scratch[thread] += before;
  }
  __syncthreads();
  return scratch[thread];
}

// Bounds of group g; what does not fit the matrix is reported and counts as empty.
__device__ void bounds_of(const int32_t* offsets, int64_t total, int32_t groups, int32_t g,
                          const FaultSink& sink, int64_t& begin, int64_t& count) {
  const int64_t equal = total / groups;
  begin = offsets ? offsets[g] : g * equal;
  const int64_t end = offsets ? offsets[g + 1] : begin + equal;
  count = end - begin;
  if (begin >= 0 && count >= 0 && end <= total) return;
  report(sink, FaultKind::kIndex, g, static_cast<int32_t>(end));
  begin = count = 0;
}

__global__ void __launch_bounds__(kGroupThreads)
    lay_out(QuantJob job, const int32_t* offsets, int64_t total, FaultSink sink) {
  __shared__ int64_t scratch[kGroupThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const bool row_scope = job.spec.scale_scope == ScaleScope::kRow;
  if (job.amax) {
    for (int64_t i = thread; i < (row_scope ? total : job.groups); i += kGroupThreads) job.amax[i] = 0;
  }
  if (job.counts && thread < kNumQuantCounts) job.counts[thread] = 0;
  int64_t stored = 0, tiles = 0;  // before the groups of this round
  for (int32_t first = 0; first <= job.groups; first += kGroupThreads) {
    const int32_t g = first + thread;
    int64_t begin = total, count = 0, own_tiles = 0, own_stored = 0;
    if (g < job.groups) {
      bounds_of(offsets, total, job.groups, g, sink, begin, count);
      QuantTile t;
      size_region(job, count, t);
      own_tiles = int64_t{row_tiles(t)} * k_tiles(t);
      own_stored = job.column ? t.length : t.padded_rows;
      // Nobody else writes the scales of a group without tiles.
      if (own_tiles == 0 && job.tensor_scale) {
        const float scale = job.input_scale ? job.input_scale[g] : 1.0f;
        for (int64_t r = 0; r < (row_scope ? count : 1); ++r) {
          job.tensor_scale[row_scope ? begin + r : g] = scale;
        }
      }
    }
    const int64_t stored_end = stored + block_prefix(own_stored, scratch);
    const int64_t stored_total = scratch[kGroupThreads - 1];
    __syncthreads();
    const int64_t tiles_end = tiles + block_prefix(own_tiles, scratch);
    const int64_t tiles_total = scratch[kGroupThreads - 1];
    __syncthreads();
    if (g <= job.groups) job.spans[g] = {begin, count, stored_end - own_stored, tiles_end - own_tiles};
    stored += stored_total;
    tiles += tiles_total;
  }
}

// Blocks that hold data; a rotation fills its whole group with it.
__device__ int64_t blocks_of(const QuantJob& job, const QuantTile& t) {
  const int32_t block = job.spec.format == Format::kNvfp4 ? 16 : 32;
  const int32_t filled = job.spec.hadamard != 0 ? padded_to(t.cols, job.spec.hadamard) : t.cols;
  return int64_t{t.padded_rows / job.outer} * (padded_to(filled, block) / block);
}

__global__ void __launch_bounds__(kGroupThreads) add_stats(QuantJob job, double* stats) {
  __shared__ double energy_scratch[33];
  __shared__ int64_t size_scratch[33];
  const int thread = static_cast<int>(threadIdx.x);
  int64_t elements = 0, blocks = 0;
  for (int32_t g = thread; g < job.groups; g += kGroupThreads) {
    QuantTile t;
    size_region(job, job.spans[g].count, t);
    elements += int64_t{t.rows} * t.cols;
    blocks += blocks_of(job, t);
  }
  elements = block_sum(elements, size_scratch);
  blocks = block_sum(blocks, size_scratch);
  double error = 0, signal = 0, error_signal = 0;
  if (job.energies) {
    const int64_t tiles = job.spans[job.groups].first_tile;
    for (int64_t i = thread; i < tiles; i += kGroupThreads) {
      error += job.energies[kNumEnergies * i];
      signal += job.energies[kNumEnergies * i + 1];
      error_signal += job.energies[kNumEnergies * i + 2];
    }
    error = block_sum(error, energy_scratch);
    signal = block_sum(signal, energy_scratch);
    error_signal = block_sum(error_signal, energy_scratch);
  }
  if (thread != 0) return;
  stats[kStatNonFinite] += static_cast<double>(job.counts[kCountNonFinite]);
  stats[kStatElements] += static_cast<double>(elements);
  stats[kStatFlushed] += static_cast<double>(job.counts[kCountFlushed]);
  stats[kStatClipped] += static_cast<double>(job.counts[kCountClipped]);
  stats[kStatBlocks] += static_cast<double>(blocks);
  stats[kStatChoseFour] += static_cast<double>(job.counts[kCountChoseFour]);
  stats[kStatInexact] += static_cast<double>(job.counts[kCountInexact]);
  if (!job.energies) return;
  stats[kStatErrorEnergy] += error;
  stats[kStatSignalEnergy] += signal;
  stats[kStatErrorSignal] += error_signal;
}

}  // namespace

void launch_layout(Queue& queue, const char* op, const QuantJob& job, const int32_t* offsets, int64_t total) {
  lay_out<<<1, kGroupThreads, 0, stream_of(queue)>>>(job, offsets, total, fault_sink(queue, op));
  check_launch(op);
}

void launch_stats(Queue& queue, const QuantJob& job, double* stats) {
  add_stats<<<1, kGroupThreads, 0, stream_of(queue)>>>(job, stats);
  check_launch(Quantize::kName);
}

}  // namespace fp4t::cuda
