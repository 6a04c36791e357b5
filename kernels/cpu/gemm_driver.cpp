#include "kernels/cpu/gemm_driver.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels/base/check.h"
#include "kernels/base/numeric.h"
#include "kernels/cpu/gemm_tile.h"

namespace fp4t::cpu {

namespace {

// A block of A, [kBlockRows, kMaxDepth], stays in a 512 KiB second-level cache beside a panel of B and
// the outputs in flight.
constexpr int64_t kBlockRows = 96;
constexpr int64_t kBlockCols = 1024;
// Rows of A are not a power of two apart, or all of them would share few sets of the cache.
constexpr int64_t kRowStride = kMaxDepth + 16;
// Floats of packed B that are held at once: 64 MiB.
constexpr int64_t kMaxPacked = int64_t{1} << 24;
// Enough tasks to keep threads even, none smaller than what waking a thread costs (in products).
constexpr int64_t kWantedTasks = 16;
constexpr int64_t kMinTaskWork = 300'000;
constexpr int64_t kMinPackFloats = 32'768;
// Every block of columns reads A anew; with this many, that costs less than a tenth of the products.
constexpr int64_t kMinBlockCols = 64;

// Memory that grows and is kept: one each thread, so calls allocate nothing once warm.
class Scratch {
 public:
  float* floats(int64_t count) {
    if (count > capacity_) {
      capacity_ = align_up(count, 1024);
      memory_.reset(
          static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(capacity_) * sizeof(float))));
      FP4T_CHECK(memory_ != nullptr, "no memory for ", capacity_, " floats");
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float[], Free> memory_;
  int64_t capacity_ = 0;
};

// Columns [col0, col0 + cols) of a problem's output, all rows, cut into row blocks.
struct Block {
  const GemmProblem* problem;
  int64_t col0, cols;
  int64_t row_step;
  int64_t first_panel;  // in the wave's packed panels; -1: its only task packs for itself
  int64_t packed;       // offset of the first panel in floats
};

struct Task {
  int32_t block;
  int64_t row0, rows;
};

// One pass over memory: blocks whose packed B fits kMaxPacked.
struct Wave {
  std::vector<Block> blocks;
  std::vector<int32_t> shared;  // blocks whose B is packed for all
  std::vector<Task> tasks;
  int64_t num_panels = 0;
  int64_t packed_floats = 0;
  int64_t max_depth = 0;
  int64_t work = 0;
  Scratch packed;

