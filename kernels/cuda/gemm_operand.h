// Codes to the BF16 matrices that the cores multiply: q * s without tensor scales. Counts of groups are
// read on the device. Rows of every result are a multiple of 16 bytes apart.
#pragma once

#include "kernels/cuda/context.h"
#include "kernels/formats/quant.h"

namespace fp4t::cuda {

// Which stored row a logical row of a kRows view has.
struct StoredRows {
  enum class Kind : uint8_t {
    kSame,    // the same
    kEqual,   // groups of `count` rows, `stored_count` in storage
    kOffsets  // groups [offsets[g], offsets[g + 1]), each padded to `padding` by itself
  };
  Kind kind = Kind::kSame;
  int64_t count = 1, stored_count = 1;
  const int32_t* offsets = nullptr;  // also bounds the rows of kSame, unless null
  int32_t groups = 0;
  int32_t padding = 1;
};

// out [rows, codes.padded_cols], rows in logical order; rows from offsets[groups] on are left alone.
void decode_rows(Queue& queue, const QuantView& codes, const StoredRows& place, int64_t rows, Bf16* out);

// padded[g]: where group g begins in the storage of a kCols view, for g = 0 .. groups.
void pad_offsets(Queue& queue, const int32_t* offsets, int64_t groups, int64_t multiple, int32_t* padded);

// A kCols view as out [codes.rows, codes.padded_cols]: group g in columns [padded[g], padded[g + 1]), its
// padding included.
void decode_columns(Queue& queue, const QuantView& codes, const int32_t* padded, Bf16* out);

// A kCols view as out [tokens, ld], ld = align_up(codes.rows, 8): tokens where `offsets` has them, padding
// left out.
void decode_tokens(Queue& queue, const QuantView& codes, const int32_t* offsets, const int32_t* padded,
                   Bf16* out);

}  // namespace fp4t::cuda
