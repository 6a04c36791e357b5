// The two orders of the NVFP4 codes of 32 neighbours in a row, 16 bytes (QuantView::order).
//   kNatural  two a byte, element 2i in the low nibble
//   kStream   what the products of few rows on a GPU read: word t of four holds elements 4t .. 4t+3 and
//             16+4t .. 16+4t+3 as four pairs of neighbours, the first of each pair in the word's low half,
//             the second in its high half. Within a half, sign and magnitude of pairs 0..3 are at bits 15 and
//             8-6, 12 and 5-3, 14 and 11-9, 13 and 2-0: few instructions bring each to 15 and 8-6, where BF16
//             has its sign, lowest exponent bits and highest mantissa bit.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"

namespace fp4t {

namespace detail {

// Four codes, the first in the lowest nibble, as a half and back.
FP4T_HD uint32_t stream_half(uint32_t c) {
  return (c & 0x0008u) << 12 | (c & 0x0007u) << 6 | (c & 0x0080u) << 5 | (c & 0x0070u) >> 1 |
         (c & 0x0800u) << 3 | (c & 0x0700u) << 1 | (c & 0x8000u) >> 2 | (c & 0x7000u) >> 12;
}
FP4T_HD uint32_t natural_half(uint32_t h) {
  return (h >> 12 & 0x0008u) | (h >> 6 & 0x0007u) | (h >> 5 & 0x0080u) | (h << 1 & 0x0070u) |
         (h >> 3 & 0x0800u) | (h >> 1 & 0x0700u) | (h << 2 & 0x8000u) | (h << 12 & 0x7000u);
}

}  // namespace detail

FP4T_HD void to_stream(const uint32_t (&natural)[4], uint32_t (&stream)[4]) {
  for (int t = 0; t < 4; ++t) {
    const uint32_t a = natural[t / 2] >> (t % 2 * 16) & 0xFFFFu,
                   b = natural[2 + t / 2] >> (t % 2 * 16) & 0xFFFFu;
    const uint32_t even = (a & 0xFu) | (a >> 4 & 0xF0u) | (b & 0xFu) << 8 | (b >> 8 & 0xFu) << 12;
    const uint32_t odd = (a >> 4 & 0xFu) | (a >> 8 & 0xF0u) | (b >> 4 & 0xFu) << 8 | (b >> 12 & 0xFu) << 12;
    stream[t] = detail::stream_half(even) | detail::stream_half(odd) << 16;
  }
}

FP4T_HD void to_natural(const uint32_t (&stream)[4], uint32_t (&natural)[4]) {
  for (int i = 0; i < 4; ++i) natural[i] = 0;
  for (int t = 0; t < 4; ++t) {
    const uint32_t even = detail::natural_half(stream[t] & 0xFFFFu),
                   odd = detail::natural_half(stream[t] >> 16);
    const uint32_t a = (even & 0xFu) | (odd & 0xFu) << 4 | (even & 0xF0u) << 4 | (odd & 0xF0u) << 8;
    const uint32_t b =
        (even >> 8 & 0xFu) | (odd >> 8 & 0xFu) << 4 | (even >> 12 & 0xFu) << 8 | (odd >> 12 & 0xFu) << 12;
    natural[t / 2] |= a << (t % 2 * 16);
    natural[2 + t / 2] |= b << (t % 2 * 16);
  }
}

}  // namespace fp4t
