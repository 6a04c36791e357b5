// Packed attention on Hopper: one warpgroup brings queries, keys and values by the copy engine, two multiply
// 64 rows each. A consumer starts the scores of the next block before the values of this one, and takes turns
// with the other: while one multiplies, the other exponentiates.
#include "kernels/cuda/attention_sm90.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/attention_forward.cuh"
#include "kernels/cuda/attention_maps.cuh"
#include "kernels/cuda/attention_wgmma.cuh"

namespace fp4t::cuda {

namespace sm90 {
namespace {

constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kStages = 2;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + kConsumers;  // named barriers, one a consumer

template <int kD>
struct alignas(1024) Shared {
  Bf16 q[kConsumers][kGroupRows * kD];  // the output on its way, too
  Bf16 k[kStages][kBlockKeys * kD], v[kStages][kBlockKeys * kD];
  float sum[kD / 2 * kConsumers * kGroupThreads];
  uint64_t q_full, q_empty, v_part;
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

struct Maps {
  CUtensorMap rows, keys;  // boxes of kGroupRows and of kBlockKeys tokens
};

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

// Round r of the persistent blocks: back and forth, so that no block always gets the costlier end.
__device__ __forceinline__ int item_of(int round) {
  const unsigned block = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  return round * static_cast<int>(gridDim.x) + static_cast<int>(block);
}

// Stage and parity of use `n` of a ring.
struct Use {
  int stage;
  uint32_t parity;
  __device__ __forceinline__ explicit Use(uint32_t n)
      : stage(static_cast<int>(n % kStages)), parity(n / kStages & 1u) {}
};

template <int kD>
__device__ void load_panels(const CUtensorMap* map, void* to, int rows, uint64_t* full, int head, int token) {
#pragma unroll
  for (int panel = 0; panel < kD / 64; ++panel) {
    tma_load(shared_address(to) + static_cast<uint32_t>(panel * rows * 128), map, shared_address(full),
             panel * 64, static_cast<int>(head), static_cast<int>(token));
  }
}

// Values of the last block, zero behind the tile's last key: another document's rows must not meet these.
template <int kD>
__device__ void load_last_values(Shared<kD>& shared, const CUtensorMap* map, const Use& use, uint32_t parity,
                                 int head, int token, int valid) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    barrier_expect(shared_address(&shared.v_part), kBlockKeys * kD * 2);
    load_panels<kD>(map, shared.v[use.stage], kBlockKeys, &shared.v_part, head, token);
  }
  barrier_wait(shared_address(&shared.v_part), parity);
  unsigned char* rows = reinterpret_cast<unsigned char*>(shared.v[use.stage]);
  for (int i = lane; i < (kBlockKeys - valid) * 8 * (kD / 64); i += 32) {
    const int panel = i / ((kBlockKeys - valid) * 8), chunk = i % ((kBlockKeys - valid) * 8);
    *reinterpret_cast<uint4*>(rows + (panel * kBlockKeys + valid) * 128 + chunk * 16) =
        make_uint4(0, 0, 0, 0);
  }
  fence_async_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(shared_address(&shared.v_full[use.stage]));
}

// One warp.
template <int kD>
__device__ void produce(Shared<kD>& shared, const Maps& maps, const Items& items, const HeadShape& shape) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int count = items.count(), heads = static_cast<int>(shape.heads),
            kv_heads = static_cast<int>(shape.kv_heads);
  const int group = heads / kv_heads;
  uint32_t keys = 0, values = 0, parts = 0;  // uses so far
  for (int round = 0; round * static_cast<int>(gridDim.x) < count; ++round) {
    const int item = item_of(round);
    if (item >= count) continue;
    int head;
    const AttentionTile tile = items.tile(item, head);
    const int k_head = heads + head / group, v_head = k_head + kv_heads;
    const int num_keys = tile.begin - tile.doc_begin + tile.rows,
              blocks = (num_keys + kBlockKeys - 1) / kBlockKeys;
    const auto load_keys = [&](int b) {
      const Use use(keys++);
      if (lane != 0) return;
      barrier_wait(shared_address(&shared.k_empty[use.stage]), use.parity ^ 1);
      barrier_expect(shared_address(&shared.k_full[use.stage]), kBlockKeys * kD * 2);
      load_panels<kD>(&maps.keys, shared.k[use.stage], kBlockKeys, &shared.k_full[use.stage], k_head,
                      tile.doc_begin + b * kBlockKeys);
    };
    const auto load_values = [&](int b) {
      const Use use(values++);
      const int token = tile.doc_begin + b * kBlockKeys;
      const int valid = num_keys - b * kBlockKeys;
      if (valid < kBlockKeys) {
        barrier_wait(shared_address(&shared.v_empty[use.stage]), use.parity ^ 1);
        load_last_values<kD>(shared, &maps.keys, use, parts++ & 1u, v_head, token, valid);
      } else if (lane == 0) {
        barrier_wait(shared_address(&shared.v_empty[use.stage]), use.parity ^ 1);
        barrier_expect(shared_address(&shared.v_full[use.stage]), kBlockKeys * kD * 2);
        load_panels<kD>(&maps.keys, shared.v[use.stage], kBlockKeys, &shared.v_full[use.stage], v_head,
                        token);
      }
    };
    if (lane == 0) {
      barrier_wait(shared_address(&shared.q_empty), static_cast<uint32_t>(round & 1) ^ 1);
      barrier_expect(shared_address(&shared.q_full), kConsumers * kGroupRows * kD * 2);
      for (int c = 0; c < kConsumers; ++c) {
        load_panels<kD>(&maps.rows, shared.q[c], kGroupRows, &shared.q_full, head,
                        tile.begin + c * kGroupRows);
      }
    }
    load_keys(0);
    for (int b = 1; b < blocks; ++b) {
      load_keys(b);
      load_values(b - 1);
    }
    load_values(blocks - 1);
    __syncwarp();
  }
}

// This consumer's 64 rows of the result, through its part of shared.q.
template <int kD>
__device__ void store_rows(Shared<kD>& shared, const PackedAttention& args, const AttentionTile& tile,
                           int64_t head, int consumer, const Fragment<kD>& o, const float (&l)[2]) {
  constexpr int kChunks = kD / 8;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, lane = thread % 32;
  unsigned char* staged = reinterpret_cast<unsigned char*>(shared.q[consumer]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float inverse = 1.0f / l[h];
    const int row = thread / 32 * 16 + lane / 4 + 8 * h;
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
      *reinterpret_cast<uint32_t*>(staged + tile_offset(kGroupRows, row, j) + lane % 4 * 4) =
          pack_bf16(o[j][2 * h] * inverse, o[j][2 * h + 1] * inverse);
    }
  }
  named_barrier(kGroupBarrier + consumer, kGroupThreads);
  const int columns = static_cast<int>(args.shape.head_dim), chunk = thread % kChunks;
  const int rows = tile.rows - consumer * kGroupRows;
  Bf16* out = args.out + ((int64_t{tile.begin} + consumer * kGroupRows) * args.shape.heads + head) * columns;
#pragma unroll
  for (int row = thread / kChunks; row < kGroupRows; row += kGroupThreads / kChunks) {
    if (row >= rows || chunk * 8 >= columns) continue;
    *reinterpret_cast<uint4*>(out + row * args.shape.heads * columns + chunk * 8) =
        *reinterpret_cast<const uint4*>(staged + tile_offset(kGroupRows, row, chunk));
  }
}