  void clear() {
    blocks.clear();
    shared.clear();
    tasks.clear();
    num_panels = packed_floats = max_depth = work = 0;
  }
};

// The depths of a contraction are cut into equal slices, multiples of 32 for the codes' sake.
int64_t depth_step(int64_t depth) { return align_up(ceil_div(depth, ceil_div(depth, kMaxDepth)), 32); }

// Packing one element of B costs about as much as multiplying it with this many rows.
int64_t work_of(int64_t rows, int64_t cols, int64_t depth) { return (rows + 8) * cols * depth; }

int64_t block_cols(const GemmProblem& p, int64_t num_problems) {
  const int64_t row_blocks = ceil_div(p.rows, kBlockRows);
  const int64_t wanted = std::min(ceil_div(kWantedTasks, num_problems),
                                  std::max<int64_t>(1, work_of(p.rows, p.cols, p.depth) / kMinTaskWork));
  const int64_t col_blocks = std::max(ceil_div(p.cols, kBlockCols), ceil_div(wanted, row_blocks));
  return std::max(kMinBlockCols, align_up(ceil_div(p.cols, col_blocks), kTileCols));
}

void add_block(Wave& wave, const GemmProblem& p, int64_t col0, int64_t cols) {
  const int64_t row_blocks = ceil_div(p.rows, kBlockRows);
  Block block{&p, col0, cols, align_up(ceil_div(p.rows, row_blocks), kTileRows), -1, 0};
  const int32_t index = static_cast<int32_t>(wave.blocks.size());
  if (row_blocks > 1) {
    const int64_t panels = ceil_div(cols, kTileCols);
    block.first_panel = wave.num_panels;
    block.packed = wave.packed_floats;
    wave.num_panels += panels;
    wave.packed_floats += panels * kTileCols * p.depth;
    wave.max_depth = std::max(wave.max_depth, p.depth);
    wave.shared.push_back(index);
  }
  for (int64_t r = 0; r < p.rows; r += block.row_step) {
    wave.tasks.push_back({index, r, std::min(block.row_step, p.rows - r)});
  }
  wave.work += work_of(p.rows, cols, p.depth);
  wave.blocks.push_back(block);
}

void pack_panels(const Wave& wave, float* packed, int64_t begin, int64_t end) {
  auto it = std::upper_bound(wave.shared.begin(), wave.shared.end(), begin, [&](int64_t panel, int32_t b) {
    return panel < wave.blocks[static_cast<size_t>(b)].first_panel;
  });
  --it;
  for (int64_t panel = begin; panel < end; ++panel) {
    const Block* block = &wave.blocks[static_cast<size_t>(*it)];
    if (panel - block->first_panel >= ceil_div(block->cols, kTileCols)) {
      block = &wave.blocks[static_cast<size_t>(*++it)];
    }
    const GemmProblem& p = *block->problem;
    const int64_t offset = (panel - block->first_panel) * kTileCols;
    float* dst = packed + block->packed + offset * p.depth;
    const int64_t cols = std::min<int64_t>(kTileCols, block->cols - offset);
    const int64_t step = depth_step(p.depth);
    for (int64_t k = 0; k < p.depth; k += step) {
      load_panel(p.b, block->col0 + offset, cols, k, std::min(step, p.depth - k), dst + k * kTileCols);
    }
  }
}

// First row of tile t of `tiles`: full tiles and a rest, or, where that makes every tile five or six rows
// high, even ones: four rows and fewer leave an fma unit waiting for its own results.
int64_t tile_begin(int64_t rows, int64_t tiles, int64_t t) {
  if (rows < (kTileRows - 1) * tiles) return std::min(rows, t * kTileRows);
  return t * (rows / tiles) + std::min(t, rows % tiles);
}

// Per-thread buffers of one task.
struct TaskScratch {
  Scratch rows, panel, partial;
};

void run_task(const Block& block, const Task& task, const float* packed) {
  static constexpr auto kKernels = tile_kernels<NativeLanes>();
  thread_local TaskScratch scratch;
  const GemmProblem& p = *block.problem;
  const int64_t step = depth_step(p.depth);
  const int64_t row_tiles = ceil_div(task.rows, kTileRows);
  const bool sliced = step < p.depth;
  float* rows = scratch.rows.floats(kBlockRows * kRowStride);
  float* own_panel = scratch.panel.floats(kMaxDepth * kTileCols);
  // Partial sums wait here between slices: tile after tile, panel after panel.
  constexpr int64_t kTileFloats = kTileRows * kTileCols;
  float* partial =
      sliced ? scratch.partial.floats(ceil_div(block.cols, kTileCols) * row_tiles * kTileFloats) : nullptr;
  alignas(64) float tile[kTileFloats];

  for (int64_t k = 0; k < p.depth; k += step) {
    const int64_t depth = std::min(step, p.depth - k);
    const bool last = k + depth == p.depth;
    load_rows(p.a, task.row0, task.rows, k, depth, rows, kRowStride);
    for (int64_t c = 0; c < block.cols; c += kTileCols) {
      const int64_t cols = std::min<int64_t>(kTileCols, block.cols - c);
      const float* panel = own_panel;
      if (block.first_panel >= 0) {
        panel = packed + block.packed + c * p.depth + k * kTileCols;
      } else {
        load_panel(p.b, block.col0 + c, cols, k, depth, own_panel);
      }
      for (int64_t t = 0; t < row_tiles; ++t) {
        const int64_t r = tile_begin(task.rows, row_tiles, t);
        const int64_t num_rows = tile_begin(task.rows, row_tiles, t + 1) - r;
        float* acc = sliced ? partial + (c / kTileCols * row_tiles + t) * kTileFloats : tile;
        kKernels[static_cast<size_t>(num_rows - 1)](depth, rows + r * kRowStride, kRowStride, panel, acc,
                                                    k == 0);
        if (last) store_tile(acc, p.scales, p.out, task.row0 + r, num_rows, block.col0 + c, cols);
      }
    }
  }
}

void run_wave(Queue& queue, Wave& wave) {
  if (wave.tasks.empty()) return;
  float* packed = wave.packed.floats(std::max<int64_t>(wave.packed_floats, 1));
  if (wave.num_panels > 0) {
    const int64_t chunk = std::max<int64_t>(1, kMinPackFloats / (wave.max_depth * kTileCols));
    parallel_for(queue, wave.num_panels, chunk,
                 [&](int64_t begin, int64_t end) { pack_panels(wave, packed, begin, end); });
  }
  const int64_t num_tasks = static_cast<int64_t>(wave.tasks.size());
  const int64_t chunk = wave.work < 2 * kMinTaskWork ? num_tasks : 1;
  parallel_for(queue, num_tasks, chunk, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Task& task = wave.tasks[static_cast<size_t>(t)];
      run_task(wave.blocks[static_cast<size_t>(task.block)], task, packed);
    }
  });
  wave.clear();
}

void zero_output(const GemmProblem& p) {
  if (p.out.accumulate) return;
  const int64_t size = dtype_bytes(p.out.dtype);
  for (int64_t r = 0; r < p.rows; ++r) {
    std::memset(static_cast<char*>(p.out.data) + r * p.out.stride * size, 0,
                static_cast<size_t>(p.cols * size));
  }
}

}  // namespace

void multiply(Queue& queue, const std::vector<GemmProblem>& problems) {
  thread_local Wave wave;
  wave.clear();
  const int64_t num_problems = static_cast<int64_t>(problems.size());
  for (const GemmProblem& p : problems) {
    if (p.rows == 0 || p.cols == 0) continue;
    if (p.depth == 0) {
      zero_output(p);
      continue;
    }
    const int64_t step = block_cols(p, num_problems);
    for (int64_t c = 0; c < p.cols; c += step) {
      const int64_t cols = std::min(step, p.cols - c);
      if (wave.packed_floats + align_up(cols, kTileCols) * p.depth > kMaxPacked) run_wave(queue, wave);
      add_block(wave, p, c, cols);
    }
  }
  run_wave(queue, wave);
}

}  // namespace fp4t::cpu
