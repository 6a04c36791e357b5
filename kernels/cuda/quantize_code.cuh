// Coding one block of 16 values that a thread holds, by the rules of kernels/formats, and counting what the
// coding did. All functions that shuffle are called by whole warps.
#pragma once

#include "kernels/cuda/quantize_fast.cuh"
#include "kernels/formats/ms_eden.h"
#include "kernels/formats/mxfp8.h"
#include "kernels/formats/nvfp4.h"

namespace fp4t::cuda {

// A coded block: 16 codes of four bits in word[0..1], or of eight in all four.
struct CodedBlock {
  uint32_t word[4];
  uint32_t scale;  // byte
  float factor;    // into codes; unset by MS-EDEN
};

// What one thread counts.
struct BlockCounts {
  uint32_t value[kNumQuantCounts];
  // Energies of the thread's blocks, kQuantThreads apart in shared memory: registers are for the coding. Null
  // in kernels that do not measure.
  double* energies;
};

// What the block's thread knows of its place.
struct BlockPlace {
  uint64_t number;  // draws
  TensorScale scale;
  float multiplier;  // a block's maximum into its scale, rule amax
  bool exact;        // the scale leaves q*s*S_dec exact in BF16, whatever the codes
  float unit;        // input scale
  bool leads;        // the row that stands for its 16x16 tile
  int in_group;      // of the rotation group
};

// One matrix of factors into codes, one a block scale, for a tensor scale.
struct FactorTable {
  float factor[128];
};

__device__ inline bool finite(float x) { return (bits_of(x) & 0x7FFFFFFFu) < 0x7F800000u; }

// Whether BF16 holds a finite value that was computed in FP64.
__device__ inline bool fits_bf16(double value) {
  const float narrow = static_cast<float>(value);
  return double{narrow} == value && (bits_of(narrow) & 0xFFFFu) == 0u;
}

__device__ inline void code_nearest(const float (&v)[kQuantBlock], float factor, CodedBlock& out) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    out.word[w] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) out.word[w] |= e2m1_nearest(v[8 * w + i] * factor) << (4 * i);
  }
}

__device__ inline void code_stochastic(const float (&v)[kQuantBlock], float factor, const PhiloxBits& bits,
                                       CodedBlock& out) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    out.word[w] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int e = 8 * w + i;
      const uint32_t r = bits.word[e / 4] >> (8 * (e % 4)) & 0xFFu;
      out.word[w] |= e2m1_stochastic(v[e] * factor, r) << (4 * i);
    }
  }
}

// With the factor in force, by the spec's rounding.
__device__ inline void code_rounded(const QuantJob& job, const BlockPlace& place,
                                    const float (&v)[kQuantBlock], CodedBlock& out) {
  if (job.spec.rounding == Rounding::kStochastic) {
    code_stochastic(v, out.factor, draw_bits(job.draw_keys, place.number), out);
  } else {
    code_nearest(v, out.factor, out);
  }
}

// Squared error of element i under a candidate scale.
__device__ inline float squared_error(float x, float factor, float block_scale, float decode) {
  const float d = nvfp4_value(e2m1_round(x * factor), block_scale, decode) - x;
  return d * d;
}

// Codes of a 1x16 block with four_over_six; returns whether it chose four.
__device__ inline bool code_four_over_six(const BlockPlace& place, const float (&v)[kQuantBlock], float amax,
                                          CodedBlock& out) {
  const float decode = place.scale.decode;
  const uint32_t byte[2] = {nvfp4_scale_at_six(amax, place.scale.encode),
                            nvfp4_scale_at_four(amax, place.scale.encode)};
  float factor[2], error[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float s = e4m3_value(byte[c]);
    factor[c] = nvfp4_encode_factor(s, decode);
    error[c] = 0.0f;
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) error[c] += squared_error(v[i], factor[c], s, decode);
  }
  const bool four = error[1] < error[0];
  out.scale = four ? byte[1] : byte[0];
  out.factor = four ? factor[1] : factor[0];
  code_nearest(v, out.factor, out);
  return four;
}

// Scratch of a warp for the sums of two 16x16 tiles.
struct TileSquares {
  float value[2][kQuantBlock][kQuantBlock + 1];
};

