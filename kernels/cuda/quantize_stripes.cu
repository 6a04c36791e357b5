// The column orientation by tiles of x in shared memory, and with it the row orientation of the same tensor
// in one reading. A warp codes 16 rows of 32 columns, a column a thread; its codes meet in shared memory and
// leave in whole sectors. The rows of the tile are coded from the same place.
#include "kernels/cuda/quantize_encode.cuh"
#include "kernels/cuda/quantize_stripes.cuh"

namespace fp4t::cuda {

namespace {

enum class Turn : uint8_t { kNone, kFp32, kBf16 };  // rotation of 16, by what it ends in

constexpr int kHalf = kQuantBlock / 2;
constexpr int kBlocks = kTileDepth / kQuantBlock;  // of a column of the tile: one a warp
constexpr int kVectors = kTileRows * 2 / 16;       // of a row of x in the tile
constexpr int kPitch = kTileRows * 2 + 16;         // bytes between its rows: no bank conflicts either way

struct StripeShared {
  alignas(16) uint8_t x[kTileDepth * kPitch];
  alignas(16) uint2 codes[kTileRows][kBlocks];  // on their way out, by columns of x
  alignas(16) uint8_t scales[kTileRows][kBlocks];
  FactorTable tables[2];
};

// Eight lanes write eight blocks of neighbouring columns, which lie 64 bytes apart.
__device__ __forceinline__ int staged_at(int column, int block) { return block ^ (column / 2 % kBlocks); }

// 16 bytes without a register between; zeros where `inside` is false.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

// Begins the reading of a tile. Its end: await_tile, then a barrier.
__device__ __forceinline__ void request_tile(const QuantJob& job, const QuantTile& t, StripeShared& shared) {
  const int vector = static_cast<int>(threadIdx.x) % kVectors, row = static_cast<int>(threadIdx.x) / kVectors;
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared.x)) +
                      static_cast<uint32_t>(row * kPitch + 16 * vector);
  constexpr int kStep = kQuantThreads / kVectors;
  const int32_t c = t.row0 + 8 * vector;
  const uint16_t* from = job.x + (t.begin + t.k0 + row) * job.cols + c;
#pragma unroll
  for (int i = 0; i < kTileDepth / kStep; ++i) {
    const bool inside = c < t.rows && t.k0 + row + kStep * i < t.cols;
    copy_async(to + static_cast<uint32_t>(kStep * i * kPitch), inside ? from + kStep * i * job.cols : job.x,
               inside);
  }
}

__device__ __forceinline__ void await_tile() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A column of the tile from its first row: element i, and its value with the sign that the rotation gives it.
__device__ __forceinline__ uint32_t element_of(const uint8_t* column, int i) {
  return *reinterpret_cast<const uint16_t*>(column + i * kPitch);
}
__device__ __forceinline__ float signed_value(const StripeJob& s, const uint8_t* column, int i) {
  return float_of(element_of(column, i) * 0x10000u + s.flip_high[i]);
}

// The column as it is coded: rotated, and rounded where the rotation ends in BF16. In full, for blocks at the
// ends of the range.
__device__ __noinline__ void rotate_plainly(const StripeJob& s, const uint8_t* column, float* out) {
  float v[kQuantBlock];
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) v[i] = signed_value(s, column, i);
  rotate_16(v);
  const bool rounded = s.column.spec.hadamard_out == HadamardOut::kBf16;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) {
    out[i] = rounded ? bf16_to_f32(f32_to_bf16(v[i] * 0.25f)) : v[i] * 0.25f;
  }
}

