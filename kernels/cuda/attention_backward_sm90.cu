// The gradient of packed attention on Hopper: the two passes of attention_backward.cu, with the same steps in
// the same order. A producer brings an owner's tile (queries and dO, or keys and values) and streams the
// other side in steps of 64 rows; each of two consumers multiplies 64 rows of the owner's. While one consumer
// exponentiates, the products of the other run.
#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/attention_backward.cuh"
#include "kernels/cuda/attention_maps.cuh"
#include "kernels/cuda/attention_sm90.cuh"

namespace fp4t::cuda {

namespace sm90 {
namespace {

constexpr int kStages = 3;
[[maybe_unused]] constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
using Turn = Use<kStages>;

template <int kD>
struct alignas(1024) Shared {
  // The owner's tile, and its gradients on their way: q and dO, or k and v.
  Bf16 own[2][kConsumers][kGroupRows * kD];
  Bf16 step[kStages][2][kStepRows * kD];  // k and v, or q and dO
  float4 rows[kStages][kStepRows];        // of the step's queries
  ItemRing ring;
  uint64_t own_full, own_empty, part;
  uint64_t full[kStages], empty[kStages];
};

struct Maps {
  CUtensorMap qkv, dout;  // boxes of 64 tokens
};

// Whose tile it is, by its heads among those of qkv. First and second: operands of the scores and of dP.
template <bool kKeys>
struct OwnerOf {
  static constexpr bool kOwnsKeys = kKeys;
  int heads, kv_heads, group;
};
using QueryOwner = OwnerOf<false>;
using KeyOwner = OwnerOf<true>;

// A step's rows behind `valid` come as nothing: zeros, and for queries a probability of zero. The lane that
// arrives for the step writes the latter, see ItemRing.
template <int kD, bool kQueries>
__device__ __forceinline__ void clear_step(Shared<kD>& shared, int stage, int valid) {
#pragma unroll 1
  for (int which = 0; which < 2; ++which) clear_rows<kD>(shared.step[stage][which], kStepRows, valid);
  if constexpr (kQueries) {
    if (thread_now() != 0) return;
#pragma unroll 1
    for (int row = valid; row < kStepRows; ++row) {
      shared.rows[stage][row] = make_float4(INFINITY, 0.0f, 0.0f, 0.0f);
    }
  }
}

// One warp.
template <int kD, class Owner>
__device__ void produce(Shared<kD>& shared, const Maps& maps, const Items& items, const Owner& owner,
                        const float4* rows, int tokens) {
  constexpr bool kOwnsKeys = Owner::kOwnsKeys;
  constexpr uint32_t kTileBytes = kStepRows * kD * 2, kRowBytes = kOwnsKeys ? kStepRows * sizeof(float4) : 0;
  uint32_t uses = 0, parts = 0;
  for_items<true>(shared.ring, items, [&](const AttentionTile& tile, int head, int n) {
    if (thread_now() == 0) {
      barrier_wait(shared_address(&shared.own_empty), static_cast<uint32_t>(n & 1) ^ 1);
      barrier_expect(shared_address(&shared.own_full), 2 * kConsumers * kTileBytes);
      const int first = kOwnsKeys ? owner.heads + head : head,
                second = kOwnsKeys ? first + owner.kv_heads : head;
#pragma unroll 1
      for (int c = 0; c < kConsumers; ++c) {
        const int token = tile.begin + c * kGroupRows;
        load_panels<kD>(&maps.qkv, shared.own[0][c], kGroupRows, &shared.own_full, first, token);
        load_panels<kD>(kOwnsKeys ? &maps.qkv : &maps.dout, shared.own[1][c], kGroupRows, &shared.own_full,
                        second, token);
      }
    }
    const int first_head = kOwnsKeys ? head * owner.group : owner.heads + head / owner.group;
    const int num_heads = kOwnsKeys ? owner.group : 1;
    const int first_token = kOwnsKeys ? tile.begin : tile.doc_begin;
    const int end = kOwnsKeys ? tile.doc_end : tile.begin + tile.rows;
    for (int from = first_head; from < first_head + num_heads; ++from) {
      for (int token = first_token; token < end; token += kStepRows) {
        const Turn use(uses++);
        const bool whole = end - token >= kStepRows;
        if (thread_now() == 0) {
          uint64_t* arrived = whole ? &shared.full[use.stage] : &shared.part;
          barrier_wait(shared_address(&shared.empty[use.stage]), use.parity ^ 1);
          barrier_expect(shared_address(arrived), 2 * kTileBytes + (whole ? kRowBytes : 0));
          load_panels<kD>(&maps.qkv, shared.step[use.stage][0], kStepRows, arrived, from, token);
          load_panels<kD>(kOwnsKeys ? &maps.dout : &maps.qkv, shared.step[use.stage][1], kStepRows, arrived,
                          kOwnsKeys ? from : from + owner.kv_heads, token);
          if (kOwnsKeys && whole) {
            bulk_load(shared_address(shared.rows[use.stage]), rows + int64_t{from} * tokens + token,
                      kRowBytes, shared_address(arrived));
          }
        }
        if (!whole) {
          __syncwarp();
          barrier_wait(shared_address(&shared.part), parts++ & 1u);
          clear_step<kD, kOwnsKeys>(shared, use.stage, end - token);
          fence_async_shared();
          __syncwarp();
          if (thread_now() == 0) {
            const uint32_t full = shared_address(&shared.full[use.stage]);
            if constexpr (kOwnsKeys) {  // only now: consumers wait at this barrier
              const uint32_t bytes = static_cast<uint32_t>(end - token) * sizeof(float4);
              barrier_expect(full, bytes);
              bulk_load(shared_address(shared.rows[use.stage]), rows + int64_t{from} * tokens + token, bytes,
                        full);
            } else {
              barrier_arrive(full);
            }
          }
        }
      }
    }
    __syncwarp();
  });
}

// out[owner's 64 rows][64 of the step]: scores (0) or dP (1).
template <int kD>
__device__ __forceinline__ void start_product(Shared<kD>& shared, int consumer, const Turn& use, int which,
                                              Fragment<kStepRows>& out) {
  pin(out);
  wgmma_fence();
  start_rows<kD, kStepRows>(shared_address(shared.own[which][consumer]), kGroupRows,
                            shared_address(shared.step[use.stage][which]), kStepRows, out);
  wgmma_commit();
}

template <int kD>
__device__ __forceinline__ void await_step(Shared<kD>& shared, const Turn& use) {
  barrier_wait(shared_address(&shared.full[use.stage]), use.parity);
}

// sum += operand * (tile `which` of the step).
template <int kD>
__device__ __forceinline__ void start_sum(Shared<kD>& shared, const Turn& use, int which,
                                          uint32_t (&operand)[kStepRows / 16][4], Fragment<kD>& sum) {
  pin(operand);
  pin(sum);
  wgmma_fence();
  start_columns<kD, kStepRows>(operand, shared_address(shared.step[use.stage][which]), kStepRows, sum);
  wgmma_commit();
}

template <int kD>
__device__ void query_tile(Shared<kD>& shared, const BackwardAttention& args, const AttentionTile& tile,
                           int head, int consumer, uint32_t round_parity, uint32_t& uses) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int my_row = consumer * kGroupRows + warp * 16 + lane / 4, before = tile.begin - tile.doc_begin;
  const int num_steps = (before + tile.rows + kStepRows - 1) / kStepRows;
  // Steps from here on have keys that some row of this consumer does not read.
  const int first_masked = (before + consumer * kGroupRows) / kStepRows;
  float lse[2], delta[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = my_row + 8 * h;
    const bool there = row < tile.rows;
    const float4 given = there ? args.rows[head * args.tokens + tile.begin + row] : make_float4(0, 0, 0, 0);
    lse[h] = there ? given.x : INFINITY;
    delta[h] = given.y;
  }
  Fragment<kD> dq;
  Fragment<kStepRows> s, dp;
  uint32_t ds[kStepRows / 16][4];
  clear<kD>(dq);
  barrier_wait(shared_address(&shared.own_full), round_parity);
  const auto exponentiate = [&](int step) {
    pin(s);
#pragma unroll
    for (int j = 0; j < kStepRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] = exp2_approx(__fmaf_rn(s[j][i], args.c, -lse[i / 2]));
    }
    if (step >= first_masked) {
      const int key = step * kStepRows + lane % 4 * 2 - before - my_row;
#pragma unroll
      for (int j = 0; j < kStepRows / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (key + 8 * j + i % 2 > i / 2 * 8) s[j][i] = 0.0f;
        }
      }
    }
  };
  const auto finish_step = [&] {
    pin(dp);
#pragma unroll
    for (int j = 0; j < kStepRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dp[j][i] = s[j][i] * (dp[j][i] - delta[i / 2]);
    }
    pack_operand<kStepRows>(dp, ds);
  };
  await_step(shared, Turn(uses));
  start_product(shared, consumer, Turn(uses), 0, s);
  start_product(shared, consumer, Turn(uses), 1, dp);
  wgmma_wait<1>();
  exponentiate(0);
  wgmma_wait<0>();
  finish_step();
  for (int step = 1; step < num_steps; ++step) {
    const Turn before_use(uses++), use(uses);
    await_step(shared, use);
    start_product(shared, consumer, use, 0, s);
    start_sum(shared, before_use, 0, ds, dq);
    start_product(shared, consumer, use, 1, dp);
    wgmma_wait<2>();
    exponentiate(step);
    wgmma_wait<0>();
    pin(dq);
    free_stage(&shared.empty[before_use.stage]);
    finish_step();
  }
  const Turn last(uses++);
  start_sum(shared, last, 0, ds, dq);
  wgmma_wait<0>();
  pin(dq);
  free_stage(&shared.empty[last.stage]);
  const int64_t width = args.shape.width();
  store_tile<kD>(shared.own[0][consumer], consumer, dq, {args.scale, args.scale},
                 args.dqkv + (int64_t{tile.begin} + consumer * kGroupRows) * width + args.shape.q(head),
                 width, tile.rows - consumer * kGroupRows, static_cast<int>(args.shape.head_dim));
  fence_async_shared();
  __syncwarp();
  free_stage(&shared.own_empty);
}

