// What the kernels of Quantize share: the operand as groups cut into tiles, and how a thread gets its 16
// values. Every pass walks the same tiles; a tile is up to 64 outer rows by 128 contraction elements, and a
// thread owns one block of 16 elements of one row, twice.
#pragma once

#include <cstdint>

#include "kernels/base/philox.h"
#include "kernels/cuda/context.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/quant.h"
#include "kernels/ops/quantize.h"

namespace fp4t::cuda {

inline constexpr int kQuantThreads = 256;
inline constexpr int kQuantBlock = 16;
inline constexpr int kTileRows = 64;    // outer rows; 128 bytes of x where they are its columns
inline constexpr int kTileDepth = 128;  // contraction elements: the longest rotation group
inline constexpr int kTilePasses = kTileRows * kTileDepth / kQuantBlock / kQuantThreads;

// One group: where it lies along the grouped axis, in x and in storage, and the first of its tiles. An
// array of groups + 1; the last holds the ends.
struct QuantSpan {
  int64_t begin, count, stored_begin, first_tile;
};

// Integer counts, in the order of QuantStat without the sizes and energies.
enum QuantCount : int {
  kCountNonFinite,
  kCountFlushed,
  kCountClipped,
  kCountChoseFour,
  kCountInexact,
  kNumQuantCounts,
};

// Of a tile: of the error, of the signal, and error times signal.
inline constexpr int kNumEnergies = 3;

// How blocks are coded. Of the keys, those that change a kernel's registers or shared memory.
enum class Coder : uint8_t { kMxfp8, kPlain, kFourOverSix, kTile, kMsEden };

// The keys of Philox's ten rounds, which are the same for every draw of a site.
struct RoundKeys {
  uint32_t lo[10], hi[10];
};

// One Quantize as its kernels see it; for Dequantize the fields that say where things lie.
struct QuantJob {
  const uint16_t* x;
  int64_t cols;                           // extent of the axis that is not cut into groups
  int64_t width;                          // stored elements for one element of the grouped axis
  int64_t padded_cols;                    // stored length of a row (row orientation)
  int32_t groups, outer, depth_multiple;  // paddings: outer rows, contraction
  bool column;                            // the groups cut the contraction
  bool vectors;                           // x may be read 16 bytes at a time
  bool wide_codes;                        // codes may be written a block at a time
  QuantSpec spec;
  RoundKeys draw_keys;
  int64_t first_expert;
  HadamardSigns signs;
  const float* input_scale;  // or null
  uint8_t* codes;
  uint8_t* block_scales;
  float* tensor_scale;  // or null
  QuantSpan* spans;
  uint32_t* amax;              // bits, one a group or one a row of x
  unsigned long long* counts;  // kNumQuantCounts, or null
  double* energies;            // kNumEnergies a tile, or null
};

// A tile: its group's matrix, and its place in it. Extents fit 32 bits (the host sees to it), products do
// not.
struct QuantTile {
  int32_t group;
  bool first;                   // of its group
  int32_t rows, cols;           // logical
  int32_t padded_rows, length;  // stored
  int32_t row0, k0;
  int64_t begin;            // first row of x of the group
  int64_t elements_before;  // in storage
};

template <class T>
__host__ __device__ constexpr T padded_to(T n, T multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Sizes of a group's matrix from its extent along the grouped axis.
__device__ inline void size_region(const QuantJob& job, int64_t count, QuantTile& t) {
  t.rows = static_cast<int32_t>(job.column ? job.cols : count);
  t.cols = static_cast<int32_t>(job.column ? count : job.cols);
  t.padded_rows = padded_to(t.rows, job.outer);
  t.length = job.column ? padded_to(t.cols, job.depth_multiple) : static_cast<int32_t>(job.padded_cols);
}

__device__ inline uint32_t row_tiles(const QuantTile& t) {
  return static_cast<uint32_t>(t.padded_rows + kTileRows - 1) / kTileRows;
}
__device__ inline uint32_t k_tiles(const QuantTile& t) {
  return static_cast<uint32_t>(t.length + kTileDepth - 1) / kTileDepth;
}

// The tiles of one block of threads: runs of up to kLongestRun, every gridDim.x-th of them, group after
// group. Within a group tiles follow the rows of x, so that those under way at one time read whole stretches
// of it. Divisions are made once a group; from tile to tile there are carries only.
struct TileWalk {
  static constexpr uint32_t kLongestRun = 8;
  static constexpr uint32_t kEnoughRuns = 8;  // of a block of threads, so that none has much more than others

  QuantTile t;
  uint32_t tile, tiles, group_end;
  uint32_t run, in_run;
  uint32_t minor_tiles, minor, major, minor_jump, major_jump;

  __device__ explicit TileWalk(const QuantJob& job)
      : tiles(static_cast<uint32_t>(job.spans[job.groups].first_tile)), in_run(0) {
    run = min(max(tiles / (gridDim.x * kEnoughRuns), 1u), kLongestRun);
    tile = blockIdx.x * run;
    t.group = 0;
    if (valid()) enter(job);
  }
  __device__ bool valid() const { return tile < tiles; }
  __device__ void next(const QuantJob& job) {
    const bool within = ++in_run < run;
    if (!within) in_run = 0;
    tile += within ? 1 : jump();
    if (!valid()) return;
    if (tile >= group_end) {
      enter(job);
      return;
    }
    minor += within ? 1 : minor_jump;
    major += within ? 0 : major_jump;
    if (minor >= minor_tiles) minor -= minor_tiles, ++major;
    place(job);
  }

 private:
  // From the last tile of a run to the first of the next.
  __device__ uint32_t jump() const { return (gridDim.x - 1) * run + 1; }
  __device__ void enter(const QuantJob& job) {
    int32_t low = t.group, high = job.groups;  // the last group that begins at or before the tile
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (job.spans[middle].first_tile <= tile ? low : high) = middle;
    }
    const QuantSpan span = job.spans[low];
    t.group = low;
    t.begin = span.begin;
    t.elements_before = span.stored_begin * job.width;
    size_region(job, span.count, t);
    group_end = static_cast<uint32_t>(job.spans[low + 1].first_tile);
    minor_tiles = job.column ? row_tiles(t) : k_tiles(t);
    const uint32_t index = tile - static_cast<uint32_t>(span.first_tile);
    major = index / minor_tiles, minor = index % minor_tiles;
    major_jump = jump() / minor_tiles, minor_jump = jump() % minor_tiles;
    place(job);
  }
  __device__ void place(const QuantJob& job) {
    t.first = (major | minor) == 0;
    t.row0 = static_cast<int32_t>(job.column ? minor : major) * kTileRows;
    t.k0 = static_cast<int32_t>(job.column ? major : minor) * kTileDepth;
  }
};

// A column tile in shared memory: row r of the tile (a column of x) as 64 words of two elements, in
// chunks of four words that are permuted by r / 8, which keeps both sides free of bank conflicts.
struct alignas(16) ColumnTile {
  uint32_t word[kTileRows * kTileDepth / 2];
};

__device__ inline int column_chunk(int row, int chunk) { return chunk ^ (row / 8 % 8); }

// Eight columns of one row of x, zero beyond the matrix.
__device__ inline uint4 load_eight(const QuantJob& job, const QuantTile& t, int32_t k, int32_t row) {
  if (k >= t.cols) return make_uint4(0, 0, 0, 0);
  const uint16_t* p = job.x + (t.begin + k) * job.cols + row;
  if (job.vectors && row + 8 <= t.rows) return *reinterpret_cast<const uint4*>(p);
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = row + 2 * i < t.rows ? p[2 * i] : 0u;
    const uint32_t high = row + 2 * i + 1 < t.rows ? p[2 * i + 1] : 0u;
    word[i] = low | high << 16;
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// All threads of the block; the caller puts barriers around it.
__device__ inline void load_column_tile(const QuantJob& job, const QuantTile& t, ColumnTile& tile) {
  const int eighth = static_cast<int>(threadIdx.x) % 8, pair = static_cast<int>(threadIdx.x) / 8;
  uint4 a[2], b[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int32_t k = t.k0 + 2 * (pair + 32 * j), row = t.row0 + 8 * eighth;
    a[j] = load_eight(job, t, k, row);
    b[j] = load_eight(job, t, k + 1, row);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t even[4] = {a[j].x, a[j].y, a[j].z, a[j].w}, odd[4] = {b[j].x, b[j].y, b[j].z, b[j].w};
    const int chunk = (pair + 32 * j) / 4, within = pair % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 8 * eighth + i;
      const uint32_t word = __byte_perm(even[i / 2], odd[i / 2], i % 2 ? 0x7632 : 0x5410);
      tile.word[row * (kTileDepth / 2) + column_chunk(row, chunk) * 4 + within] = word;
    }
  }
}

// Block `block` of row `row` of the tile as eight words of two elements.
__device__ inline void fetch_column(const ColumnTile& tile, int row, int block, uint32_t (&word)[8]) {
  const uint4* p = reinterpret_cast<const uint4*>(tile.word + row * (kTileDepth / 2));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint4 q = p[column_chunk(row, 2 * block + h)];
    word[4 * h] = q.x, word[4 * h + 1] = q.y, word[4 * h + 2] = q.z, word[4 * h + 3] = q.w;
  }
}

