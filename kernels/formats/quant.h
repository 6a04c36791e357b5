// What a quantised operand is: its format with every key of the precision table (QuantSpec), and the
// view of its codes and scales in memory (QuantView). The bit-exact rules live in the codec headers
// beside this one; the contract is NUMERICS.md section 0.0.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/base/tensor.h"

namespace fp4t {

// Values of the keys are frozen (they are stored in checkpoints); the first of each is the default.
enum class Format : uint8_t { kBf16, kFp32, kMxfp8, kNvfp4 };
enum class BlockShape : uint8_t { k1x16, k16x16 };
enum class ScaleRule : uint8_t { kAmax, kFourOverSix };
enum class ScaleScope : uint8_t { kTensor, kRow };
enum class ScaleRound : uint8_t { kFp32, kPow2 };
enum class Rounding : uint8_t { kNearest, kStochastic, kMsEden };
enum class Headroom : uint8_t { kNone, k17over16 };
enum class Signs : uint8_t { kFixed, kFresh };
enum class HadamardOut : uint8_t { kFp32, kBf16 };
enum class Source : uint8_t { kTensor, kForward };

// One cell of the precision table: how one operand of one GEMM is represented.
struct QuantSpec {
  Format format = Format::kBf16;
  BlockShape block = BlockShape::k1x16;  // NVFP4 only, like all below but `source`
  ScaleRule scale_rule = ScaleRule::kAmax;
  ScaleScope scale_scope = ScaleScope::kTensor;
  ScaleRound scale_round = ScaleRound::kFp32;
  Rounding rounding = Rounding::kNearest;
  Headroom headroom = Headroom::kNone;
  int32_t hadamard = 0;  // 0 (none), 16, 32, 64 or 128
  Signs signs = Signs::kFixed;
  HadamardOut hadamard_out = HadamardOut::kFp32;
  Source source = Source::kTensor;

  bool operator==(const QuantSpec&) const = default;
  bool quantised() const { return format == Format::kMxfp8 || format == Format::kNvfp4; }
};

// Elements that share one block scale along the contraction: 16 (NVFP4) or 32 (MXFP8).
int64_t block_length(const QuantSpec& spec);
// P = lcm(block, Hadamard size, 32): the contraction is padded to a multiple of it.
int64_t contraction_padding(const QuantSpec& spec);
// Multiple that the outer rows of each group are padded to: 16 for 16x16 blocks, else 1.
int64_t outer_padding(const QuantSpec& spec);

// Which logical axis of a quantised matrix is cut into groups (experts). The contraction is always the
// last axis of the stored matrix.
enum class GroupAxis : uint8_t {
  kRows,  // outer rows are cut: fprop and dgrad operands, weights [groups x N, K]
  kCols,  // the contraction is cut: wgrad operands, every group padded to P by itself
};

// How the codes of a row lie within every 16 bytes (kernels/formats/code_order.h).
enum class CodeOrder : uint8_t { kNatural, kStream };

// Codes and scales of a matrix [rows, cols] whose contraction runs along cols.
//  codes         U8. NVFP4: two a byte, element 2i in the low nibble, or by `order`; MXFP8: one a byte.
//  block_scales  U8. NVFP4: E4M3, one a block (16x16: one a tile); MXFP8: E8M0. Row-major.
//  tensor_scale  F32, the decode factor S_dec: [groups], or [rows] with scale_scope row. MXFP8: empty.
// Storage with GroupAxis::kRows: [padded_rows, padded_cols]; group g starts at stored row
//   sum over i < g of align_up(n_i, outer_padding).
// Storage with GroupAxis::kCols: group after group, each a matrix [padded_rows, align_up(n_g, P)];
//   padded_cols is the capacity sum. n_g comes from the op's device offsets.
struct QuantView {
  QuantSpec spec;
  GroupAxis group_axis = GroupAxis::kRows;
  CodeOrder order = CodeOrder::kNatural;  // kStream: of NVFP4, kRows
  int64_t groups = 1;
  int64_t rows = 0;         // logical
  int64_t cols = 0;         // logical; capacity in tokens for kCols
  int64_t padded_rows = 0;  // stored (capacity)
  int64_t padded_cols = 0;  // stored (capacity)
  TensorView codes;
  TensorView block_scales;
  TensorView tensor_scale;

  bool empty() const { return codes.empty(); }
};

// Sizes of a QuantView for a matrix of this logical size; the views' data pointers are null.
// `cols` and `rows` are capacities where the true counts live on the device.
QuantView quant_layout(const QuantSpec& spec, GroupAxis axis, int64_t groups, int64_t rows, int64_t cols);
// Bytes of the three parts.
int64_t code_bytes(const QuantView& v);
int64_t block_scale_bytes(const QuantView& v);
int64_t tensor_scale_bytes(const QuantView& v);

// What quantisers count, in an F64 tensor of this length that they add to.
enum QuantStat : int {
  kStatNonFinite = 0,     // NaN and Inf seen in the input
  kStatElements = 1,      // logical elements
  kStatFlushed = 2,       // non-zero inputs that decode to zero
  kStatClipped = 3,       // |y| above the largest code's value
  kStatBlocks = 4,        // blocks
  kStatChoseFour = 5,     // blocks where four-over-six chose 4
  kStatErrorEnergy = 6,   // sum of (dequantised - x)^2, only when the op measures errors
  kStatSignalEnergy = 7,  // sum of x^2, likewise
  kStatInexact = 8,       // values that BF16 cannot hold: q*s of MXFP8, q*s*S_dec with scale_round pow2
  kStatErrorSignal = 9,   // sum of (dequantised - x) x with the energies: over the signal's, the bias
  kNumQuantStats = 10,
};

// Names as recipes and reports write them ("nvfp4", "four_over_six", "1x16", ...).
const char* name_of(Format v);
const char* name_of(BlockShape v);
const char* name_of(ScaleRule v);
const char* name_of(ScaleScope v);
const char* name_of(ScaleRound v);
const char* name_of(Rounding v);
const char* name_of(Headroom v);
const char* name_of(Signs v);
const char* name_of(HadamardOut v);
const char* name_of(Source v);
// One line, defaults left out: "nvfp4 16x16 stochastic hadamard 16".
std::string describe(const QuantSpec& spec);

}  // namespace fp4t