// Scores and dP lie transposed here: keys along the rows, queries along the columns.
template <int kD>
__device__ void key_tile(Shared<kD>& shared, const BackwardAttention& args, const AttentionTile& tile,
                         int head, int consumer, uint32_t round_parity, uint32_t& uses) {
  const int steps_a_head = (tile.doc_end - tile.begin + kStepRows - 1) / kStepRows;
  const int num_steps = steps_a_head * static_cast<int>(args.shape.group());
  Fragment<kD> dk, dv;
  Fragment<kStepRows> s;  // scores, then dP
  uint32_t p[kStepRows / 16][4], ds[kStepRows / 16][4];
  clear<kD>(dk);
  clear<kD>(dv);
  barrier_wait(shared_address(&shared.own_full), round_parity);
  int in_head = 0;
  const auto exponentiate = [&](const Turn& use) {
    const float4* rows = shared.rows[use.stage] + thread_now() % 4 * 2;
    pin(s);
#pragma unroll
    for (int j = 0; j < kStepRows / 8; ++j) {
      const float lse[2] = {rows[8 * j].x, rows[8 * j + 1].x};
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] = exp2_approx(__fmaf_rn(s[j][i], args.c, -lse[i % 2]));
    }
    if (in_head <= consumer) {
      // How far this thread's first key lies behind its first query.
      const int thread = thread_now() % kGroupThreads;
      const int behind =
          (consumer - in_head) * kStepRows + thread / 32 * 16 + thread % 32 / 4 - thread % 4 * 2;
#pragma unroll
      for (int j = 0; j < kStepRows / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * j + i % 2 < behind + i / 2 * 8) s[j][i] = 0.0f;
        }
      }
    }
    pack_operand<kStepRows>(s, p);
    if (++in_head == steps_a_head) in_head = 0;
  };
  // dS from P as the product for dV has it, rounded: FP32 would not find room.
  const auto finish_step = [&](const Turn& use) {
    const float4* rows = shared.rows[use.stage] + thread_now() % 4 * 2;
    pin(s);
#pragma unroll
    for (int j = 0; j < kStepRows / 8; ++j) {
      const float delta[2] = {rows[8 * j].y, rows[8 * j + 1].y};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[j][i] = operand_element(p, j, i) * (s[j][i] - delta[i % 2]);
      }
    }
    pack_operand<kStepRows>(s, ds);
  };
  await_step(shared, Turn(uses));
  start_product(shared, consumer, Turn(uses), 0, s);
  wgmma_wait<0>();
  exponentiate(Turn(uses));
  for (int step = 1;; ++step) {
    const Turn use(uses);
    start_product(shared, consumer, use, 1, s);
    start_sum(shared, use, 1, p, dv);
    wgmma_wait<1>();
    finish_step(use);
    wgmma_wait<0>();
    pin(dv);
    if (step == num_steps) break;
    const Turn next(++uses);
    await_step(shared, next);
    start_product(shared, consumer, next, 0, s);
    start_sum(shared, use, 0, ds, dk);
    wgmma_wait<1>();
    exponentiate(next);
    wgmma_wait<0>();
    pin(dk);
    barrier_arrive(shared_address(&shared.empty[use.stage]));
  }
  const Turn last(uses++);
  start_sum(shared, last, 0, ds, dk);
  wgmma_wait<0>();
  pin(dk);
  barrier_arrive(shared_address(&shared.empty[last.stage]));
  const int64_t width = args.shape.width();
  Bf16* first = args.dqkv + (int64_t{tile.begin} + consumer * kGroupRows) * width;
  const int rows_left = tile.rows - consumer * kGroupRows, columns = static_cast<int>(args.shape.head_dim);
  store_tile<kD>(shared.own[0][consumer], consumer, dk, {args.scale, args.scale}, first + args.shape.k(head),
                 width, rows_left, columns);
  store_tile<kD>(shared.own[1][consumer], consumer, dv, {1.0f, 1.0f}, first + args.shape.v(head), width,
                 rows_left, columns);
  fence_async_shared();
  __syncwarp();
  free_stage(&shared.own_empty);
}

