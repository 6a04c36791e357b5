// Codes times block scales as BF16, eight at a time: exact for NVFP4 (six significant bits) and for MXFP8
// but in blocks with scales below 2^-124, where BF16's subnormals round (NUMERICS.md section 0.0, "GEMM").
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/bf16_pair.cuh"
#include "kernels/formats/e4m3.h"
#include "kernels/formats/e8m0.h"

namespace fp4t::cuda {

// One half of a pair, twice.
__device__ __forceinline__ uint32_t twice_low(uint32_t pair) {
  uint32_t d;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(d) : "r"(pair));
  return d;
}
__device__ __forceinline__ uint32_t twice_high(uint32_t pair) {
  uint32_t d;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(d) : "r"(pair));
  return d;
}

// Eight E2M1 codes, the first in the lowest nibble; pair i holds codes i and i + 4. Exponent and mantissa
// go to the lowest exponent bits and the highest mantissa bit of BF16: the code's value times 2^-126, the
// subnormal 0.5 included.
__device__ __forceinline__ void place_e2m1(uint32_t codes, uint32_t (&pair)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t top = codes << (12 - 4 * i);
    pair[i] = (top & 0x80008000u) | ((top >> 6) & 0x01C001C0u);
  }
}

// Eight codes of a word in CodeOrder::kStream, in the same places: four pairs of neighbours.
__device__ __forceinline__ void place_stream(uint32_t word, uint32_t (&pair)[4]) {
  constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x01C001C0u;
  pair[0] = word & (kSign | kMagnitude);
  pair[1] = word * 8 & (kSign | kMagnitude);
  pair[2] = (word * 2 & kSign) | (word >> 3 & kMagnitude);
  pair[3] = (word & 0x20072007u) * (64 + 4) & (kSign | kMagnitude);  // what else it leaves is masked
}

// The same times the block scale.
__device__ __forceinline__ void decode_nvfp4_pairs(uint32_t codes, uint8_t scale, uint32_t (&pair)[4]) {
  const float s = e4m3_value(scale);
  const uint32_t factor = pack_bf16(s, s);
  place_e2m1(codes, pair);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = mul_bf16x2(mul_bf16x2(pair[i], 0x7E807E80u), factor);  // 2^126, then the scale
  }
}

// out: pairs of neighbours.
__device__ __forceinline__ void decode_nvfp4(uint32_t codes, uint8_t scale, uint32_t (&out)[4]) {
  uint32_t pair[4];
  decode_nvfp4_pairs(codes, scale, pair);
  out[0] = __byte_perm(pair[0], pair[1], 0x5410);
  out[1] = __byte_perm(pair[2], pair[3], 0x5410);
  out[2] = __byte_perm(pair[0], pair[1], 0x7632);
  out[3] = __byte_perm(pair[2], pair[3], 0x7632);
}

__device__ __forceinline__ void decode_mxfp8(uint2 codes, uint8_t scale, uint32_t (&out)[4]) {
  const float s = e8m0_value(scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t two = (i < 2 ? codes.x : codes.y) >> (i % 2 * 16);
    out[i] = pack_bf16(e4m3_value(two & 0xFFu) * s, e4m3_value(two >> 8 & 0xFFu) * s);
  }
}

}  // namespace fp4t::cuda
