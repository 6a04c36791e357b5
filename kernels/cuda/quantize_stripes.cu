// The column orientation without shared memory on the way in, and with it the row orientation of the same
// tensor in one reading. A thread holds 16 rows of two neighbouring columns of x, which a warp reads 128
// bytes at a time; what it codes meets in shared memory and leaves in whole sectors. The rows of the tile
// follow while it is in the first-level cache.
#include "kernels/cuda/quantize_encode.cuh"
#include "kernels/cuda/quantize_stripes.cuh"

namespace fp4t::cuda {

namespace {

constexpr int kBlocks = kTileDepth / kQuantBlock;  // of a row of the result in a tile: one a warp

// Codes and scales of a tile of 64 columns of x on their way out.
struct StripeStage {
  alignas(16) uint2 codes[kTileRows][kBlocks];
  alignas(16) uint8_t scales[kTileRows][kBlocks];
};

// Eight lanes write eight blocks of a column whose columns lie 64 bytes apart: permuted by the pair of
// columns.
__device__ int staged_at(int column, int block) { return block ^ (column / 2 % kBlocks); }

// 16 rows of columns c and c + 1 from row k on, zero beyond the group.
__device__ void load_pairs(const QuantJob& job, const QuantTile& t, int32_t k, int32_t c,
                           uint32_t (&q)[kQuantBlock]) {
  const uint32_t* p = reinterpret_cast<const uint32_t*>(job.x + (t.begin + k) * job.cols + c);
  const int64_t stride = job.cols / 2;
  const int32_t rows = c < t.rows ? t.cols - k : 0;
  if (rows >= kQuantBlock) {
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) q[i] = __ldg(p + i * stride);
  } else {
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) q[i] = i < rows ? __ldg(p + i * stride) : 0u;
  }
}

// Rotation of 16 values in one thread, without its factor of a quarter.
__device__ void rotate_16(float (&v)[kQuantBlock]) {
#pragma unroll
  for (int h = 1; h < kQuantBlock; h *= 2) {
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) {
      if (i & h) continue;
      const float a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
  }
}

// One of the two columns as values, with the signs of the rotation where there is one.
__device__ void widen_column(const uint32_t (&q)[kQuantBlock], bool upper, float (&v)[kQuantBlock]) {
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) v[i] = float_of(upper ? q[i] & 0xFFFF0000u : q[i] << 16);
}

__device__ void flip_signs(const StripeJob& s, uint32_t (&q)[kQuantBlock]) {
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) q[i] ^= s.flip[i];
}

// Codes one column of the thread; q has the signs of the rotation in it already.
template <bool kUpper>
__device__ void code_column(const StripeJob& s, const BlockPlace& place, const FactorTable& table,
                            const uint32_t (&q)[kQuantBlock], bool counted, CodedBlock& coded,
                            BlockCounts& counts) {
  const QuantJob& job = s.column;
  BlockValues b;
  widen_column(q, kUpper, b.v);
  if (job.spec.hadamard != 0) {
    rotate_16(b.v);
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) b.v[i] *= 0.25f;
  }
  bool all_finite;
  if (job.spec.hadamard != 0 && job.spec.hadamard_out == HadamardOut::kFp32) {
    all_finite = encode_plain<false, false>(job, place, table, b, counted, coded, counts);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) b.word[i] = round_pair(b.v[2 * i], b.v[2 * i + 1]);
    widen(b.word, b.v);
    all_finite = encode_plain<true, false>(job, place, table, b, counted, coded, counts);
  }
  if (!counted || all_finite) return;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) {
    const uint32_t mask = kUpper ? 0x7F800000u : 0x7F80u;
    counts.value[kCountNonFinite] += (q[i] & mask) == mask ? 1u : 0u;
  }
}