template <int kD>
struct Consumer {
  static constexpr int kSplitBlocks = kSplitKeys / kBlockKeys;
  Shared<kD>& shared;
  const PackedAttention& args;
  int consumer;
  uint32_t keys = 0, values = 0;  // uses so far

  __device__ __forceinline__ uint32_t q() const { return shared_address(shared.q[consumer]); }
  __device__ __forceinline__ void free(uint64_t* empty) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(empty));
  }
  __device__ __forceinline__ void await_turn() const {
    named_barrier(kTurnBarrier + consumer, 2 * kGroupThreads);
  }
  __device__ __forceinline__ void give_turn() const {
    named_barrier_arrive(kTurnBarrier + 1 - consumer, 2 * kGroupThreads);
  }

  __device__ __forceinline__ void start_scores(Fragment<kBlockKeys>& s, const Use& use) const {
    pin(s);
    wgmma_fence();
    start_rows<kD, kBlockKeys>(q(), kGroupRows, shared_address(shared.k[use.stage]), kBlockKeys, s);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_values(uint32_t (&p)[kBlockKeys / 16][4], Fragment<kD>& o,
                                               const Use& use) const {
    pin(p);
    pin(o);
    wgmma_fence();
    start_columns<kD, kBlockKeys>(p, shared_address(shared.v[use.stage]), kBlockKeys, o);
    wgmma_commit();
  }

  __device__ void tile(const AttentionTile& tile, int head, uint32_t round_parity) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int my_row = consumer * kGroupRows + warp * 16 + lane / 4;
    const int before = tile.begin - tile.doc_begin, num_keys = before + tile.rows;
    const int blocks = (num_keys + kBlockKeys - 1) / kBlockKeys;
    const auto mask = [&](Fragment<kBlockKeys>& scores, int b) {
      const int row = before + my_row + 1 - b * kBlockKeys;
      mask_scores<kBlockKeys>(scores, {row, row + 8});
    };
    SplitSum<kD, kConsumers * kGroupThreads> total{shared.sum + (threadIdx.x - kGroupThreads), {}, {}, false};
    SoftmaxState state;
    state.clear();
    Fragment<kD> o;
    Fragment<kBlockKeys> s;
    uint32_t p[kBlockKeys / 16][4];
    float rescale[2];
    clear<kD>(o);

    barrier_wait(shared_address(&shared.q_full), round_parity);
    Use use(keys++);
    barrier_wait(shared_address(&shared.k_full[use.stage]), use.parity);
    await_turn();
    start_scores(s, use);
    give_turn();
    wgmma_wait<0>();
    pin(s);
    free(&shared.k_empty[use.stage]);
    if (blocks == 1) mask(s, 0);
    softmax_block<kBlockKeys>(s, args.c, state, rescale);
    pack_operand<kBlockKeys>(s, p);
    for (int b = 1; b < blocks; ++b) {
      const Use key_use(keys++), value_use(values++);
      barrier_wait(shared_address(&shared.k_full[key_use.stage]), key_use.parity);
      await_turn();
      start_scores(s, key_use);
      barrier_wait(shared_address(&shared.v_full[value_use.stage]), value_use.parity);
      start_values(p, o, value_use);
      give_turn();
      wgmma_wait<1>();
      pin(s);
      free(&shared.k_empty[key_use.stage]);
      const bool split_ends = b % kSplitBlocks == 0;
      SoftmaxState ended = state;
      if (split_ends) state.clear();
      if (b == blocks - 1) mask(s, b);
      softmax_block<kBlockKeys>(s, args.c, state, rescale);
      wgmma_wait<0>();
      pin(o);
      free(&shared.v_empty[value_use.stage]);
      pack_operand<kBlockKeys>(s, p);
      if (split_ends) {
        total.add(args.c, o, ended);
      } else {
        rescale_rows<kD>(o, rescale);
      }
    }
    const Use last(values++);
    barrier_wait(shared_address(&shared.v_full[last.stage]), last.parity);
    start_values(p, o, last);
    wgmma_wait<0>();
    pin(o);
    free(&shared.v_empty[last.stage]);
    total.join(args.c, o, state);
    store_rows<kD>(shared, args, tile, head, consumer, o, total.l);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = my_row + 8 * h;
      if (row < tile.rows && lane % 4 == 0) {
        args.lse[(int64_t{tile.begin} + row) * args.shape.heads + head] =
            log_sum(total.m[h], total.l[h], args.c);
      }
    }
    fence_async_shared();
    __syncwarp();
    free(&shared.q_empty);
  }
};

