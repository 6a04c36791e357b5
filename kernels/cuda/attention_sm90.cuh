// What the Hopper kernels of attention share: persistent blocks of one producer warpgroup and two consumers
// of 64 rows each, and rings of stages between them.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_plan.cuh"
#include "kernels/cuda/attention_wgmma.cuh"

namespace fp4t::cuda::sm90 {

inline constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kGroupThreads;
inline constexpr uint32_t kConsumerWarps = kConsumers * 4;  // each frees by itself what its products read
inline constexpr uint32_t kConsumerThreads = kConsumers * kGroupThreads;
inline constexpr int kGroupBarrier = 1;  // named barriers from here on, one a consumer

// Which tile and head an item is. Sections of heads whose keys fit into the L2 cache go one after the other;
// within one, costly tiles come first.
struct Items {
  AttentionTiles tiles;
  int heads, section_heads;

  __device__ __forceinline__ int count() const { return *tiles.count * heads; }
  __device__ __forceinline__ AttentionTile tile(int item, int& head) const {
    const int section_items = *tiles.count * section_heads, section = item / section_items;
    const int in_section = item - section * section_items;
    const int num_heads = min(section_heads, heads - section * section_heads);
    head = section * section_heads + in_section % num_heads;
    return tiles.tiles[in_section / num_heads];
  }
};

// `head_bytes`: what the items of one head share.
inline Items items_of(const char* op, const AttentionTiles& tiles, int64_t tokens, int64_t heads,
                      int64_t head_bytes) {
  FP4T_CHECK(tokens * heads <= INT32_MAX / 2, op, ": ", tokens, " tokens of ", heads, " heads");
  constexpr int64_t kSectionBytes = int64_t{25} << 20;  // half of Hopper's L2 cache
  const int64_t section = std::clamp<int64_t>(kSectionBytes / head_bytes, 1, heads);
  return {tiles, static_cast<int>(heads), static_cast<int>(section)};
}

// Blocks draw items as they become free. The producer draws and passes on; the consumers follow. Threads that
// read shared memory themselves, as these do, arrive themselves: racecheck follows no order by way of another
// lane.
struct ItemRing {
  int item[2];
  uint64_t full[2], empty[2];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&full[i]), 1);
      barrier_init(shared_address(&empty[i]), kConsumerThreads);
    }
  }
};

// The same value in all lanes, known to the compiler as such: it may live in a uniform register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

// One arrival a warp, after its products.
__device__ __forceinline__ void free_stage(uint64_t* empty) {
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(empty));
}

// body(tile, head, n) for the items of this block, n = 0, 1, ...; by the producer's warp, or by a consumer's.
template <bool kProducer, class Body>
__device__ __forceinline__ void for_items(ItemRing& ring, const Items& items, const Body& body) {
  const int count = uniform(items.count());
  for (int n = 0;; ++n) {
    const int stage = n % 2;
    const uint32_t parity = static_cast<uint32_t>(n) / 2 & 1u;
    int drawn = 0;
    if constexpr (kProducer) {
      if (thread_now() % 32 == 0) {
        barrier_wait(shared_address(&ring.empty[stage]), parity ^ 1);
        drawn = atomicAdd(items.tiles.next, 1);
        ring.item[stage] = drawn;
        barrier_arrive(shared_address(&ring.full[stage]));
      }
    } else {
      barrier_wait(shared_address(&ring.full[stage]), parity);
      drawn = ring.item[stage];
      barrier_arrive(shared_address(&ring.empty[stage]));
    }
    const int item = uniform(drawn);
    if (item >= count) return;
    int head;
    const AttentionTile tile = items.tile(item, head);
    body(AttentionTile{uniform(tile.begin), uniform(tile.rows), uniform(tile.doc_begin),
                       uniform(tile.doc_end)},
         uniform(head), n);
  }
}

// Stage and parity of use `n` of a ring.
template <int kStages>
struct Use {
  int stage;
  uint32_t parity;
  __device__ __forceinline__ explicit Use(uint32_t n)
      : stage(static_cast<int>(n % kStages)), parity(n / kStages & 1u) {}
};

// Rows of one head from `token` on, as a tile of `rows` rows.
template <int kD>
__device__ __forceinline__ void load_panels(const CUtensorMap* map, void* to, int rows, uint64_t* full,
                                            int head, int token) {
#pragma unroll
  for (int panel = 0; panel < kD / 64; ++panel) {
    tma_load(shared_address(to) + static_cast<uint32_t>(panel * rows * 128), map, shared_address(full),
             panel * 64, head, token);
  }
}

// `bytes` in a row, a multiple of 16 as both addresses are.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}

// Zeros in rows [valid, rows) of a tile, by one warp: another document's rows, NaN perhaps, must not meet
// this one's.
template <int kD>
__device__ __forceinline__ void clear_rows(void* tile, int rows, int valid) {
  unsigned char* bytes = static_cast<unsigned char*>(tile);
  const int chunks = (rows - valid) * 8;
#pragma unroll 1
  for (int i = thread_now() % 32; i < chunks * (kD / 64); i += 32) {
    const int panel = i / chunks;
    *reinterpret_cast<uint4*>(bytes + (panel * rows + valid) * 128 + (i - panel * chunks) * 16) =
        make_uint4(0, 0, 0, 0);
  }
}

// A consumer's 64 rows to global memory through its tile in shared memory: rows [0, rows) of `columns`
// columns, each fragment row times its factor.
template <int kD>
__device__ void store_tile(Bf16* tile, int consumer, const Fragment<kD>& x, const float (&factor)[2],
                           Bf16* to, int64_t stride, int rows, int columns) {
  constexpr int kChunks = kD / 8;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, lane = thread % 32;
  unsigned char* staged = reinterpret_cast<unsigned char*>(tile);
  named_barrier(kGroupBarrier + consumer, kGroupThreads);  // the products of every warp have read the tile
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * h;
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
      *reinterpret_cast<uint32_t*>(staged + tile_offset(kGroupRows, row, j) + lane % 4 * 4) =
          pack_bf16(x[j][2 * h] * factor[h], x[j][2 * h + 1] * factor[h]);
    }
  }
  named_barrier(kGroupBarrier + consumer, kGroupThreads);
  const int chunk = thread % kChunks;
#pragma unroll 4
  for (int row = thread / kChunks; row < kGroupRows; row += kGroupThreads / kChunks) {
    if (row >= rows || chunk * 8 >= columns) continue;
    *reinterpret_cast<uint4*>(to + row * stride + chunk * 8) =
        *reinterpret_cast<const uint4*>(staged + tile_offset(kGroupRows, row, chunk));
  }
}

}  // namespace fp4t::cuda::sm90