// Codes one block of a column. The rotation's factor of a quarter is left to the factor into codes.
template <Turn kTurn, bool kStochastic>
__device__ __forceinline__ void code_column(const StripeJob& s, const BlockPlace& place,
                                            const FactorTable& table, const uint8_t* column, bool counted,
                                            CodedBlock& coded, BlockCounts& counts) {
  constexpr bool kPairs = kTurn != Turn::kFp32;
  const QuantJob& job = s.column;
  BlockValues b;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) b.v[i] = signed_value(s, column, i);
  if (kTurn != Turn::kNone) rotate_16(b.v);
  if (kPairs) pack_pairs(b);
  const auto truth = [&](float(&v)[kQuantBlock]) {
    kTurn == Turn::kNone ? copy_values(b, v) : rotate_plainly(s, column, v);
  };
  constexpr int kShift = kTurn == Turn::kNone ? 0 : 2;
  const bool all_finite =
      encode_plain<kPairs, kStochastic, false, kShift>(job, place, table, b, truth, counted, coded, counts);
  if (!counted || all_finite) return;
  uint32_t count = 0;
#pragma unroll 1
  for (int i = 0; i < kQuantBlock; ++i) count += (element_of(column, i) & 0x7F80u) == 0x7F80u ? 1u : 0u;
  count_rare(job, kCountNonFinite, count);
}

// The tile's columns into the stage.
template <Turn kTurn, bool kStochastic>
__device__ __forceinline__ void code_columns(const StripeJob& s, const QuantTile& t, BlockPlace place,
                                             uint64_t draw_base, StripeShared& shared, BlockCounts& counts) {
  const int lane = static_cast<int>(threadIdx.x % 32), block = static_cast<int>(threadIdx.x / 32);
  const int32_t k = t.k0 + kQuantBlock * block;
  const uint32_t length = static_cast<uint32_t>(t.length) / kQuantBlock;  // in blocks
  place.number =
      draw_base + static_cast<uint64_t>(t.row0 + lane) * length + static_cast<uint32_t>(k) / kQuantBlock;
  const uint8_t* x = shared.x + kQuantBlock * block * kPitch + 2 * lane;
  uint2* codes = &shared.codes[lane][staged_at(lane, block)];  // 32 columns on, the same permutation
  uint8_t* scale = &shared.scales[lane][block];
  int32_t left = s.column.counts != nullptr && k < t.length ? t.rows - t.row0 - lane : 0;
#pragma unroll 1
  for (int half = 0; half < kTileRows / 32; ++half) {
    CodedBlock coded;
    code_column<kTurn, kStochastic>(s, place, shared.tables[0], x, left > 0, coded, counts);
    *codes = make_uint2(coded.word[0], coded.word[1]);
    *scale = static_cast<uint8_t>(coded.scale);
    place.number += 32u * length;
    x += 64, codes += 32 * kBlocks, scale += 32 * kBlocks, left -= 32;
  }
}

// Where a thread's share of the stage goes: 32 codes and two scales. Null: nowhere.
struct StageOut {
  uint8_t* codes;
  uint8_t* scales;
};
__device__ __forceinline__ StageOut stage_out(const QuantJob& job, const QuantTile& t) {
  const int column = static_cast<int>(threadIdx.x) / 4, quarter = static_cast<int>(threadIdx.x) % 4;
  const int32_t c = t.row0 + column, k = t.k0 + 32 * quarter;
  if (c >= t.rows || k >= t.length) return {nullptr, nullptr};
  const int64_t at = t.elements_before + int64_t{c} * t.length + k;
  return {job.codes + at / 2, job.block_scales + at / kQuantBlock};
}
__device__ __forceinline__ void store_stage(const StageOut& out, const StripeShared& shared) {
  if (out.codes == nullptr) return;
  const int column = static_cast<int>(threadIdx.x) / 4, quarter = static_cast<int>(threadIdx.x) % 4;
  const uint2 a = shared.codes[column][staged_at(column, 2 * quarter)];
  const uint2 b = shared.codes[column][staged_at(column, 2 * quarter + 1)];
  *reinterpret_cast<uint4*>(out.codes) = make_uint4(a.x, a.y, b.x, b.y);
  *reinterpret_cast<uint16_t*>(out.scales) =
      *reinterpret_cast<const uint16_t*>(&shared.scales[column][2 * quarter]);
}

