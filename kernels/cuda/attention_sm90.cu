// Packed attention on Hopper: one warpgroup brings queries, keys and values by the copy engine, two multiply
// 64 rows each. A consumer starts the scores of the next block before the values of this one, and takes turns
// with the other: while one multiplies, the other exponentiates.
#include "kernels/cuda/attention_sm90.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/attention_forward.cuh"
#include "kernels/cuda/attention_maps.cuh"
#include "kernels/cuda/attention_sm90.cuh"

namespace fp4t::cuda {

namespace sm90 {
namespace {

constexpr int kStages = 2;
[[maybe_unused]] constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
[[maybe_unused]] constexpr int kTurnBarrier = kGroupBarrier + kConsumers;  // named barriers, one a consumer

template <int kD>
struct alignas(1024) Shared {
  Bf16 q[kConsumers][kGroupRows * kD];  // the output on its way, too
  Bf16 k[kStages][kBlockKeys * kD], v[kStages][kBlockKeys * kD];
  float sum[kD / 2 * kConsumers * kGroupThreads];
  ItemRing ring;
  uint64_t q_full, q_empty, v_part;
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

struct Maps {
  CUtensorMap rows, keys;  // boxes of kGroupRows and of kBlockKeys tokens
};

// Values of the last block, zero behind the tile's last key: another document's rows must not meet these.
template <int kD>
__device__ void load_last_values(Shared<kD>& shared, const CUtensorMap* map, const Use<kStages>& use,
                                 uint32_t parity, int head, int token, int valid) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    barrier_expect(shared_address(&shared.v_part), kBlockKeys * kD * 2);
    load_panels<kD>(map, shared.v[use.stage], kBlockKeys, &shared.v_part, head, token);
  }
  barrier_wait(shared_address(&shared.v_part), parity);
  clear_rows<kD>(shared.v[use.stage], kBlockKeys, valid);
  fence_async_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(shared_address(&shared.v_full[use.stage]));
}

// One warp.
template <int kD>
__device__ void produce(Shared<kD>& shared, const Maps& maps, const Items& items, const HeadShape& shape) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int heads = static_cast<int>(shape.heads), kv_heads = static_cast<int>(shape.kv_heads);
  const int group = heads / kv_heads;
  uint32_t keys = 0, values = 0, parts = 0;  // uses so far
  for_items<true>(shared.ring, items, [&](const AttentionTile& tile, int head, int n) {
    const int k_head = heads + head / group, v_head = k_head + kv_heads;
    const int num_keys = tile.begin - tile.doc_begin + tile.rows,
              blocks = (num_keys + kBlockKeys - 1) / kBlockKeys;
    const auto load_keys = [&](int b) {
      const Use<kStages> use(keys++);
      if (lane != 0) return;
      barrier_wait(shared_address(&shared.k_empty[use.stage]), use.parity ^ 1);
      barrier_expect(shared_address(&shared.k_full[use.stage]), kBlockKeys * kD * 2);
      load_panels<kD>(&maps.keys, shared.k[use.stage], kBlockKeys, &shared.k_full[use.stage], k_head,
                      tile.doc_begin + b * kBlockKeys);
    };
    const auto load_values = [&](int b) {
      const Use<kStages> use(values++);
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
      barrier_wait(shared_address(&shared.q_empty), static_cast<uint32_t>(n & 1) ^ 1);
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
  });
}

template <int kD>
struct Consumer {
  static constexpr int kSplitBlocks = kSplitKeys / kBlockKeys;
  Shared<kD>& shared;
  const PackedAttention& args;
  int consumer;
  uint32_t keys = 0, values = 0;  // uses so far

  __device__ __forceinline__ uint32_t q() const { return shared_address(shared.q[consumer]); }
  __device__ __forceinline__ void await_turn() const {
    named_barrier(kTurnBarrier + consumer, 2 * kGroupThreads);
  }
  __device__ __forceinline__ void give_turn() const {
    named_barrier_arrive(kTurnBarrier + 1 - consumer, 2 * kGroupThreads);
  }