// Error of a candidate scale over a 16x16 tile whose rows lie in 16 lanes. A tile sums along the rows of x
// in memory, whichever way it is read, so that a weight and its transpose make the same choice.
__device__ inline float tile_error(const float (&v)[kQuantBlock], float factor, float block_scale,
                                   float decode, bool column, TileSquares& squares) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane % 16, half = lane / 16;
  float line = 0.0f;
  if (column) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) {
      squares.value[half][row][i] = squared_error(v[i], factor, block_scale, decode);
    }
    __syncwarp();
    for (int l = 0; l < kQuantBlock; ++l) line += squares.value[half][l][row];
  } else {
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) line += squared_error(v[i], factor, block_scale, decode);
  }
  float total = 0.0f;
#pragma unroll
  for (int l = 0; l < kQuantBlock; ++l) total += __shfl_sync(0xFFFFFFFFu, line, half * 16 + l);
  return total;
}

// Codes of one row of a 16x16 tile whose rows lie in 16 lanes; returns whether the tile chose four.
__device__ inline bool code_tile(const QuantJob& job, const BlockPlace& place, const float (&v)[kQuantBlock],
                                 float& amax, TileSquares& squares, CodedBlock& out) {
  for (int step = 1; step < 16; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
  const float encode = place.scale.encode, decode = place.scale.decode;
  bool four = false;
  if (job.spec.scale_rule == ScaleRule::kFourOverSix) {
    const uint32_t byte6 = nvfp4_scale_at_six(amax, encode), byte4 = nvfp4_scale_at_four(amax, encode);
    const float s6 = e4m3_value(byte6), s4 = e4m3_value(byte4);
    const float factor6 = nvfp4_encode_factor(s6, decode), factor4 = nvfp4_encode_factor(s4, decode);
    const float error6 = tile_error(v, factor6, s6, decode, job.column, squares);
    const float error4 = tile_error(v, factor4, s4, decode, job.column, squares);
    four = error4 < error6;
    out.scale = four ? byte4 : byte6;
    out.factor = four ? factor4 : factor6;
  } else {
    out.scale = nvfp4_block_scale(amax, nvfp4_block_multiplier(job.spec.headroom, encode));
    out.factor = nvfp4_encode_factor(e4m3_value(out.scale), decode);
  }
  code_rounded(job, place, v, out);
  return four;
}

// Codes of a block by MS-EDEN; the rotation group lies in neighbouring lanes. Returns how many values were
// clipped.
__device__ inline uint32_t code_ms_eden(const QuantJob& job, const BlockPlace& place,
                                        const float (&v)[kQuantBlock], float amax, CodedBlock& out) {
  const uint32_t byte = ms_eden_block_scale(amax, place.scale.decode);
  const float block_scale = e4m3_value(byte), factor = block_scale * place.scale.decode;
  float square[kQuantBlock], product[kQuantBlock];
  uint32_t clipped = 0;
  out.word[0] = out.word[1] = 0;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) {
    const float y = v[i] / factor;
    out.word[i / 8] |= e2m1_nearest(y) << (4 * (i % 8));
    clipped += fabsf(y) > kE2m1Max ? 1u : 0u;
    square[i] = v[i] * v[i];
    product[i] = v[i] * (e2m1_round(y) * factor);
  }
  // Both sums run through the group in index order: block after block, each from where the last one ended.
  const int lane = static_cast<int>(threadIdx.x) % 32, first = lane - place.in_group;
  const int blocks = job.spec.hadamard / kQuantBlock;
  float num = 0.0f, den = 0.0f;
  for (int b = 0; b < blocks; ++b) {
    const float num_before = __shfl_sync(0xFFFFFFFFu, num, first + max(b - 1, 0));
    const float den_before = __shfl_sync(0xFFFFFFFFu, den, first + max(b - 1, 0));
    if (b != place.in_group) continue;
    num = b == 0 ? 0.0f : num_before;
    den = b == 0 ? 0.0f : den_before;
#pragma unroll
    for (int i = 0; i < kQuantBlock; ++i) {
      num += square[i];
      den += product[i];
    }
  }
  num = __shfl_sync(0xFFFFFFFFu, num, first + blocks - 1);
  den = __shfl_sync(0xFFFFFFFFu, den, first + blocks - 1);
  const PhiloxBits bits = draw_bits(job.draw_keys, place.number / 4);
  const uint32_t w = static_cast<uint32_t>(place.number % 4);
  const uint32_t word = w == 0 ? bits.word[0] : w == 1 ? bits.word[1] : w == 2 ? bits.word[2] : bits.word[3];
  out.scale = ms_eden_final_scale(ms_eden_correction(num, den), block_scale, word);
  return clipped;
}