// Writes the stage: 32 codes and two scales a thread.
__device__ void store_stage(const QuantJob& job, const QuantTile& t, const StripeStage& stage) {
  const int column = static_cast<int>(threadIdx.x) / 4, quarter = static_cast<int>(threadIdx.x) % 4;
  const int32_t c = t.row0 + column, k = t.k0 + 32 * quarter;
  if (c >= t.rows || k >= t.length) return;
  const int64_t at = t.elements_before + int64_t{c} * t.length + k;
  const uint2 a = stage.codes[column][staged_at(column, 2 * quarter)];
  const uint2 b = stage.codes[column][staged_at(column, 2 * quarter + 1)];
  *reinterpret_cast<uint4*>(job.codes + at / 2) = make_uint4(a.x, a.y, b.x, b.y);
  *reinterpret_cast<uint16_t*>(job.block_scales + at / kQuantBlock) =
      *reinterpret_cast<const uint16_t*>(&stage.scales[column][2 * quarter]);
}

// The tile's rows of x, for the row orientation: four blocks a row.
__device__ void code_rows(const QuantJob& job, const QuantTile& t, BlockPlace place, uint64_t draw_base,
                          const FactorTable& table, BlockCounts& counts) {
  const int32_t rows = t.cols, cols = t.rows;  // of the group in x; t is of its transpose
  const int64_t before = job.spans[t.group].stored_begin * job.padded_cols;
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const int32_t r = t.k0 + static_cast<int>(threadIdx.x) / 4 + 64 * pass;
    const int32_t c = t.row0 + kQuantBlock * (static_cast<int>(threadIdx.x) % 4);
    if (r >= rows || c >= job.padded_cols) continue;
    BlockValues b;
    const uint16_t* p = job.x + (t.begin + r) * job.cols + c;
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // the width is a multiple of 8
      const uint4 q =
          c + 8 * h < cols ? __ldg(reinterpret_cast<const uint4*>(p) + h) : make_uint4(0, 0, 0, 0);
      b.word[4 * h] = q.x, b.word[4 * h + 1] = q.y, b.word[4 * h + 2] = q.z, b.word[4 * h + 3] = q.w;
    }
    widen(b.word, b.v);
    place.number = draw_base + static_cast<uint64_t>((r * job.padded_cols + c) / kQuantBlock);
    CodedBlock coded;
    if (!encode_plain<true, false>(job, place, table, b, job.counts != nullptr, coded, counts) &&
        job.counts) {
      counts.value[kCountNonFinite] += count_non_finite(b.word);
    }
    const int64_t at = before + r * job.padded_cols + c;
    *reinterpret_cast<uint2*>(job.codes + at / 2) = make_uint2(coded.word[0], coded.word[1]);
    job.block_scales[at / kQuantBlock] = static_cast<uint8_t>(coded.scale);
  }
}

template <bool kBoth>
__global__ void __launch_bounds__(kQuantThreads, 3) encode_stripes(StripeJob s) {
  __shared__ StripeStage stage;
  __shared__ FactorTable tables[2];
  const QuantJob& job = s.column;
  const int pair = static_cast<int>(threadIdx.x) % 32, block = static_cast<int>(threadIdx.x) / 32;
  BlockPlace place{}, row_place{};
  BlockCounts counts{}, row_counts{};
  uint64_t draw_base = 0, row_draw_base = 0;
  int32_t group = -1;
  for (TileWalk walk(job); walk.valid(); walk.next(job)) {
    const QuantTile& t = walk.t;
    const int32_t k = t.k0 + kQuantBlock * block, c = t.row0 + 2 * pair;
    uint32_t q[kQuantBlock];
    load_pairs(job, t, k, c, q);
    __syncthreads();  // the last tile's stage has left
    if (t.group != group) {
      group = t.group;
      enter_group(job, group, place, draw_base, tables[0]);
      if (kBoth) enter_group(s.row, group, row_place, row_draw_base, tables[1]);
      __syncthreads();
    }
    if (t.first && threadIdx.x == 0) {
      job.tensor_scale[group] = place.scale.decode * place.unit;
      if (kBoth) s.row.tensor_scale[group] = row_place.scale.decode * row_place.unit;
    }
    if (job.spec.hadamard != 0) flip_signs(s, q);
    const bool counted = job.counts != nullptr && c < t.rows && k < t.length;
    CodedBlock coded;
    place.number = draw_base + static_cast<uint64_t>((int64_t{c} * t.length + k) / kQuantBlock);
    code_column<false>(s, place, tables[0], q, counted, coded, counts);
    stage.codes[2 * pair][staged_at(2 * pair, block)] = make_uint2(coded.word[0], coded.word[1]);
    stage.scales[2 * pair][block] = static_cast<uint8_t>(coded.scale);
    place.number += static_cast<uint64_t>(t.length / kQuantBlock);
    code_column<true>(s, place, tables[0], q, counted, coded, counts);
    stage.codes[2 * pair + 1][staged_at(2 * pair + 1, block)] = make_uint2(coded.word[0], coded.word[1]);
    stage.scales[2 * pair + 1][block] = static_cast<uint8_t>(coded.scale);
    __syncthreads();
    store_stage(job, t, stage);
    if (kBoth) code_rows(s.row, t, row_place, row_draw_base, tables[1], row_counts);
  }
  if (job.counts) add_counts(job, counts);
  if (kBoth && s.row.counts) {
    __syncthreads();
    add_counts(s.row, row_counts);
  }
}