template <int kD, class Owner>
__global__ void __launch_bounds__(kThreads, 1)
    gradient_kernel(const __grid_constant__ Maps maps, BackwardAttention args, Items items, Owner owner) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<kD>& shared = *reinterpret_cast<Shared<kD>*>(memory);
  if (threadIdx.x == 0) {
    shared.ring.init();
    barrier_init(shared_address(&shared.own_full), 1);
    barrier_init(shared_address(&shared.own_empty), kConsumerWarps);
    barrier_init(shared_address(&shared.part), 1);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(&shared.full[s]), 1);
      barrier_init(shared_address(&shared.empty[s]), Owner::kOwnsKeys ? kConsumerThreads : kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int group = uniform(static_cast<int>(threadIdx.x) / kGroupThreads);
  if (group == 0) {
    registers_down<kProducerRegisters>();
    if (threadIdx.x < 32) {
      produce<kD>(shared, maps, items, owner, args.rows, static_cast<int>(args.tokens));
    }
  } else {
    registers_up<kConsumerRegisters>();
    uint32_t uses = 0;
    for_items<false>(shared.ring, items, [&](const AttentionTile& tile, int head, int n) {
      if constexpr (Owner::kOwnsKeys) {
        key_tile<kD>(shared, args, tile, head, group - 1, static_cast<uint32_t>(n & 1), uses);
      } else {
        query_tile<kD>(shared, args, tile, head, group - 1, static_cast<uint32_t>(n & 1), uses);
      }
    });
  }
#endif
}

