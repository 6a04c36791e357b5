// What the kernels over the key-value cache share: their arguments, tiles of rows, and the sums of splits
// that run side by side.
#pragma once

#include "kernels/cuda/attention_forward.cuh"
#include "kernels/cuda/attention_plan.cuh"
#include "kernels/cuda/kv_codec.cuh"

namespace fp4t::cuda {

struct Cached {
  const Bf16* qkv;
  HeadShape shape;
  int64_t rows;
  int columns, kv_stride;  // head_dim; elements from row to row of the cache
  CachePlaces places;
  const void *k, *v;
  const uint8_t *k_scales, *v_scales;  // null: values
  float c;
  Bf16* out;
  int heads_per_tile, tokens_per_tile, head_chunks;
  // Sums of splits that run side by side.
  int max_splits, partial_columns;
  float* partial;      // [rows * heads][max_splits][partial_columns]
  float2* partial_ml;  // [rows * heads][max_splits]: m and l
  FaultSink sink;

  // Tiles of up to `tile_rows` pairs of a token and a query head.
  void set_tile(int tile_rows) {
    const auto group = static_cast<int>(shape.group());
    heads_per_tile = group < tile_rows ? group : tile_rows;
    tokens_per_tile = tile_rows / heads_per_tile;
    head_chunks = (group + heads_per_tile - 1) / heads_per_tile;
  }
};

// Tokens [begin, end) of one slot, query heads [head, head + heads) of one key head.
struct CachedTile {
  int64_t begin, end;
  int head, kv_head, heads, max_keys;

  // Of row i of the tile; a row behind the last has no keys.
  __device__ int64_t token(int i) const { return begin + i / heads; }
  __device__ int64_t head_of(int i) const { return head + i % heads; }
};

__device__ inline int num_keys(const Cached& args, int64_t token) {
  const int32_t slot = args.places.slots[token], position = args.places.positions[token];
  const bool good =
      slot >= 0 && slot < args.places.num_slots && position >= 0 && position < args.places.max_length;
  return good ? position + 1 : 0;
}

// The tile that begins at row t: to the next slot, or the next multiple of tokens_per_tile. `chunk` is a key
// head and a part of its query heads.
__device__ inline CachedTile tile_at(const Cached& args, int64_t t, int chunk) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  CachedTile tile;
  tile.begin = t;
  tile.end = t + 1;
  const int32_t* slots = args.places.slots;
  while (tile.end < args.rows && tile.end % args.tokens_per_tile != 0 && slots[tile.end] == slots[t])
    ++tile.end;
  const int group = static_cast<int>(args.shape.group());
  const int in_group = chunk % args.head_chunks * args.heads_per_tile;
  tile.kv_head = chunk / args.head_chunks;
  tile.head = tile.kv_head * group + in_group;
  tile.heads = min(args.heads_per_tile, group - in_group);
  int longest = 0;
  for (int64_t token = t + lane; token < tile.end; token += 32) {
    if (args.places.row(token, args.sink) >= 0) longest = max(longest, num_keys(args, token));
  }
  tile.max_keys = __reduce_max_sync(0xFFFFFFFFu, longest);
  return tile;
}

__device__ inline bool tile_begins(const Cached& args, int64_t t) {
  return t % args.tokens_per_tile == 0 || args.places.slots[t] != args.places.slots[t - 1];
}

// Columns [first, first + kN) of a row's sum of one split.
template <int kN>
__device__ __forceinline__ void store_partial(const Cached& args, int64_t place, int split, int h,
                                              const Fragment<kN>& o, int first) {
  float* to = args.partial + (place * args.max_splits + split) * args.partial_columns + first;
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    *reinterpret_cast<float2*>(to + 8 * j + 2 * lane) = make_float2(o[j][2 * h], o[j][2 * h + 1]);
  }
}

// The kernel for tiles of up to kDecodeRows rows, whose warps share the keys of a block; splits side by side.
inline constexpr int kDecodeRows = 16;
void attend_few_rows(Queue& queue, const char* op, const Cached& args);

}  // namespace fp4t::cuda
