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

// The way of a warp through the heads of its tokens, which are every eighth of a range: of each token the
// query heads, the key heads and, unless left out, the value heads, 32 / lanes at a time.
enum class HeadKind { kQuery, kKey, kValue };

struct HeadWalk {
  static constexpr int kWarps = 8;

  struct Place {
    int64_t token;
    int block;  // of heads
  };

  __device__ HeadWalk(int query_heads, int key_heads, int half_dim, int lanes, bool with_values,
                      int64_t first_token, int64_t end_token)
      : heads(query_heads),
        kv_heads(key_heads),
        half(half_dim),
        per_block(32 / lanes),
        group(static_cast<int>(threadIdx.x) % 32 / lanes),
        column(static_cast<int>(threadIdx.x) % lanes * kVector),
        query_blocks((query_heads + per_block - 1) / per_block),
        key_blocks((key_heads + per_block - 1) / per_block),
        blocks(query_blocks + key_blocks * (with_values ? 2 : 1)),
        first(first_token + static_cast<int>(threadIdx.x) / 32),
        end(end_token) {}

  __device__ Place begin() const { return {first, 0}; }
  __device__ int64_t steps() const { return first < end ? (end - first + kWarps - 1) / kWarps * blocks : 0; }
  __device__ void advance(Place& p) const {
    if (++p.block < blocks) return;
    p.block = 0;
    p.token += kWarps;
  }
  __device__ HeadKind kind(const Place& p) const {
    if (p.block < query_blocks) return HeadKind::kQuery;
    return p.block < query_blocks + key_blocks ? HeadKind::kKey : HeadKind::kValue;
  }
  // This lane's head, counted over all kinds; negative where it has none.
  __device__ int head(const Place& p) const {
    if (p.token >= end || column >= half) return -1;
    int h = p.block * per_block + group;
    if (p.block < query_blocks) return h < heads ? h : -1;
    h -= query_blocks * per_block;
    if (p.block < query_blocks + key_blocks) return h < kv_heads ? heads + h : -1;
    h -= key_blocks * per_block;
    return h < kv_heads ? heads + kv_heads + h : -1;
  }

  int heads, kv_heads, half, per_block, group, column, query_blocks, key_blocks, blocks;
  int64_t first, end;
};

// The angles of one token after another, the next position loaded ahead.
struct Angles {
  __device__ Angles(const HeadWalk& walk, const int32_t* all_positions)
      : positions(all_positions), next(walk.first < walk.end ? all_positions[walk.first] : 0) {}

  // False where the position is outside the table.
  __device__ bool begin(const HeadWalk& walk, int64_t token, const float* cos_table, const float* sin_table,
                        int64_t max_position) {
    position = next;
    if (token + HeadWalk::kWarps < walk.end) next = positions[token + HeadWalk::kWarps];
    if (position < 0 || position >= max_position) return false;
    if (walk.column < walk.half) {
      load_vector(cos_table + int64_t{position} * walk.half + walk.column, cos);
      load_vector(sin_table + int64_t{position} * walk.half + walk.column, sin);
    }
    return true;
  }

  const int32_t* positions;
  int32_t next, position = 0;
  float cos[kVector] = {}, sin[kVector] = {};
};

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
