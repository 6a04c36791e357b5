#include "kernels/formats/decode.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/formats/e2m1.h"
#include "kernels/formats/e4m3.h"
#include "kernels/formats/e8m0.h"

namespace fp4t {

namespace {

// Two E2M1 values a byte, low nibble first: one 8-byte load instead of two conversions.
struct PairTable {
  alignas(64) float value[256][2];
  PairTable() {
    for (uint32_t b = 0; b < 256; ++b) {
      value[b][0] = e2m1_value(b);
      value[b][1] = e2m1_value(b >> 4);
    }
  }
};

struct E4m3Table {
  alignas(64) float value[256];
  E4m3Table() {
    for (uint32_t b = 0; b < 256; ++b) value[b] = e4m3_value(b);
  }
};

const PairTable& pair_table() {
  static const PairTable table;
  return table;
}

const E4m3Table& e4m3_table() {
  static const E4m3Table table;
  return table;
}

void decode_nvfp4(const uint8_t* codes, const uint8_t* scales, int64_t begin, int64_t count, float* out) {
  const PairTable& pairs = pair_table();
  const E4m3Table& e4m3 = e4m3_table();
  const int64_t end = begin + count;
  int64_t i = begin;
  while (i < end) {
    const float s = e4m3.value[scales[i / 16]];
    float* o = out + (i - begin);
    if (i % 16 == 0 && i + 16 <= end) {
      const uint8_t* c = codes + i / 2;
      for (int k = 0; k < 8; ++k) {
        o[2 * k] = pairs.value[c[k]][0] * s;
        o[2 * k + 1] = pairs.value[c[k]][1] * s;
      }
      i += 16;
    } else {
      *o = pairs.value[codes[i / 2]][i % 2] * s;
      ++i;
    }
  }
}

void decode_mxfp8(const uint8_t* codes, const uint8_t* scales, int64_t begin, int64_t count, float* out) {
  const E4m3Table& e4m3 = e4m3_table();
  const int64_t end = begin + count;
  for (int64_t i = begin; i < end;) {
    const int64_t stop = std::min(end, (i / 32 + 1) * 32);
    const float s = e8m0_value(scales[i / 32]);
    for (; i < stop; ++i) out[i - begin] = e4m3.value[codes[i]] * s;
  }
}

// Row `row` of a matrix of `length` columns whose first element is element `origin` of the storage.
void decode(const QuantView& v, int64_t origin, int64_t length, int64_t row, int64_t begin, int64_t count,
            float* out) {
  const uint8_t* codes = static_cast<const uint8_t*>(v.codes.data);
  const uint8_t* scales = static_cast<const uint8_t*>(v.block_scales.data);
  const int64_t block = block_length(v.spec);
  const int64_t outer = outer_padding(v.spec);
  const int64_t first = origin + row * length;
  const uint8_t* row_scales = scales + origin / (block * outer) + row / outer * (length / block);
  if (v.spec.format == Format::kNvfp4) {
    decode_nvfp4(codes + first / 2, row_scales, begin, count, out);
  } else {
    decode_mxfp8(codes + first, row_scales, begin, count, out);
  }
}

}  // namespace

void decode_row(const QuantView& v, int64_t stored_row, int64_t begin, int64_t count, float* out) {
  decode(v, 0, v.padded_cols, stored_row, begin, count, out);
}

void decode_group_row(const QuantView& v, int64_t stored_begin, int64_t stored_count, int64_t row,
                      int64_t begin, int64_t count, float* out) {
  decode(v, stored_begin * v.padded_rows, stored_count, row, begin, count, out);
}

}  // namespace fp4t