// The same of a tile whose rows are rows of x, from memory.
__device__ inline void fetch_row(const QuantJob& job, const QuantTile& t, int row, int block,
                                 uint32_t (&word)[8]) {
  const int32_t r = t.row0 + row, k = t.k0 + kQuantBlock * block;
  const uint16_t* p = job.x + (t.begin + r) * job.cols + k;
  if (r < t.rows && k + kQuantBlock <= t.cols && job.vectors) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 q = reinterpret_cast<const uint4*>(p)[h];
      word[4 * h] = q.x, word[4 * h + 1] = q.y, word[4 * h + 2] = q.z, word[4 * h + 3] = q.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t low = r < t.rows && k + 2 * i < t.cols ? p[2 * i] : 0u;
    const uint32_t high = r < t.rows && k + 2 * i + 1 < t.cols ? p[2 * i + 1] : 0u;
    word[i] = low | high << 16;
  }
}

__device__ inline void widen(const uint32_t (&word)[8], float (&v)[kQuantBlock]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[2 * i] = float_of(word[i] << 16);
    v[2 * i + 1] = float_of(word[i] & 0xFFFF0000u);
  }
}

// A thread's row (within 32) and block of a pass. Rotation groups lie side by side in lanes; the 16 rows of
// a 16x16 tile do.
__device__ inline void place_of_thread(bool square, int& row, int& block) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  row = square ? lane % 16 + 16 * (warp / 4) : warp * 4 + lane / 8;
  block = square ? lane / 16 + 2 * (warp % 4) : lane % 8;
}