// The tile's rows of x, for the row orientation: four blocks a row.
template <bool kStochastic>
__device__ __forceinline__ void code_rows(const QuantJob& job, const QuantTile& t, BlockPlace place,
                                          uint64_t draw_base, const StripeShared& shared,
                                          BlockCounts& counts) {
  // t is of the transpose: the group has t.cols rows in x.
  const int32_t c = t.row0 + kQuantBlock * static_cast<int>(threadIdx.x % 4);
  if (c >= job.padded_cols) return;
  constexpr int kStep = kQuantThreads / 4;
  const int row = static_cast<int>(threadIdx.x / 4);
  const uint32_t width = static_cast<uint32_t>(job.padded_cols) / kQuantBlock;  // in blocks
  const uint64_t inside = static_cast<uint64_t>(t.k0 + row) * width + static_cast<uint32_t>(c) / kQuantBlock;
  place.number = draw_base + inside;
  const uint64_t at = static_cast<uint64_t>(job.spans[t.group].stored_begin) * width + inside;
  uint8_t *codes = job.codes + 8 * at, *scale = job.block_scales + at;
  const uint4* x = reinterpret_cast<const uint4*>(shared.x + row * kPitch) + 2 * (threadIdx.x % 4);
  int32_t left = t.cols - t.k0 - row;
  const bool counted = job.counts != nullptr;
#pragma unroll 1
  for (int step = 0; step < kTileDepth / kStep; ++step) {
    if (left <= 0) return;
    BlockValues b;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 q = x[h];
      b.word[4 * h] = q.x, b.word[4 * h + 1] = q.y, b.word[4 * h + 2] = q.z, b.word[4 * h + 3] = q.w;
    }
    widen(b.word, b.v);
    CodedBlock coded;
    const auto truth = [&](float(&v)[kQuantBlock]) { copy_values(b, v); };
    if (!encode_plain<true, kStochastic, false, 0>(job, place, shared.tables[1], b, truth, counted, coded,
                                                   counts) &&
        counted) {
      count_rare(job, kCountNonFinite, count_non_finite(b.word));
    }
    *reinterpret_cast<uint2*>(codes) = make_uint2(coded.word[0], coded.word[1]);
    *scale = static_cast<uint8_t>(coded.scale);
    place.number += kStep * width;
    x += kStep * kPitch / 16, codes += int64_t{8 * kStep} * width, scale += int64_t{kStep} * width,
        left -= kStep;
  }
}

template <bool kBoth, Turn kTurn, bool kStochastic>
__global__ void __launch_bounds__(kQuantThreads, 4) encode_stripes(const __grid_constant__ StripeJob s) {
  __shared__ StripeShared shared;
  const QuantJob& job = s.column;
  BlockPlace place{}, row_place{};
  BlockCounts counts{}, row_counts{};
  uint64_t draw_base = 0, row_draw_base = 0;
  int32_t group = -1;
  // Nobody reads the tables or the tile between a barrier and the next request.
  const auto begin_tile = [&](const QuantTile& t) {
    request_tile(job, t, shared);
    if (t.group != group) {
      group = t.group;
      enter_group(job, group, place, draw_base, shared.tables[0]);
      if (kBoth) enter_group(s.row, group, row_place, row_draw_base, shared.tables[1]);
    }
    if (t.first && threadIdx.x == 0) {
      job.tensor_scale[group] = place.scale.decode * place.unit;
      if (kBoth) s.row.tensor_scale[group] = row_place.scale.decode * row_place.unit;
    }
  };
  TileWalk walk(job);
  if (walk.valid()) begin_tile(walk.t);
  while (walk.valid()) {
    await_tile();
    __syncthreads();
    code_columns<kTurn, kStochastic>(s, walk.t, place, draw_base, shared, counts);
    if (kBoth) code_rows<kStochastic>(s.row, walk.t, row_place, row_draw_base, shared, row_counts);
    const StageOut out = stage_out(job, walk.t);
    walk.next(job);
    __syncthreads();
    if (walk.valid()) begin_tile(walk.t);
    store_stage(out, shared);
  }
  if (job.counts) add_counts(job, counts);
  if (kBoth && s.row.counts) {
    __syncthreads();
    add_counts(s.row, row_counts);
  }
}