// Codes of half a block of MXFP8; the other half is in the next lane.
__device__ inline void code_mxfp8(const float (&v)[kQuantBlock], float amax, CodedBlock& out) {
  amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
  out.scale = mxfp8_block_scale(amax);
  out.factor = mxfp8_encode_factor(out.scale);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    out.word[w] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.word[w] |= e4m3_nearest(v[4 * w + i] * out.factor) << (8 * i);
  }
}

// Counting ------------------------------------------------------------------------------------------

__device__ inline uint32_t count_non_finite(const uint32_t (&word)[8]) {
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    count += (word[i] & 0x7F80u) == 0x7F80u ? 1u : 0u;
    count += (word[i] & 0x7F800000u) == 0x7F800000u ? 1u : 0u;
  }
  return count;
}

__device__ inline uint32_t count_nonzero(const float (&v)[kQuantBlock]) {
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) count += (bits_of(v[i]) & 0x7FFFFFFFu) != 0u ? 1u : 0u;
  return count;
}

__device__ inline uint32_t e2m1_code(const CodedBlock& b, int i) {
  return b.word[i / 8] >> (4 * (i % 8)) & 15u;
}
__device__ inline uint32_t e4m3_code(const CodedBlock& b, int i) {
  return b.word[i / 4] >> (8 * (i % 4)) & 255u;
}

// Values that decode to something: their codes are not zero, and such codes come from such values.
__device__ inline uint32_t count_decoded(const CodedBlock& coded) {
  // A nibble's bit 3 is the carry of its magnitude.
  const auto carries = [](uint32_t word) { return (word & 0x77777777u) + 0x77777777u; };
  const uint32_t both = select_bits(0x88888888u, carries(coded.word[0]), carries(coded.word[1]) >> 1);
  return coded.scale == 0u ? 0u : static_cast<uint32_t>(__popc(both & 0xCCCCCCCCu));
}

// Whether every product of a tensor scale is exact in BF16: q*s counts in 2^-10 and stays below 2^12.
__device__ inline bool always_exact(const QuantSpec& spec, float decode) {
  return spec.scale_round == ScaleRound::kFp32 || (decode >= 0x1p-123f && decode <= 0x1p115f);
}

// Values that BF16 cannot hold.
__device__ inline uint32_t count_inexact(const BlockPlace& place, const CodedBlock& coded) {
  if (place.exact) return 0;
  const double s = double{e4m3_value(coded.scale)} * double{place.scale.decode};
  uint64_t codes = coded.word[0] | uint64_t{coded.word[1]} << 32;
  uint32_t count = 0;
#pragma unroll 1
  for (int i = 0; i < kQuantBlock; ++i, codes >>= 4) {
    count += fits_bf16(double{e2m1_value(static_cast<uint32_t>(codes))} * s) ? 0u : 1u;
  }
  return count;
}

__device__ inline void add_energies(BlockCounts& counts, double error, double signal, double error_signal) {
  counts.energies[0] += error;
  counts.energies[kQuantThreads] += signal;
  counts.energies[2 * kQuantThreads] += error_signal;
}

__device__ inline void measure_nvfp4(const BlockPlace& place, const float (&v)[kQuantBlock],
                                     const CodedBlock& coded, BlockCounts& counts) {
  const float block_scale = e4m3_value(coded.scale), decode = place.scale.decode;
  double error = 0, signal = 0, error_signal = 0;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) {
    if (!finite(v[i])) continue;
    const double x = double{v[i]};
    const double d = double{nvfp4_value(e2m1_value(e2m1_code(coded, i)), block_scale, decode)} - x;
    error += d * d;
    signal += x * x;
    error_signal += d * x;
  }
  const double unit = double{place.unit} * double{place.unit};
  add_energies(counts, unit * error, unit * signal, unit * error_signal);
}

__device__ inline void count_nvfp4(const QuantJob& job, const BlockPlace& place,
                                   const float (&v)[kQuantBlock], const CodedBlock& coded,
                                   BlockCounts& counts) {
  counts.value[kCountFlushed] += count_nonzero(v) - count_decoded(coded);
  counts.value[kCountInexact] += count_inexact(place, coded);
  if (job.energies) measure_nvfp4(place, v, coded, counts);
}

// Values beyond the largest code. `factor` is what the block was coded with.
__device__ inline uint32_t count_clipped(const float (&v)[kQuantBlock], float factor, float limit) {
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) count += fabsf(v[i] * factor) > limit ? 1u : 0u;
  return count;
}

