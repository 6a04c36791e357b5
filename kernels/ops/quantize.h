// Quantise and dequantise. Exactness: Bitwise. Rules: NUMERICS.md section 0.0, bodies call kernels/formats.
#pragma once

#include "kernels/base/philox.h"
#include "kernels/base/tensor.h"
#include "kernels/formats/quant.h"

namespace fp4t {

enum class Orientation : uint8_t {
  kRow,     // contraction along the columns of x; out is [R, C]
  kColumn,  // contraction along the rows of x, each group by itself; out is the transpose [C, R]
};

// Codes and scales of a BF16 matrix, reading it in one orientation. With the column orientation and equal
// groups `out` may also have the group axis kRows, with groups x C rows of R/groups columns: the same
// bytes, and what GroupedGemm takes as transposed weights. Rows beyond the last group are left alone, in
// x and in `out`. The energies of `stats` are of rotated values where there is a rotation.
struct Quantize {
  static constexpr const char* kName = "quantize";
  TensorView x;        // BF16 [R, C]
  TensorView offsets;  // I32 [groups + 1], first row of every group; empty: equal groups of R/groups
  Orientation orientation;
  PhiloxKey draw_key;         // stochastic and ms_eden
  int64_t first_expert = -1;  // global number of the first group's expert, which keys the draws; -1: none
  PhiloxKey signs_key;        // hadamard with fresh signs
  TensorView input_scale;     // optional F32 [groups]: x stands for x * input_scale (source: forward);
                              // the result's tensor_scale is multiplied by it afterwards;
                              // MXFP8 then has a tensor_scale [groups] too, which receives it
  TensorView stats;           // optional F64 [kNumQuantStats], added to
  bool measure_error;         // also fill the energies and kStatErrorSignal
  QuantView out;              // spec, group axis kRows (kRow) or kCols (kColumn with groups > 1 or offsets)
  void check() const;
};

// Both orientations of one matrix in one reading of it: a gradient is an operand of two products. What comes
// out, counts and draws included, is that of the two ops by themselves.
struct QuantizeBoth {
  static constexpr const char* kName = "quantize_both";
  Quantize row;     // orientation kRow
  Quantize column;  // orientation kColumn, of the same x, offsets and first_expert
  void check() const;
};

// Whether a GPU reads x once for both: blocks by rule amax with one scale a group, rounded alike, of 1x16
// with no rotation but one of a block along the columns, or of 16x16 to nearest. Otherwise QuantizeBoth only
// runs one op after the other, and whoever has other uses for the memory need not hold both results at once.
bool share_a_reading(const QuantSpec& row, const QuantSpec& column);

// What a dequantised value contains.
enum class DecodeScale : uint8_t {
  kBlock,  // q * s: exact in BF16; the tensor scale is left out
  kRow,    // q * s * S_row: exact in BF16 when the scales are powers of two
  kFull,   // (q * s) * S in FP32
};

// Values of a quantised matrix, logical part only: [rows, cols] (kCols groups: [rows, cols] with the
// groups' logical columns side by side). With a rotation the values are those of the rotated matrix.
struct Dequantize {
  static constexpr const char* kName = "dequantize";
  QuantView x;
  TensorView offsets;  // I32 [groups + 1] or empty, as in Quantize
  DecodeScale scale;
  TensorView out;      // BF16 or F32 [rows, cols]
  TensorView inexact;  // optional F64 [1]: values that BF16 could not hold, added to
  void check() const;
};

// What a product multiplies of the rows that an op writes, made by that op itself: BF16 values q * s of NVFP4
// codes with one scale a row, and these scales. The same bits as Quantize (row orientation, one group) and
// Dequantize with kBlock would give. Rounding to nearest, blocks of 1x16, no rotation, C a multiple of 32.
struct RoundedRows {
  QuantSpec spec;
  TensorView values;  // BF16 [R, C]
  TensorView scale;   // F32 [R], decode factors
  bool empty() const { return values.empty(); }
  // Beside `x`, the op's output.
  void check(const char* op, const TensorView& x) const;
};
// Whether RoundedRows has this spec, for rows of so many columns.
bool rounds_by_row(const QuantSpec& spec, int64_t cols);

}  // namespace fp4t