// 16 rows of columns c and c + 1 from row k on, zero beyond the group.
__device__ __forceinline__ void load_pairs(const QuantJob& job, const QuantTile& t, int32_t k, int32_t c,
                                           uint32_t (&q)[kQuantBlock]) {
  const uint16_t* p = job.x + (t.begin + k) * job.cols + c;
  const int32_t rows = c < t.rows ? t.cols - k : 0, pitch = static_cast<int32_t>(2 * job.cols);
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) {
    const void* from;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(from) : "r"(pitch), "r"(i), "l"(p));
    q[i] = i < rows ? __ldg(static_cast<const uint32_t*>(from)) : 0u;
  }
}

// Maxima of the rotated columns, and of x itself for the row orientation. A thread holds two columns.
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
#pragma unroll
    for (int j = 0; j < kQuantBlock; ++j) {
      if (kBoth) row_top = larger_pair(row_top, q[j]);
      q[j] ^= s.flip[j];
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float v[kQuantBlock];
#pragma unroll
      for (int j = 0; j < kQuantBlock; ++j) v[j] = float_of(upper ? q[j] & 0xFFFF0000u : q[j] << 16);
      rotate_16<kHalf>(v);
      // The larger of |a + b| and |a - b|.
#pragma unroll
      for (int j = 0; j < kHalf; ++j) top = fmaxf(top, fabsf(v[j]) + fabsf(v[j + kHalf]));
    }
  }
  flush();
}

}  // namespace

bool takes_stripes(const QuantJob& job, Coder coder) {
  return coder == Coder::kPlain && job.column && job.spec.scale_scope == ScaleScope::kTensor &&
         (job.spec.hadamard == 0 || job.spec.hadamard == kQuantBlock) && job.vectors && job.wide_codes &&
         !job.energies && reinterpret_cast<uintptr_t>(job.block_scales) % 2 == 0 && job.cols < (1 << 26);
}

StripeJob stripe_job(const QuantJob& column) {
  StripeJob s{};
  s.column = column;
  for (int i = 0; i < kQuantBlock && column.spec.hadamard != 0; ++i) {
    s.flip_high[i] = column.signs.word[0] >> i & 1u ? 0x80000000u : 0u;
    s.flip[i] = s.flip_high[i] | s.flip_high[i] >> 16;
  }
  return s;
}

void launch_stripes_amax(Queue& queue, const StripeJob& s, bool both) {
  const Context& c = context_of(queue);
  const unsigned grid = static_cast<unsigned>(c.sm_count * 4);
  if (both) {
    scan_stripes<true><<<grid, kQuantThreads, 0, c.stream>>>(s);
  } else {
    scan_stripes<false><<<grid, kQuantThreads, 0, c.stream>>>(s);
  }
  check_launch(Quantize::kName);
}

namespace {

template <bool kBoth, Turn kTurn>
void launch_encode(Queue& queue, const StripeJob& s) {
  const Context& c = context_of(queue);
  const unsigned grid = static_cast<unsigned>(c.sm_count * 4);
  if (s.column.spec.rounding == Rounding::kStochastic) {
    encode_stripes<kBoth, kTurn, true><<<grid, kQuantThreads, 0, c.stream>>>(s);
  } else {
    encode_stripes<kBoth, kTurn, false><<<grid, kQuantThreads, 0, c.stream>>>(s);
  }
  check_launch(Quantize::kName);
}

template <bool kBoth>
void launch_turned(Queue& queue, const StripeJob& s) {
  const QuantSpec& spec = s.column.spec;
  if (spec.hadamard == 0) return launch_encode<kBoth, Turn::kNone>(queue, s);
  if (spec.hadamard_out == HadamardOut::kBf16) return launch_encode<kBoth, Turn::kBf16>(queue, s);
  launch_encode<kBoth, Turn::kFp32>(queue, s);
}

}  // namespace

void launch_stripes(Queue& queue, const StripeJob& s, bool both) {
  both ? launch_turned<true>(queue, s) : launch_turned<false>(queue, s);
}

}  // namespace fp4t::cuda