  __device__ __forceinline__ void start_scores(Fragment<kBlockKeys>& s, const Use<kStages>& use) const {
    pin(s);
    wgmma_fence();
    start_rows<kD, kBlockKeys>(q(), kGroupRows, shared_address(shared.k[use.stage]), kBlockKeys, s);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_values(uint32_t (&p)[kBlockKeys / 16][4], Fragment<kD>& o,
                                               const Use<kStages>& use) const {
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
    const Use<kStages> use(keys++);
    barrier_wait(shared_address(&shared.k_full[use.stage]), use.parity);
    await_turn();
    start_scores(s, use);
    give_turn();
    wgmma_wait<0>();
    pin(s);
    free_stage(&shared.k_empty[use.stage]);
    if (blocks == 1) mask(s, 0);
    softmax_block<kBlockKeys>(s, args.c, state, rescale);
    pack_operand<kBlockKeys>(s, p);
    for (int b = 1; b < blocks; ++b) {
      const Use<kStages> key_use(keys++), value_use(values++);
      barrier_wait(shared_address(&shared.k_full[key_use.stage]), key_use.parity);
      await_turn();
      start_scores(s, key_use);
      barrier_wait(shared_address(&shared.v_full[value_use.stage]), value_use.parity);
      start_values(p, o, value_use);
      give_turn();
      wgmma_wait<1>();
      pin(s);
      free_stage(&shared.k_empty[key_use.stage]);
      const bool split_ends = b % kSplitBlocks == 0;
      SoftmaxState ended = state;
      if (split_ends) state.clear();
      if (b == blocks - 1) mask(s, b);
      softmax_block<kBlockKeys>(s, args.c, state, rescale);
      wgmma_wait<0>();
      pin(o);
      free_stage(&shared.v_empty[value_use.stage]);
      pack_operand<kBlockKeys>(s, p);
      if (split_ends) {
        total.add(args.c, o, ended);
      } else {
        rescale_rows<kD>(o, rescale);
      }
    }
    const Use<kStages> last(values++);
    barrier_wait(shared_address(&shared.v_full[last.stage]), last.parity);
    start_values(p, o, last);
    wgmma_wait<0>();
    pin(o);
    free_stage(&shared.v_empty[last.stage]);
    total.join(args.c, o, state);
    const int columns = static_cast<int>(args.shape.head_dim);
    const int64_t first = (int64_t{tile.begin} + consumer * kGroupRows) * args.shape.heads + head;
    store_tile<kD>(shared.q[consumer], consumer, o, {1.0f / total.l[0], 1.0f / total.l[1]},
                   args.out + first * columns, args.shape.heads * columns, tile.rows - consumer * kGroupRows,
                   columns);
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
    free_stage(&shared.q_empty);
  }
};

template <int kD>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ Maps maps, PackedAttention args, Items items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<kD>& shared = *reinterpret_cast<Shared<kD>*>(memory);
  if (threadIdx.x == 0) {
    shared.ring.init();
    barrier_init(shared_address(&shared.q_full), 1);
    barrier_init(shared_address(&shared.q_empty), kConsumerWarps);
    barrier_init(shared_address(&shared.v_part), 1);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(&shared.k_full[s]), 1);
      barrier_init(shared_address(&shared.v_full[s]), 1);
      barrier_init(shared_address(&shared.k_empty[s]), kConsumerWarps);
      barrier_init(shared_address(&shared.v_empty[s]), kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int group = uniform(static_cast<int>(threadIdx.x) / kGroupThreads);
  if (group == 0) {
    registers_down<kProducerRegisters>();
    if (threadIdx.x < 32) produce<kD>(shared, maps, items, args.shape);
  } else {
    registers_up<kConsumerRegisters>();
    Consumer<kD> consumer{shared, args, group - 1};
    if (group == 2) consumer.give_turn();  // the first consumer begins
    for_items<false>(shared.ring, items, [&](const AttentionTile& tile, int head, int n) {
      consumer.tile(tile, head, static_cast<uint32_t>(n & 1));
    });
  }
#endif
}

template <int kD>
void launch(Queue& queue, const char* op, const PackedAttention& args, const AttentionTiles& tiles) {
  const Context& context = context_of(queue);
  const HeadShape& shape = args.shape;
  const int64_t all_heads = shape.heads + 2 * shape.kv_heads;
  const Maps maps{head_map(args.qkv, shape.head_dim, all_heads, args.tokens, kGroupRows),
                  head_map(args.qkv, shape.head_dim, all_heads, args.tokens, kBlockKeys)};
  constexpr int kBytes = static_cast<int>(sizeof(Shared<kD>));
  FP4T_CUDA(cudaFuncSetAttribute(attention_kernel<kD>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto grid = static_cast<unsigned>(std::min<int64_t>(context.sm_count, args.tokens * shape.heads));
  // Query heads of a group share keys and values.
  const int64_t shared_bytes = args.tokens * shape.head_dim * 4 / shape.group();
  attention_kernel<kD><<<grid, kThreads, kBytes, context.stream>>>(
      maps, args, items_of(op, tiles, args.tokens, shape.heads, shared_bytes));
  check_launch(op);
}

}  // namespace
}  // namespace sm90

void attention_sm90(Queue& queue, const char* op, const PackedAttention& args, const AttentionTiles& tiles) {
  if (args.shape.head_dim <= 64) {
    sm90::launch<64>(queue, op, args, tiles);
  } else {
    sm90::launch<128>(queue, op, args, tiles);
  }
}

}  // namespace fp4t::cuda