// Maxima of the rotated columns, and of x itself for the row orientation.
template <bool kBoth>
__global__ void __launch_bounds__(kQuantThreads) scan_stripes(StripeJob s) {
  const QuantJob& job = s.column;
  const int pair = static_cast<int>(threadIdx.x) % 32, block = static_cast<int>(threadIdx.x) / 32;
  float top = 0.0f;
  uint32_t row_top = 0;
  int32_t group = -1;
  const auto flush = [&] {
    raise_amax(job.amax + max(group, 0), group >= 0 ? bits_of(finish_amax(job.spec, top)) : 0u);
    if (kBoth) raise_amax(s.row.amax + max(group, 0), max(row_top & 0x7FFFu, row_top >> 16 & 0x7FFFu) << 16);
    top = 0.0f;
    row_top = 0;
  };
  for (TileWalk walk(job); walk.valid(); walk.next(job)) {
    const QuantTile& t = walk.t;
    if (t.group != group) {
      flush();
      group = t.group;
    }
    uint32_t q[kQuantBlock];
    load_pairs(job, t, t.k0 + kQuantBlock * block, t.row0 + 2 * pair, q);
    if (kBoth) {
#pragma unroll
      for (int j = 0; j < kQuantBlock; ++j) row_top = larger_pair(row_top, q[j]);
    }
    flip_signs(s, q);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float v[kQuantBlock];
      widen_column(q, upper != 0, v);
      rotate_16(v);
#pragma unroll
      for (int j = 0; j < kQuantBlock; ++j) top = fmaxf(top, fabsf(v[j]));
    }
  }
  flush();
}

unsigned stripe_grid(const Context& c) { return static_cast<unsigned>(c.sm_count * 3); }

}  // namespace

bool takes_stripes(const QuantJob& job, Coder coder) {
  return coder == Coder::kPlain && job.column && job.spec.scale_scope == ScaleScope::kTensor &&
         (job.spec.hadamard == 0 || job.spec.hadamard == kQuantBlock) && job.vectors && job.wide_codes &&
         !job.energies && reinterpret_cast<uintptr_t>(job.block_scales) % 2 == 0;
}

StripeJob stripe_job(const QuantJob& column) {
  StripeJob s{};
  s.column = column;
  for (int i = 0; i < kQuantBlock; ++i) s.flip[i] = column.signs.word[0] >> i & 1u ? 0x80008000u : 0u;
  return s;
}

void launch_stripes_amax(Queue& queue, const StripeJob& s, bool both) {
  const Context& c = context_of(queue);
  const unsigned grid = static_cast<unsigned>(c.sm_count * 6);
  if (both) {
    scan_stripes<true><<<grid, kQuantThreads, 0, c.stream>>>(s);
  } else {
    scan_stripes<false><<<grid, kQuantThreads, 0, c.stream>>>(s);
  }
  check_launch(Quantize::kName);
}

void launch_stripes(Queue& queue, const StripeJob& s, bool both) {
  const Context& c = context_of(queue);
  if (both) {
    encode_stripes<true><<<stripe_grid(c), kQuantThreads, 0, c.stream>>>(s);
  } else {
    encode_stripes<false><<<stripe_grid(c), kQuantThreads, 0, c.stream>>>(s);
  }
  check_launch(Quantize::kName);
}

}  // namespace fp4t::cuda
