// 16x16 blocks to nearest: the codes of the transpose are those of the matrix, turned. A block lies in 16
// lanes, a row each; what is coded meets in shared memory and leaves in whole sectors, once by rows, once by
// columns.
#include "kernels/base/numeric.h"
#include "kernels/cuda/quantize_encode.cuh"
#include "kernels/cuda/quantize_squares.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kRowBlocks = kTileRows / kQuantBlock, kColumnBlocks = kTileDepth / kQuantBlock;

// Codes of a tile on their way out, by rows and by columns of x, a block's share a word pair. Eight-byte
// words are permuted so that 16 lanes side by side meet 16 places of a line.
struct SquareShared {
  alignas(16) uint2 rows[kTileRows][kColumnBlocks];
  alignas(16) uint2 columns[kTileDepth][kRowBlocks];
  uint8_t scales[kRowBlocks][kColumnBlocks];
  FactorTable table;

  __device__ uint2& in_row(int row, int block) { return rows[row][block ^ (row / 2 % kColumnBlocks)]; }
  __device__ uint2& in_column(int column, int block) {
    return columns[column][block ^ (column / 4 % kRowBlocks)];
  }
};

// Turns 16 rows of 16 nibbles, a row a lane, into columns: in four steps every lane gives half of what it has
// to its partner.
__device__ __forceinline__ uint2 turn_codes(uint2 row) {
  const unsigned lane = threadIdx.x % kQuantBlock;
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const bool b3 = (lane & 8) != 0, b2 = (lane & 4) != 0, b1 = (lane & 2) != 0, b0 = (lane & 1) != 0;
  // Rows eight apart, of eight columns.
  const uint32_t got3 = __shfl_xor_sync(kAll, b3 ? row.x : row.y, 8);
  const uint32_t low = b3 ? got3 : row.x, high = b3 ? row.y : got3;
  // Rows four apart, of four columns: halves of `low`, then of `high`.
  const uint32_t got2 = __shfl_xor_sync(kAll, permute(low, high, b2 ? 0x5410 : 0x7632), 4);
  const uint32_t kept2 = permute(low, high, b2 ? 0x7632 : 0x5410);
  const uint32_t x = b2 ? got2 : kept2, y = b2 ? kept2 : got2;
  // Rows two apart, of two columns.
  const uint32_t got1 = __shfl_xor_sync(kAll, permute(x, y, b1 ? 0x6420 : 0x7531), 2);
  const uint32_t kept1 = permute(x, y, b1 ? 0x7531 : 0x6420);
  const uint32_t p = b1 ? got1 : kept1, q = b1 ? kept1 : got1;
  // Neighbouring rows, of one column.
  const uint32_t lows = (p & 0x0F0F0F0Fu) | (q & 0x0F0F0F0Fu) << 4;
  const uint32_t highs = (p >> 4 & 0x0F0F0F0Fu) | (q & 0xF0F0F0F0u);
  const uint32_t got0 = __shfl_xor_sync(kAll, b0 ? lows : highs, 1);
  const uint32_t even = b0 ? got0 : lows, odd = b0 ? highs : got0;
  // Their bytes hold rows (0, 2), (8, 10), (4, 6), (12, 14), and the same plus one.
  const uint32_t first = (even & 0x0F0F0F0Fu) | (odd & 0x0F0F0F0Fu) << 4;
  const uint32_t second = (even >> 4 & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
  return make_uint2(permute(first, second, 0x6240), permute(first, second, 0x7351));
}

// A block's row that this lane has, coded; all lanes of a warp come here.
__device__ __forceinline__ void code_square(const QuantJob& job, const BlockPlace& place,
                                            const FactorTable& table, const BlockValues& b, CodedBlock& coded,
                                            BlockCounts& counts) {
  float amax = amax_or_nan<true>(b);
#pragma unroll
  for (int step = 1; step < kQuantBlock; step *= 2) {
    amax = max_or_nan(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
  }
  BlockExtremes e{amax, least_value<true>(b), 0};
  coded.scale = e4m3_byte(amax * place.multiplier);
  coded.factor = table.factor[coded.scale];
  const bool counted = job.counts != nullptr;
  uint32_t clipped = 0;
  if (is_ordinary<0>(b, coded.factor, e)) {
    const float above = code_fast<true, false>(b, coded.factor, {}, coded.word);
    if (counted) clipped = static_cast<uint32_t>(above);
  } else {
    // The same for all rows of the block.
    const unsigned mine = 0xFFFFu << (threadIdx.x & 16);
    PlainBlock plain;
    copy_values(b, plain.v);
    float top = block_max(plain.v);
#pragma unroll
    for (int step = 1; step < kQuantBlock; step *= 2) top = fmaxf(top, __shfl_xor_sync(mine, top, step));
    code_plainly(plain, top, place.multiplier, place.scale.decode, false, {});
    coded = plain.coded;
    e.nonzero = plain.nonzero, clipped = plain.clipped;
    if (counted) counts.value[kCountNonFinite] += count_non_finite(b.word);
  }
  if (!counted) return;
  counts.value[kCountFlushed] += e.nonzero - count_decoded(coded);
  counts.value[kCountClipped] += clipped;
  if (!place.exact) counts.value[kCountInexact] += count_inexact(place, coded);
}

// Whole tiles only. Where a tile of x begins.
struct SquareTile {
  int32_t group, row, column;  // the row within the group
};

__device__ __forceinline__ SquareTile tile_at(const SquareJob& s, int32_t tile) {
  const int32_t across = static_cast<int32_t>(s.row.cols) / kTileDepth;
  const int32_t row = tile / across * kTileRows;
  const int32_t group = row / s.rows_per_group;
  return {group, row - group * s.rows_per_group, tile % across * kTileDepth};
}

// Writes the stage: 32 codes a thread, of rows and of columns, and a scale for some.
__device__ __forceinline__ void store_tile(const SquareJob& s, const SquareTile& t, SquareShared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t before = int64_t{t.group} * s.rows_per_group * s.row.cols;
  const int row = thread / 4, quarter = thread % 4;
  const uint2 a = shared.in_row(row, 2 * quarter), b = shared.in_row(row, 2 * quarter + 1);
  const int64_t at = before + int64_t{t.row + row} * s.row.cols + t.column + 32 * quarter;
  *reinterpret_cast<uint4*>(s.row.codes + at / 2) = make_uint4(a.x, a.y, b.x, b.y);
  const int column = thread / 2, half = thread % 2;
  const uint2 c = shared.in_column(column, 2 * half), d = shared.in_column(column, 2 * half + 1);
  const int64_t turned = before + int64_t{t.column + column} * s.rows_per_group + t.row + 32 * half;
  *reinterpret_cast<uint4*>(s.column.codes + turned / 2) = make_uint4(c.x, c.y, d.x, d.y);
  if (thread >= kRowBlocks * kColumnBlocks) return;
  const int64_t scales_before = before / (kQuantBlock * kQuantBlock);
  const int64_t across = s.row.cols / kQuantBlock, down = s.rows_per_group / kQuantBlock;
  {
    const int i = thread / kColumnBlocks, j = thread % kColumnBlocks;
    s.row.block_scales[scales_before + (t.row / kQuantBlock + i) * across + t.column / kQuantBlock + j] =
        shared.scales[i][j];
  }
  const int i = thread % kRowBlocks, j = thread / kRowBlocks;
  s.column.block_scales[scales_before + (t.column / kQuantBlock + j) * down + t.row / kQuantBlock + i] =
      shared.scales[i][j];
}

__global__ void __launch_bounds__(kQuantThreads, 4) encode_squares(const __grid_constant__ SquareJob s) {
  __shared__ SquareShared shared;
  const QuantJob& job = s.row;
  int row, block;
  place_of_thread(true, row, block);
  BlockPlace place{};
  BlockCounts counts{};
  uint64_t no_draws = 0;
  int32_t group = -1;
  const int32_t tiles = s.rows / kTileRows * (static_cast<int32_t>(job.cols) / kTileDepth);
  for (int32_t i = static_cast<int32_t>(blockIdx.x); i < tiles; i += static_cast<int32_t>(gridDim.x)) {
    const SquareTile t = tile_at(s, i);
    const uint16_t* x = job.x + (int64_t{t.group} * s.rows_per_group + t.row + row) * job.cols + t.column +
                        kQuantBlock * block;
    BlockValues b[kTilePasses];
#pragma unroll
    for (int pass = 0; pass < kTilePasses; ++pass) {
      load_block(x + int64_t{32 * pass} * job.cols, kQuantBlock, b[pass].word);
    }
    __syncthreads();  // the last tile's codes have left
    if (t.group != group) {
      group = t.group;
      enter_group(job, group, place, no_draws, shared.table);
      if (threadIdx.x == 0 && t.row == 0 && t.column == 0) {
        job.tensor_scale[group] = place.scale.decode * place.unit;
        s.column.tensor_scale[group] = place.scale.decode * place.unit;
      }
      __syncthreads();
    }
#pragma unroll
    for (int pass = 0; pass < kTilePasses; ++pass) {
      widen(b[pass].word, b[pass].v);
      CodedBlock coded;
      code_square(job, place, shared.table, b[pass], coded, counts);
      const uint2 codes = make_uint2(coded.word[0], coded.word[1]);
      const int in_tile = row + 32 * pass;
      shared.in_row(in_tile, block) = codes;
      shared.in_column(kQuantBlock * block + row % kQuantBlock, in_tile / kQuantBlock) = turn_codes(codes);
      if (row % kQuantBlock == 0) {
        shared.scales[in_tile / kQuantBlock][block] = static_cast<uint8_t>(coded.scale);
      }
    }
    __syncthreads();
    store_tile(s, t, shared);
  }
  if (job.counts) add_counts(job, counts);
  if (s.column.counts) {
    __syncthreads();
    add_counts(s.column, counts);
  }
}

}  // namespace

bool takes_squares(const QuantizeBoth& op, const QuantJob& row, const QuantJob& column) {
  const int64_t rows = op.row.x.dim(0), cols = op.row.x.dim(1);
  return share_a_reading(op.row.out.spec, op.column.out.spec) && row.spec.block == BlockShape::k16x16 &&
         op.row.offsets.empty() && op.row.input_scale.empty() && op.column.input_scale.empty() &&
         !op.row.measure_error && !op.column.measure_error &&
         op.row.stats.empty() == op.column.stats.empty() && rows % (row.groups * kTileRows) == 0 &&
         cols % kTileDepth == 0 && cols < INT32_MAX && row.vectors && row.wide_codes && column.wide_codes &&
         row.padded_cols == cols && rows / row.groups % column.depth_multiple == 0 &&
         rows / kTileRows * (cols / kTileDepth) < INT32_MAX / 2;
}

void launch_squares(Queue& queue, const SquareJob& s) {
  const Context& c = context_of(queue);
  encode_squares<<<static_cast<unsigned>(c.sm_count * 4), kQuantThreads, 0, c.stream>>>(s);
  check_launch(QuantizeBoth::kName);
}

}  // namespace fp4t::cuda