template <int kD, class Owner>
void launch(Queue& queue, const char* op, const Maps& maps, const BackwardAttention& args,
            const BackwardTiles& tiles) {
  const Context& context = context_of(queue);
  const HeadShape& shape = args.shape;
  const int64_t heads = Owner::kOwnsKeys ? shape.kv_heads : shape.heads;
  // Two tensors of a head; query heads of a group read the same keys and values.
  const int64_t shared_bytes = args.tokens * shape.head_dim * 4 / (Owner::kOwnsKeys ? 1 : shape.group());
  constexpr int kBytes = static_cast<int>(sizeof(Shared<kD>));
  FP4T_CUDA(
      cudaFuncSetAttribute(gradient_kernel<kD, Owner>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto grid = static_cast<unsigned>(std::min<int64_t>(context.sm_count, args.tokens * heads));
  const Owner owner{static_cast<int>(shape.heads), static_cast<int>(shape.kv_heads),
                    static_cast<int>(shape.group())};
  gradient_kernel<kD, Owner><<<grid, kThreads, kBytes, context.stream>>>(
      maps, args,
      items_of(op, Owner::kOwnsKeys ? tiles.keys : tiles.queries, args.tokens, heads, shared_bytes), owner);
  check_launch(op);
}

template <int kD>
void launch_both(Queue& queue, const char* op, const BackwardAttention& args, const BackwardTiles& tiles) {
  const HeadShape& shape = args.shape;
  const Maps maps{
      head_map(args.qkv, shape.head_dim, shape.heads + 2 * shape.kv_heads, args.tokens, kStepRows),
      head_map(args.dout, shape.head_dim, shape.heads, args.tokens, kStepRows)};
  launch<kD, QueryOwner>(queue, op, maps, args, tiles);
  launch<kD, KeyOwner>(queue, op, maps, args, tiles);
}

}  // namespace
}  // namespace sm90

void attention_backward_sm90(Queue& queue, const char* op, const BackwardAttention& args,
                             const BackwardTiles& tiles) {
  if (args.shape.head_dim <= 64) {
    sm90::launch_both<64>(queue, op, args, tiles);
  } else {
    sm90::launch_both<128>(queue, op, args, tiles);
  }
}

}  // namespace fp4t::cuda
