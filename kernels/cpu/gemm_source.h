// One operand of one product, read as FP32 in the two layouts that the tiles want, whatever it is
// stored as: plain F32 or BF16 with either side outermost, or codes with their block scales (then the
// values are q * s; tensor scales are left to the epilogue).
#pragma once

#include <cstdint>

#include "kernels/formats/quant.h"

namespace fp4t::cpu {

struct GemmSource {
  enum class Kind : uint8_t { kF32, kBf16, kCodes };
  Kind kind = Kind::kF32;

  // Plain values, from the group's first element on.
  const void* data = nullptr;
  int64_t stride = 0;        // elements from one stored row to the next
  bool depth_outer = false;  // stored as [depth, outer]

  // Codes: rows from `row0` on; of kCols views the group's stored columns (a count of 0: a kRows view).
  const QuantView* codes = nullptr;
  int64_t row0 = 0;
  int64_t stored_begin = 0;
  int64_t stored_count = 0;
};

// dst[i * dst_stride + k] = value(outer0 + i, depth0 + k) for i < num_outer, k < num_depth.
void load_rows(const GemmSource& source, int64_t outer0, int64_t num_outer, int64_t depth0, int64_t num_depth,
               float* dst, int64_t dst_stride);

// dst[k * kTileCols + i] = value(outer0 + i, depth0 + k) for k < num_depth, and zero for
// num_outer <= i < kTileCols. num_depth <= kMaxDepth.
void load_panel(const GemmSource& source, int64_t outer0, int64_t num_outer, int64_t depth0,
                int64_t num_depth, float* dst);

// Depth that one tile product covers: a panel of B stays in a 32 KiB first-level cache.
constexpr int64_t kMaxDepth = 256;

}  // namespace fp4t::cpu