template <int kD>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ Maps maps, PackedAttention args, Items items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<kD>& shared = *reinterpret_cast<Shared<kD>*>(memory);
  if (threadIdx.x == 0) {
    constexpr uint32_t kWarps = kConsumers * 4;
    barrier_init(shared_address(&shared.q_full), 1);
    barrier_init(shared_address(&shared.q_empty), kWarps);
    barrier_init(shared_address(&shared.v_part), 1);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(&shared.k_full[s]), 1);
      barrier_init(shared_address(&shared.v_full[s]), 1);
      barrier_init(shared_address(&shared.k_empty[s]), kWarps);
      barrier_init(shared_address(&shared.v_empty[s]), kWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == 0) {
    registers_down<kProducerRegisters>();
    if (threadIdx.x < 32) produce<kD>(shared, maps, items, args.shape);
  } else {
    registers_up<kConsumerRegisters>();
    Consumer<kD> consumer{shared, args, group - 1};
    if (group == 2) consumer.give_turn();  // the first consumer begins
    const int count = items.count();
    for (int round = 0; round * static_cast<int>(gridDim.x) < count; ++round) {
      const int item = item_of(round);
      if (item >= count) continue;
      int head;
      const AttentionTile tile = items.tile(item, head);
      consumer.tile(tile, head, static_cast<uint32_t>(round & 1));
    }
  }