// Rotation of 16 values in one thread, without its factor of a quarter; or its first stages.
template <int kEnd = kQuantBlock>
__device__ __forceinline__ void rotate_16(float (&v)[kQuantBlock]) {
#pragma unroll
  for (int h = 1; h < kEnd; h *= 2) {
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) {
      if (i & h) continue;
      const float a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
  }
}

// Signs and butterflies of rotations of d elements, 16 of them in each of d / 16 neighbouring lanes, in
// the order of kernels/formats/hadamard.h; the factor 1 / sqrt(d) is left to the caller. All lanes of the
// warp call it.
__device__ inline void rotate_lanes(const HadamardSigns& signs, int d, int block, float (&v)[kQuantBlock]) {
  const int in_group = block % (d / kQuantBlock);
  const int w = in_group / 2;
  const uint32_t pair = w == 0   ? signs.word[0]
                        : w == 1 ? signs.word[1]
                        : w == 2 ? signs.word[2]
                                 : signs.word[3];
  const uint32_t mine = in_group % 2 ? pair >> 16 : pair;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) v[i] = float_of(bits_of(v[i]) ^ (mine >> i << 31));
  rotate_16(v);
  for (int lanes = 1; lanes * kQuantBlock < d; lanes *= 2) {
    const bool upper = (in_group & lanes) != 0;
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], lanes);
      v[i] = upper ? other - v[i] : v[i] + other;
    }
  }
}

__device__ inline float block_max(const float (&v)[kQuantBlock]) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) top = fmaxf(top, fabsf(v[i]));  // fmaxf leaves NaN out
  return top;
}

// Grid of the kernels that walk tiles: a function of the device alone.
inline unsigned tile_grid(const Context& c) { return static_cast<unsigned>(c.sm_count * 4); }

// Fills job.spans (and clears amax and counts, where the job has them) from the bounds of the groups along
// an axis of `total` elements; null: equal groups.
void launch_layout(Queue& queue, const char* op, const QuantJob& job, const int32_t* offsets, int64_t total);
void launch_amax(Queue& queue, const QuantJob& job);
// Whether the short kernel for rows takes `job`: rule amax in 1x16 blocks, one scale a group, no rotation,
// aligned memory. A pure function of the job.
bool takes_rows(const QuantJob& job, Coder coder);
void launch_rows(Queue& queue, const QuantJob& job);
void launch_encode_row(Queue& queue, const QuantJob& job, Coder coder);
void launch_encode_column(Queue& queue, const QuantJob& job, Coder coder);
void launch_stats(Queue& queue, const QuantJob& job, double* stats);

}  // namespace fp4t::cuda
