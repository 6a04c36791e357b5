// The coding pass over tiles, for both orientations.
#pragma once

#include <type_traits>

#include "kernels/base/check.h"
#include "kernels/cuda/quantize_code.cuh"
#include "kernels/cuda/reduce.cuh"

namespace fp4t::cuda {

__device__ inline TensorScale tensor_scale_of(const QuantSpec& spec, uint32_t amax_bits) {
  const float amax = float_of(amax_bits);
  if (spec.format != Format::kNvfp4) return {1.0f, 1.0f};
  if (spec.rounding == Rounding::kMsEden) return {1.0f, ms_eden_tensor_scale(amax)};
  return nvfp4_tensor_scale(spec.scale_rule, spec.scale_round, spec.headroom, amax);
}

__device__ inline uint64_t draw_base_of(const QuantJob& job, int32_t group) {
  return job.first_expert >= 0 ? static_cast<uint64_t>(job.first_expert + group + 1) << 40 : 0;
}

// The factors of a tensor scale; the caller puts barriers around it.
__device__ inline void fill_factors(float decode, FactorTable& table) {
  if (threadIdx.x < 128) table.factor[threadIdx.x] = nvfp4_encode_factor(e4m3_value(threadIdx.x), decode);
}

// Writes the codes of block `block` of row `row` of the tile.
__device__ inline void store_codes(const QuantJob& job, const QuantTile& t, int row, int block,
                                   const CodedBlock& coded) {
  const int64_t at = t.elements_before + int64_t{t.row0 + row} * t.length + t.k0 + kQuantBlock * block;
  if (job.spec.format == Format::kNvfp4) {
    uint8_t* p = job.codes + at / 2;
    if (job.wide_codes) {
      *reinterpret_cast<uint2*>(p) = make_uint2(coded.word[0], coded.word[1]);
    } else {
      for (int i = 0; i < 4; ++i) p[i] = static_cast<uint8_t>(coded.word[0] >> (8 * i));
      for (int i = 0; i < 4; ++i) p[4 + i] = static_cast<uint8_t>(coded.word[1] >> (8 * i));
    }
    return;
  }
  uint8_t* p = job.codes + at;
  if (job.wide_codes) {
    *reinterpret_cast<uint4*>(p) = make_uint4(coded.word[0], coded.word[1], coded.word[2], coded.word[3]);
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      for (int i = 0; i < 4; ++i) p[4 * w + i] = static_cast<uint8_t>(coded.word[w] >> (8 * i));
    }
  }
}

// Writes its scale; of several threads that share one, the first does.
__device__ inline void store_scale(const QuantJob& job, const QuantTile& t, int row, int block,
                                   const CodedBlock& coded) {
  const int32_t r = t.row0 + row, k = t.k0 + kQuantBlock * block;
  const int32_t length = job.spec.format == Format::kNvfp4 ? 16 : 32;
  if (r % job.outer != 0 || k % length != 0) return;
  const int64_t before = t.elements_before / (length * job.outer);
  job.block_scales[before + int64_t{r / job.outer} * (t.length / length) + k / length] =
      static_cast<uint8_t>(coded.scale);
}

// Adds what the block's threads counted to the job's counts.
__device__ inline void add_counts(const QuantJob& job, const BlockCounts& counts) {
  __shared__ unsigned long long total[kNumQuantCounts];
  if (threadIdx.x < kNumQuantCounts) total[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kNumQuantCounts; ++i) {
    const uint32_t sum = __reduce_add_sync(0xFFFFFFFFu, counts.value[i]);
    if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&total[i], static_cast<unsigned long long>(sum));
  }
  __syncthreads();
  if (threadIdx.x < kNumQuantCounts && total[threadIdx.x] != 0) {
    atomicAdd(job.counts + threadIdx.x, total[threadIdx.x]);
  }
}

// A rotation from end to end: BF16 pairs too where it ends in BF16.
__device__ inline void rotate_block(const QuantJob& job, int block, BlockValues& b) {
  rotate_lanes(job.signs, job.spec.hadamard, block, b.v);
  const float scale = hadamard_scale(job.spec.hadamard);
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) b.v[i] *= scale;
  if (job.spec.hadamard_out == HadamardOut::kFp32) return;
  pack_pairs(b);
}

template <bool kColumn, Coder kCoder>
struct EncodeShared {
  FactorTable factors;
  double scratch[33];
  double energies[kNumEnergies][kQuantThreads];
  ColumnTile staged[kColumn ? 1 : 0];
  TileSquares squares[kCoder == Coder::kTile ? kQuantThreads / 32 : 0];
};

