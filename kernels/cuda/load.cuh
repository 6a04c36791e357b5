// Elements of BF16 and F32 tensors as FP32, one by one or 16 bytes at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/base/tensor.h"
#include "kernels/cuda/bf16_pair.cuh"
#include "kernels/formats/bf16.h"

namespace fp4t::cuda {

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(Bf16 x) { return bf16_to_f32(x); }

template <class T>
__device__ __forceinline__ T from_f32(float x);
template <>
__device__ __forceinline__ float from_f32<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ Bf16 from_f32<Bf16>(float x) {
  return f32_to_bf16(x);
}

// Elements that one thread moves at a time: 16 bytes of the narrower type.
inline constexpr int kVector = 8;

// kVector elements from a 16-byte aligned address.
__device__ __forceinline__ void load_vector(const Bf16* p, float (&out)[kVector]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = float_of(word[i] << 16);
    out[2 * i + 1] = float_of(word[i] & 0xFFFF0000u);
  }
}
__device__ __forceinline__ void load_vector(const float* p, float (&out)[kVector]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
  out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
}

__device__ __forceinline__ void store_vector(const float (&in)[kVector], Bf16* p) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word[i] = f32_to_bf16(in[2 * i]).bits | static_cast<uint32_t>(f32_to_bf16(in[2 * i + 1]).bits) << 16;
  }
  *reinterpret_cast<uint4*>(p) = make_uint4(word[0], word[1], word[2], word[3]);
}
__device__ __forceinline__ void store_vector(const float (&in)[kVector], float* p) {
  reinterpret_cast<float4*>(p)[0] = make_float4(in[0], in[1], in[2], in[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(in[4], in[5], in[6], in[7]);
}

// Of values that arithmetic made (pack_bf16).
__device__ __forceinline__ void store_computed(const float (&in)[kVector], Bf16* p) {
  *reinterpret_cast<uint4*>(p) = make_uint4(pack_bf16(in[0], in[1]), pack_bf16(in[2], in[3]),
                                            pack_bf16(in[4], in[5]), pack_bf16(in[6], in[7]));
}
__device__ __forceinline__ void store_computed(const float (&in)[kVector], float* p) { store_vector(in, p); }

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace fp4t::cuda
