// Codes back to FP32 rows, for whoever multiplies or checks them on the CPU: q * s with the block scale
// applied and the tensor scale left out. Exact, except MXFP8 products beyond FP32's range. Host only.
#pragma once

#include <cstdint>

#include "kernels/formats/quant.h"

namespace fp4t {

// Elements [begin, begin + count) of one stored row of a kRows view; padding may be read too.
void decode_row(const QuantView& v, int64_t stored_row, int64_t begin, int64_t count, float* out);

// The same for a kCols view: row `row` of the group whose storage begins at column `stored_begin` and is
// `stored_count` columns wide (GroupSpan of kernels/formats/groups.h, multiple contraction_padding(spec));
// `begin` counts from the group's first column.
void decode_group_row(const QuantView& v, int64_t stored_begin, int64_t stored_count, int64_t row,
                      int64_t begin, int64_t count, float* out);

// E4M3 codes of one block times its scale, where there is no view: the key-value cache. count % 8 == 0.
void decode_e4m3(const uint8_t* codes, int64_t count, float scale, float* out);

}  // namespace fp4t