#endif
}

template <int kD>
void launch(Queue& queue, const char* op, const PackedAttention& args, const AttentionTiles& tiles) {
  const Context& context = context_of(queue);
  const HeadShape& shape = args.shape;
  FP4T_CHECK(args.tokens * shape.heads <= INT32_MAX / 2, op, ": ", args.tokens, " tokens of ", shape.heads,
             " heads");
  const int64_t all_heads = shape.heads + 2 * shape.kv_heads;
  const Maps maps{head_map(args.qkv, shape.head_dim, all_heads, args.tokens, kGroupRows),
                  head_map(args.qkv, shape.head_dim, all_heads, args.tokens, kBlockKeys)};
  // Keys and values of a section's heads: half of Hopper's L2 cache.
  constexpr int64_t kSectionBytes = int64_t{25} << 20;
  const int64_t head_bytes = args.tokens * shape.head_dim * 4;
  const int64_t kv_heads = std::clamp<int64_t>(kSectionBytes / head_bytes, 1, shape.kv_heads);
  constexpr int kBytes = static_cast<int>(sizeof(Shared<kD>));
  FP4T_CUDA(cudaFuncSetAttribute(attention_kernel<kD>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto grid = static_cast<unsigned>(std::min<int64_t>(context.sm_count, args.tokens * shape.heads));
  attention_kernel<kD><<<grid, kThreads, kBytes, context.stream>>>(
      maps, args, Items{tiles, static_cast<int>(shape.heads), static_cast<int>(kv_heads * shape.group())});
  check_launch(op);
}

}  // namespace
}  // namespace sm90

bool on_sm90(const Queue& queue) {
  const int device = context_of(queue).device;
  int major = 0, minor = 0;
  FP4T_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  FP4T_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major == 9 && minor == 0;
}

void attention_sm90(Queue& queue, const char* op, const PackedAttention& args, const AttentionTiles& tiles) {
  if (args.shape.head_dim <= 64) {
    sm90::launch<64>(queue, op, args, tiles);
  } else {
    sm90::launch<128>(queue, op, args, tiles);
  }
}

}  // namespace fp4t::cuda