__device__ inline void copy_values(const BlockValues& b, float (&v)[kQuantBlock]) {
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) v[i] = b.v[i];
}

// Scales of a group or row, from its maximum.
__device__ inline void set_scale(const QuantJob& job, uint32_t amax_bits, BlockPlace& place) {
  place.scale = tensor_scale_of(job.spec, amax_bits);
  place.multiplier = nvfp4_block_multiplier(job.spec.headroom, place.scale.encode);
  place.exact = always_exact(job.spec, place.scale.decode);
}

// Coding and counting of one block that the thread holds, rule amax.
template <class Shared>
__device__ inline void code_plain(const QuantJob& job, const BlockPlace& place, bool counted, int block,
                                  const uint32_t (&word)[8], const Shared& shared, CodedBlock& coded,
                                  BlockCounts& counts) {
  BlockValues b;
  widen(word, b.v);
#pragma unroll
  for (int i = 0; i < 8; ++i) b.word[i] = word[i];
  const bool rotated = job.spec.hadamard != 0,
             pairs = !rotated || job.spec.hadamard_out == HadamardOut::kBf16;
  if (rotated) rotate_block(job, block, b);
  counted = counted && job.counts != nullptr;
  const FactorTable& table = shared.factors;
  const bool row_scope = job.spec.scale_scope == ScaleScope::kRow;
  const auto truth = [&](float(&v)[kQuantBlock]) { copy_values(b, v); };
  const bool stochastic = job.spec.rounding == Rounding::kStochastic;
  const auto encode = [&](auto paired, auto drawn, auto by_row) {
    return encode_plain<paired.value, drawn.value, by_row.value, 0>(job, place, table, b, truth, counted,
                                                                    coded, counts);
  };
  const auto with_rows = [&](auto paired, auto drawn) {
    return row_scope ? encode(paired, drawn, std::true_type{}) : encode(paired, drawn, std::false_type{});
  };
  const auto with_draws = [&](auto paired) {
    return stochastic ? with_rows(paired, std::true_type{}) : with_rows(paired, std::false_type{});
  };
  const bool all_finite = pairs ? with_draws(std::true_type{}) : with_draws(std::false_type{});
  if (counted && !all_finite) count_rare(job, kCountNonFinite, count_non_finite(word));
  if (counted && job.energies) measure_nvfp4(place, b.v, coded, counts);
}

// The same for the other coders.
template <Coder kCoder, class Shared>
__device__ inline void code_block(const QuantJob& job, const BlockPlace& place, bool counted, int block,
                                  const uint32_t (&word)[8], Shared& shared, CodedBlock& coded,
                                  BlockCounts& counts) {
  BlockValues b;
  widen(word, b.v);
  if (kCoder != Coder::kMxfp8 && kCoder != Coder::kTile && job.spec.hadamard != 0) {
    rotate_block(job, block, b);
  }
  const float(&v)[kQuantBlock] = b.v;
  float amax = block_max(v);
  uint32_t clipped = 0;
  bool four = false;
  if constexpr (kCoder == Coder::kMxfp8) {
    code_mxfp8(v, amax, coded);
  } else if constexpr (kCoder == Coder::kMsEden) {
    clipped = code_ms_eden(job, place, v, amax, coded);
  } else if constexpr (kCoder == Coder::kTile) {
    four = code_tile(job, place, v, amax, shared.squares[threadIdx.x / 32], coded) && place.leads;
  } else {
    four = code_four_over_six(place, v, amax, coded);
  }
  if (!job.counts || !counted) return;
  counts.value[kCountNonFinite] += count_non_finite(word);
  if constexpr (kCoder == Coder::kMxfp8) {
    count_mxfp8(job, v, coded, counts);
  } else {
    if (kCoder != Coder::kMsEden) clipped = count_clipped(v, coded.factor, kE2m1Max);
    counts.value[kCountClipped] += clipped;
    counts.value[kCountChoseFour] += four ? 1u : 0u;
    count_nvfp4(job, place, v, coded, counts);
  }
}