__device__ inline void count_mxfp8(const QuantJob& job, const float (&v)[kQuantBlock],
                                   const CodedBlock& coded, BlockCounts& counts) {
  uint32_t decoded = 0;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) decoded += (e4m3_code(coded, i) & 0x7Fu) != 0u ? 1u : 0u;
  counts.value[kCountFlushed] += count_nonzero(v) - decoded;
  counts.value[kCountClipped] += count_clipped(v, coded.factor, kE4m3Max);
  // Scales of 2^-124 to 2^119 leave every product with a code exact in BF16 (NUMERICS.md section 0.0).
  if (coded.scale < 127 - 124 || coded.scale > 127 + 119) {
    const double s = double{e8m0_value(coded.scale)};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t codes = coded.word[w];
#pragma unroll 1
      for (int i = 0; i < 4; ++i, codes >>= 8) {
        const double q = double{e4m3_value(codes)};
        counts.value[kCountInexact] += q == q && !fits_bf16(q * s) ? 1u : 0u;
      }
    }
  }
  if (!job.energies) return;
  const double scale = 1.0 / double{coded.factor};
  double error = 0, signal = 0, error_signal = 0;
#pragma unroll
  for (int i = 0; i < kQuantBlock; ++i) {
    if (!finite(v[i])) continue;
    const double x = double{v[i]};
    const double d = double{e4m3_value(e4m3_code(coded, i))} * scale - x;
    error += d * d;
    signal += x * x;
    error_signal += d * x;
  }
  add_energies(counts, error, signal, error_signal);
}

// For what hardly ever happens: no register waits for it.
__device__ inline void count_rare(const QuantJob& job, QuantCount which, uint32_t count) {
  if (count != 0) atomicAdd(job.counts + which, static_cast<unsigned long long>(count));
}

// Rule amax in 1x16 blocks ----------------------------------------------------------------------------

// A block on its way through the rules as kernels/formats has them; in memory, since hardly any goes there.
struct PlainBlock {
  float v[kQuantBlock];
  CodedBlock coded;
  uint32_t nonzero, clipped;
};

static __device__ __noinline__ void code_plainly(PlainBlock& b, float amax, float multiplier, float decode,
                                                 bool stochastic, PhiloxBits bits) {
  b.coded.scale = e4m3_byte(amax * multiplier);
  b.coded.factor = nvfp4_encode_factor(e4m3_value(b.coded.scale), decode);
  stochastic ? code_stochastic(b.v, b.coded.factor, bits, b.coded)
             : code_nearest(b.v, b.coded.factor, b.coded);
  b.nonzero = count_nonzero(b.v);
  b.clipped = count_clipped(b.v, b.coded.factor, kE2m1Max);
}

// Codes and counts of a block that is 2^kShift times what it stands for; `table` has the factors of its
// tensor scale, unless its row has one of its own. `truth(float[16])` gives the block itself, for where the
// short way does not hold. Returns false where the values may not all be finite.
template <bool kPairs, bool kStochastic, bool kRowScope, int kShift, class Truth>
__device__ inline bool encode_plain(const QuantJob& job, const BlockPlace& place, const FactorTable& table,
                                    const BlockValues& b, const Truth& truth, bool counted, CodedBlock& coded,
                                    BlockCounts& counts) {
  constexpr float kUnit = 1.0f / (1 << kShift);
  BlockExtremes e{amax_or_nan<kPairs>(b), least_value<kPairs>(b), 0};
  const PhiloxBits bits = kStochastic ? draw_bits(job.draw_keys, place.number) : PhiloxBits{};
  coded.scale = e4m3_byte(kShift == 0 ? e.largest * place.multiplier : e.largest * kUnit * place.multiplier);
  coded.factor = kRowScope ? nvfp4_encode_factor(e4m3_value(coded.scale), place.scale.decode)
                           : table.factor[coded.scale];
  const float factor = coded.factor * kUnit;
  uint32_t clipped = 0;
  if (is_ordinary<kShift>(b, coded.factor, e)) {
    const float above = code_fast<kPairs, kStochastic>(b, factor, bits, coded.word);
    if (counted) clipped = static_cast<uint32_t>(above);
  } else {
    PlainBlock plain;
    truth(plain.v);
    code_plainly(plain, block_max(plain.v), place.multiplier, place.scale.decode, kStochastic, bits);
    coded = plain.coded;
    e.nonzero = plain.nonzero, clipped = plain.clipped;
  }
  if (counted) {
    counts.value[kCountFlushed] += e.nonzero - count_decoded(coded);
    counts.value[kCountClipped] += clipped;
    if (!place.exact) count_rare(job, kCountInexact, count_inexact(place, coded));
  }
  return e.largest <= kFloatMax;
}

}  // namespace fp4t::cuda
