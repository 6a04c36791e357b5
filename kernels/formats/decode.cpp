#include "kernels/formats/decode.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/formats/code_order.h"
#include "kernels/formats/e2m1.h"
#include "kernels/formats/e4m3.h"
#include "kernels/formats/e8m0.h"

namespace fp4t {

namespace {

struct E4m3Table {
  alignas(64) float value[256];
  E4m3Table() {
    for (uint32_t b = 0; b < 256; ++b) value[b] = e4m3_value(b);
  }
};

const E4m3Table& e4m3_table() {
  static const E4m3Table table;
  return table;
}

typedef uint32_t Bits8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
typedef float Floats8 __attribute__((vector_size(32)));

// e2m1_value of the eight codes in four bytes, times s.
void decode_eight_e2m1(const uint8_t* codes, float s, float* out) {
  uint32_t packed;
  std::memcpy(&packed, codes, sizeof packed);  // little-endian: the first code is lowest
  const Bits8 shift = {0, 4, 8, 12, 16, 20, 24, 28};
  const Bits8 code = (Bits8{} + packed) >> shift;
  const Bits8 m = code & 7u;
  const Bits8 half = (m == 1u) & (Bits8{} + 0x3F000000u);
  const Bits8 magnitude = m > 1u ? (m << 22) + 0x3F000000u : half;
  const Bits8 bits = magnitude | (code & 8u) << 28;
  const Floats8 value = reinterpret_cast<Floats8>(bits) * s;
  std::memcpy(out, &value, sizeof value);
}

// e4m3_value of eight codes, times s.
void decode_eight_e4m3(const uint8_t* codes, float s, float* out) {
  uint32_t widened[8];
  for (int i = 0; i < 8; ++i) widened[i] = codes[i];
  Bits8 code;
  std::memcpy(&code, widened, sizeof code);
  const Bits8 m = code & 0x7Fu;
  const Floats8 small = __builtin_convertvector(reinterpret_cast<Ints8>(m), Floats8) * 0x1p-9f;
  const Bits8 finite = m < 8u ? reinterpret_cast<Bits8>(small) : (m << 20) + (120u << 23);
  const Bits8 magnitude = m == 0x7Fu ? Bits8{} + 0x7FC00000u : finite;
  const Bits8 bits = magnitude | (code & 0x80u) << 24;
  const Floats8 value = reinterpret_cast<Floats8>(bits) * s;
  std::memcpy(out, &value, sizeof value);
}

void decode_nvfp4(const uint8_t* codes, const uint8_t* scales, int64_t begin, int64_t count, float* out) {
  const E4m3Table& e4m3 = e4m3_table();
  const int64_t end = begin + count;
  int64_t i = begin;
  while (i < end) {
    const float s = e4m3.value[scales[i / 16]];
    float* o = out + (i - begin);
    if (i % 16 == 0 && i + 16 <= end) {
      decode_eight_e2m1(codes + i / 2, s, o);
      decode_eight_e2m1(codes + i / 2 + 4, s, o + 8);
      i += 16;
    } else {
      *o = e2m1_value(static_cast<uint32_t>(codes[i / 2] >> (i % 2 * 4))) * s;
      ++i;
    }
  }
}

void decode_mxfp8(const uint8_t* codes, const uint8_t* scales, int64_t begin, int64_t count, float* out) {
  const int64_t end = begin + count;
  int64_t i = begin;
  while (i < end) {
    const float s = e8m0_value(scales[i / 32]);
    float* o = out + (i - begin);
    if (i % 32 == 0 && i + 32 <= end) {
      for (int64_t k = 0; k < 32; k += 8) decode_eight_e4m3(codes + i + k, s, o + k);
      i += 32;
    } else {
      *o = e4m3_value(codes[i]) * s;
      ++i;
    }
  }
}

// From codes in kStream, 32 at a time.
void decode_stream(const uint8_t* codes, const uint8_t* scales, int64_t begin, int64_t count, float* out) {
  const int64_t end = begin + count;
  for (int64_t group = begin / 32; group * 32 < end; ++group) {
    uint32_t stream[4], natural[4];
    std::memcpy(stream, codes + group * 16, sizeof(stream));
    to_natural(stream, natural);
    uint8_t bytes[16];
    std::memcpy(bytes, natural, sizeof(bytes));
    const int64_t first = std::max(begin, group * 32), last = std::min(end, group * 32 + 32);
    decode_nvfp4(bytes, scales + group * 2, first - group * 32, last - first, out + (first - begin));
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
  if (v.order == CodeOrder::kStream) {
    decode_stream(codes + first / 2, row_scales, begin, count, out);
  } else if (v.spec.format == Format::kNvfp4) {
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

void decode_e4m3(const uint8_t* codes, int64_t count, float scale, float* out) {
  FP4T_CHECK_EQ(count % 8, 0);
  for (int64_t i = 0; i < count; i += 8) decode_eight_e4m3(codes + i, scale, out + i);
}

}  // namespace fp4t