template <bool kColumn, Coder kCoder>
__global__ void __launch_bounds__(kQuantThreads) encode_tiles(QuantJob job) {
  __shared__ EncodeShared<kColumn, kCoder> shared;
  const bool row_scope = job.spec.scale_scope == ScaleScope::kRow;
  int row, block;
  place_of_thread(kCoder == Coder::kTile, row, block);
  BlockPlace place{};
  place.leads = row % kQuantBlock == 0;
  place.in_group = job.spec.hadamard == 0 ? 0 : block % (job.spec.hadamard / kQuantBlock);
  BlockCounts counts{};
  counts.energies = &shared.energies[0][threadIdx.x];
  for (int e = 0; job.energies && e < kNumEnergies; ++e) shared.energies[e][threadIdx.x] = 0;
  uint64_t draw_base = 0;
  int32_t group = -1;
  for (TileWalk walk(job); walk.valid(); walk.next(job)) {
    const QuantTile& t = walk.t;
    const bool enters = t.group != group;
    if (kColumn || enters) __syncthreads();
    uint32_t word[kTilePasses][8];
    if constexpr (kColumn) {
      load_column_tile(job, t, shared.staged[0]);
    } else {
#pragma unroll
      for (int pass = 0; pass < kTilePasses; ++pass) fetch_row(job, t, row + 32 * pass, block, word[pass]);
    }
    if (enters) {
      group = t.group;
      place.unit = job.input_scale ? job.input_scale[group] : 1.0f;
      draw_base = draw_base_of(job, group);
      if (!row_scope) set_scale(job, job.amax[group], place);
      if (kCoder == Coder::kPlain) fill_factors(place.scale.decode, shared.factors);
    }
    if (kColumn || enters) __syncthreads();
    if (t.first && !row_scope && threadIdx.x == 0 && job.tensor_scale) {
      job.tensor_scale[group] = place.scale.decode * place.unit;
    }
#pragma unroll
    for (int pass = 0; pass < kTilePasses; ++pass) {
      const int r = row + 32 * pass, in_row = t.k0 / kQuantBlock + block;
      if constexpr (kColumn) fetch_column(shared.staged[0], r, block, word[pass]);
      place.number =
          draw_base + static_cast<uint64_t>(int64_t{t.row0 + r} * (t.length / kQuantBlock) + in_row);
      if (row_scope && t.row0 + r < t.rows) {
        const int64_t at = t.begin + t.row0 + r;
        set_scale(job, job.amax[at], place);
        if (in_row == 0) job.tensor_scale[at] = place.scale.decode * place.unit;
      }
      const bool stored = t.row0 + r < t.padded_rows && in_row * kQuantBlock < t.length;
      CodedBlock coded;
      if constexpr (kCoder == Coder::kPlain) {
        code_plain(job, place, stored, block, word[pass], shared, coded, counts);
      } else {
        code_block<kCoder>(job, place, stored, block, word[pass], shared, coded, counts);
      }
      if (!stored) continue;
      store_codes(job, t, r, block, coded);
      store_scale(job, t, r, block, coded);
    }
    if (!job.energies) continue;
    for (int e = 0; e < kNumEnergies; ++e) {
      const double sum = block_sum(shared.energies[e][threadIdx.x], shared.scratch);
      shared.energies[e][threadIdx.x] = 0;
      if (threadIdx.x == 0) job.energies[int64_t{kNumEnergies} * walk.tile + e] = sum;
    }
  }
  if (job.counts) add_counts(job, counts);
}

// A block of a row that is a multiple of 8 wide, with `left` elements from here to its end.
__device__ __forceinline__ void load_block(const uint16_t* p, int32_t left, uint32_t (&word)[8]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint4 q = 8 * h < left ? __ldg(reinterpret_cast<const uint4*>(p) + h) : make_uint4(0, 0, 0, 0);
    word[4 * h] = q.x, word[4 * h + 1] = q.y, word[4 * h + 2] = q.z, word[4 * h + 3] = q.w;
  }
}

// What a group's tiles have in common, for the short kernels.
__device__ inline void enter_group(const QuantJob& job, int32_t group, BlockPlace& place, uint64_t& draw_base,
                                   FactorTable& table) {
  place.unit = job.input_scale ? job.input_scale[group] : 1.0f;
  set_scale(job, job.amax[group], place);
  draw_base = draw_base_of(job, group);
  fill_factors(place.scale.decode, table);
}

template <bool kColumn>
void launch_encode_tiles(Queue& queue, const QuantJob& job, Coder coder) {
  const Context& c = context_of(queue);
  const auto start = [&](auto kernel) { kernel<<<tile_grid(c), kQuantThreads, 0, c.stream>>>(job); };
  switch (coder) {
    case Coder::kMxfp8:
      start(encode_tiles<kColumn, Coder::kMxfp8>);
      break;
    case Coder::kPlain:
      start(encode_tiles<kColumn, Coder::kPlain>);
      break;
    case Coder::kFourOverSix:
      start(encode_tiles<kColumn, Coder::kFourOverSix>);
      break;
    case Coder::kTile:
      start(encode_tiles<kColumn, Coder::kTile>);
      break;
    case Coder::kMsEden:
      start(encode_tiles<kColumn, Coder::kMsEden>);
      break;
  }
  check_launch(Quantize::kName);
}

}  // namespace fp4t::cuda
