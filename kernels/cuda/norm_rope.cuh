// What both directions of QkNormRope share. A head is held by 2^n <= 32 neighbouring lanes of a warp: lane l
// takes the pairs (i, i + head_dim / 2) for i = 8 (j lanes + l) .. + 8, so that rotation needs no other lane.
// With head_dim <= 512 there is one j.
#pragma once

#include "kernels/cuda/fault.cuh"
#include "kernels/cuda/norm_rows.cuh"

namespace fp4t::cuda {

// How many lanes hold a head.
inline int lanes_of_head(int64_t head_dim) {
  int lanes = 1;
  while (lanes < 32 && lanes * kVector < head_dim / 2) lanes *= 2;
  return lanes;
}

// Both halves of a head can be read as vectors, and the lanes hold them at once.
inline bool head_in_registers(int64_t head_dim) {
  return head_dim % (2 * kVector) == 0 && head_dim / 2 <= 32 * kVector;
}

// Lanes of one head add; all of them get the sum.
__device__ __forceinline__ float head_sum(float x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}

// Elements [i, i + 8) of both halves.
struct Pair {
  float a[kVector], b[kVector];
};

template <class T>
__device__ __forceinline__ void load_pair(const T* head, int64_t i, int64_t half, Pair& out) {
  load_part(head, i, half, out.a);
  load_part(head + half, i, half, out.b);
}
template <class T>
__device__ __forceinline__ void store_pair(const Pair& in, T* head, int64_t i, int64_t half) {
  store_part(in.a, head, i, half);
  store_part(in.b, head + half, i, half);
}
__device__ __forceinline__ void add_pair(Dot& dot, const Pair& x, const Pair& y) {
  dot.add(x.a, y.a);
  dot.add(x.b, y.b);
}
__device__ __forceinline__ void scale_pair(Pair& p, float factor) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) p.a[k] = p.a[k] * factor, p.b[k] = p.b[k] * factor;
}
__device__ __forceinline__ void multiply_pair(Pair& p, const Pair& q) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) p.a[k] = p.a[k] * q.a[k], p.b[k] = p.b[k] * q.b[k];
}

// A pair as it lies in memory, of BF16 that can be read as vectors.
struct RawPair {
  uint4 a, b;
};
__device__ __forceinline__ RawPair load_raw_pair(const Bf16* head, int64_t half) {
  return {load_raw(head), load_raw(head + half)};
}
__device__ __forceinline__ void store_raw_pair(const RawPair& raw, Bf16* head, int64_t half) {
  store_raw(raw.a, head);
  store_raw(raw.b, head + half);
}
__device__ __forceinline__ Pair decode_pair(const RawPair& raw) {
  Pair p;
  decode(raw.a, p.a);
  decode(raw.b, p.b);
  return p;
}
__device__ __forceinline__ RawPair encode_pair(const Pair& p) { return {encode(p.a), encode(p.b)}; }
__device__ __forceinline__ Pair load_weight_pair(const float* weight, int64_t half) {
  Pair p;
  load_vector(weight, p.a);
  load_vector(weight + half, p.b);
  return p;
}

// n / d and the remainder; 64-bit division is slow and seldom needed.
__device__ __forceinline__ int64_t divide(int64_t n, int d, int& remainder) {
  if (n <= int64_t{0xFFFFFFFFu}) {
    const uint32_t small = static_cast<uint32_t>(n), quotient = small / static_cast<uint32_t>(d);
    remainder = static_cast<int>(small - quotient * static_cast<uint32_t>(d));
    return quotient;
  }
  remainder = static_cast<int>(n % d);
  return n / d;
}

// (a, b) rotated by the angle of each pair.
__device__ __forceinline__ void rotate(Pair& p, const float (&cos)[kVector], const float (&sin)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const float x = p.a[k], y = p.b[k];
    p.a[k] = x * cos[k] - y * sin[k];
    p.b[k] = y * cos[k] + x * sin[k];
  }
}
__device__ __forceinline__ void rotate_back(Pair& p, const float (&cos)[kVector],
                                            const float (&sin)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const float x = p.a[k], y = p.b[k];
    p.a[k] = x * cos[k] + y * sin[k];
    p.b[k] = y * cos[k] - x * sin[k];
  }
}

}  // namespace fp4t::cuda
