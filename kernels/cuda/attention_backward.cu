// The gradient of causal attention in BF16 on tensor cores, in two passes: one owns tiles of dQ, one tiles of
// dK and dV, so that every sum has one owner and one order. P and dS are rounded to BF16 as operands; all
// sums are FP32.
#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/attention_backward.cuh"
#include "kernels/cuda/attention_general.cuh"
#include "kernels/cuda/attention_select.h"
#include "kernels/cuda/attention_sm90.h"
#include "kernels/cuda/load.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kRows = kOwnRows, kThreads = 256;  // eight warps of 16 rows
constexpr int kStep = kStepRows;

// One warp a row and head.
__global__ void __launch_bounds__(kThreads) row_kernel(BackwardAttention args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t place = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32, dim = args.shape.head_dim;
  if (place >= args.tokens * args.shape.heads) return;
  float sum = 0.0f;
  if (lane * 4 < dim) {
    const uint2 a = *reinterpret_cast<const uint2*>(args.out + place * dim + lane * 4);
    const uint2 b = *reinterpret_cast<const uint2*>(args.dout + place * dim + lane * 4);
    sum = float_of(a.x << 16) * float_of(b.x << 16);
    sum = __fmaf_rn(float_of(a.x & 0xFFFF0000u), float_of(b.x & 0xFFFF0000u), sum);
    sum = __fmaf_rn(float_of(a.y << 16), float_of(b.y << 16), sum);
    sum = __fmaf_rn(float_of(a.y & 0xFFFF0000u), float_of(b.y & 0xFFFF0000u), sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) {
    const int64_t t = place / args.shape.heads, head = place % args.shape.heads;
    args.rows[head * args.tokens + t] =
        make_float4(args.lse[place] * 1.44269504088896340736f, sum, 0.0f, 0.0f);
  }
}

// A row that is not there: every probability is 0.
__device__ __forceinline__ float4 no_row() { return make_float4(INFINITY, 0.0f, 0.0f, 0.0f); }

template <int kD>
struct QueryShared {
  Bf16 q[kRows * kD], dout[kRows * kD];
  Bf16 k[2][kStep * kD], v[2][kStep * kD];
};

template <int kD>
__device__ void query_tile(const BackwardAttention& args, const AttentionTile& tile, int64_t head,
                           QueryShared<kD>& shared) {
  const HeadShape& shape = args.shape;
  const int columns = static_cast<int>(shape.head_dim), lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int64_t width = shape.width(), kv_head = head / shape.group(), dout_stride = shape.heads * columns;
  const Bf16* first = args.qkv + tile.doc_begin * width;
  const int before = tile.begin - tile.doc_begin, num_keys = before + tile.rows;
  const int num_blocks = (num_keys + kStep - 1) / kStep;
  const uint32_t q = shared_address(shared.q), dout = shared_address(shared.dout);
  const auto load_block = [&](int b) {
    const Bf16* row = first + int64_t{b} * kStep * width;
    const int valid = num_keys - b * kStep;
    load_tile<kD, kThreads>(shared_address(shared.k[b % 2]), kStep, row + shape.k(kv_head), width, valid,
                            columns);
    load_tile<kD, kThreads>(shared_address(shared.v[b % 2]), kStep, row + shape.v(kv_head), width, valid,
                            columns);
    cp_async_commit();
  };
  __syncthreads();  // the tile before this is done with shared memory
  load_tile<kD, kThreads>(q, kRows, first + before * width + shape.q(head), width, tile.rows, columns);
  load_tile<kD, kThreads>(dout, kRows, args.dout + tile.begin * dout_stride + head * columns, dout_stride,
                          tile.rows, columns);
  load_block(0);
  float4 rows[2];
  int last_key[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp_row + lane / 4 + 8 * h;
    rows[h] = row < tile.rows ? args.rows[head * args.tokens + tile.begin + row] : no_row();
    last_key[h] = before + row;
  }
  Fragment<kD> dq;
  clear<kD>(dq);
  for (int b = 0; b < num_blocks; ++b) {
    if (b + 1 < num_blocks) {
      load_block(b + 1);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    const uint32_t k = shared_address(shared.k[b % 2]), v = shared_address(shared.v[b % 2]);
    Fragment<kStep> s, dp;
    clear<kStep>(s);
    clear<kStep>(dp);
    multiply_rows<kD, kStep>(q, kRows, warp_row, k, kStep, s);
    multiply_rows<kD, kStep>(dout, kRows, warp_row, v, kStep, dp);
    const int first_key = b * kStep + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2;
        const float p = exp2_approx(__fmaf_rn(s[j][i], args.c, -rows[h].x));
        s[j][i] = first_key + 8 * j + i % 2 <= last_key[h] ? p * (dp[j][i] - rows[h].y) : 0.0f;
      }
    }
    uint32_t ds[kStep / 16][4];
    pack_operand<kStep>(s, ds);
    multiply_columns<kD, kStep>(ds, k, kStep, dq);
    __syncthreads();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp_row + lane / 4 + 8 * h;
    if (row >= tile.rows) continue;
    Bf16* to = args.dqkv + (int64_t{tile.begin} + row) * width + shape.q(head) + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
      if (8 * j >= columns) continue;
      *reinterpret_cast<uint32_t*>(to + 8 * j) =
          pack_bf16(dq[j][2 * h] * args.scale, dq[j][2 * h + 1] * args.scale);
    }
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1) query_kernel(BackwardAttention args, AttentionTiles tiles) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int64_t heads = args.shape.heads, items = *tiles.count * heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    query_tile<kD>(args, tiles.tiles[item / heads], item % heads,
                   *reinterpret_cast<QueryShared<kD>*>(memory));
  }
}

// Of queries; what 128 columns leave registers for. The order of every sum is the same with any step.
template <int kD>
inline constexpr int kKeyStep = kD == 128 ? 32 : kStep;

template <int kD>
struct KeyShared {
  Bf16 k[kRows * kD], v[kRows * kD];
  Bf16 q[2][kKeyStep<kD> * kD], dout[2][kKeyStep<kD> * kD];
  float4 rows[2][kKeyStep<kD>];
};

// Scores and their gradients lie transposed here: keys along the rows, queries along the columns.
template <int kD>
__device__ void key_tile(const BackwardAttention& args, const AttentionTile& tile, int64_t kv_head,
                         KeyShared<kD>& shared) {
  const HeadShape& shape = args.shape;
  const int columns = static_cast<int>(shape.head_dim), lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int64_t width = shape.width(), dout_stride = shape.heads * columns;
  const int num_queries = tile.doc_end - tile.begin;
  const int blocks = (num_queries + kKeyStep<kD> - 1) / kKeyStep<kD>,
            num_steps = blocks * static_cast<int>(shape.group());
  const uint32_t k = shared_address(shared.k), v = shared_address(shared.v);
  const auto load_step = [&](int step) {
    const int64_t head = kv_head * shape.group() + step / blocks,
                  row = int64_t{tile.begin} + step % blocks * kKeyStep<kD>;
    const int valid = num_queries - step % blocks * kKeyStep<kD>, stage = step % 2;
    load_tile<kD, kThreads>(shared_address(shared.q[stage]), kKeyStep<kD>,
                            args.qkv + row * width + shape.q(head), width, valid, columns);
    load_tile<kD, kThreads>(shared_address(shared.dout[stage]), kKeyStep<kD>,
                            args.dout + row * dout_stride + head * columns, dout_stride, valid, columns);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kKeyStep<kD>) {
      shared.rows[stage][thread] = thread < valid ? args.rows[head * args.tokens + row + thread] : no_row();
    }
    cp_async_commit();
  };
  const Bf16* first = args.qkv + tile.begin * width;
  __syncthreads();  // the tile before this is done with shared memory
  load_tile<kD, kThreads>(k, kRows, first + shape.k(kv_head), width, tile.rows, columns);
  load_tile<kD, kThreads>(v, kRows, first + shape.v(kv_head), width, tile.rows, columns);
  load_step(0);
  Fragment<kD> dk, dv;
  clear<kD>(dk);
  clear<kD>(dv);
  for (int step = 0; step < num_steps; ++step) {
    if (step + 1 < num_steps) {
      load_step(step + 1);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    const uint32_t q = shared_address(shared.q[step % 2]), dout = shared_address(shared.dout[step % 2]);
    Fragment<kKeyStep<kD>> s;  // scores, then dP
    clear<kKeyStep<kD>>(s);
    multiply_rows<kD, kKeyStep<kD>>(k, kRows, warp_row, q, kKeyStep<kD>, s);
    const int thread = thread_now(), first_query = step % blocks * kKeyStep<kD> + thread % 4 * 2;
    const int first_key = thread / 32 * 16 + thread % 32 / 4;
    const float4* rows = &shared.rows[step % 2][thread % 4 * 2];
#pragma unroll
    for (int j = 0; j < kKeyStep<kD> / 8; ++j) {
      const float lse[2] = {rows[8 * j].x, rows[8 * j + 1].x};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + i / 2 * 8, query = first_query + 8 * j + i % 2;
        const float p = exp2_approx(__fmaf_rn(s[j][i], args.c, -lse[i % 2]));
        s[j][i] = key <= query ? p : 0.0f;
      }
    }
    uint32_t operand[kKeyStep<kD> / 16][4];
    pack_operand<kKeyStep<kD>>(s, operand);
    multiply_columns<kD, kKeyStep<kD>>(operand, dout, kKeyStep<kD>, dv);
    clear<kKeyStep<kD>>(s);
    multiply_rows<kD, kKeyStep<kD>>(v, kRows, warp_row, dout, kKeyStep<kD>, s);
    // dS from the rounded P, as on Hopper.
#pragma unroll
    for (int j = 0; j < kKeyStep<kD> / 8; ++j) {
      const float delta[2] = {rows[8 * j].y, rows[8 * j + 1].y};
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] = operand_element(operand, j, i) * (s[j][i] - delta[i % 2]);
    }
    pack_operand<kKeyStep<kD>>(s, operand);
    multiply_columns<kD, kKeyStep<kD>>(operand, q, kKeyStep<kD>, dk);
    __syncthreads();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp_row + lane / 4 + 8 * h;
    if (row >= tile.rows) continue;
    Bf16* to = args.dqkv + (int64_t{tile.begin} + row) * width + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
      if (8 * j >= columns) continue;
      *reinterpret_cast<uint32_t*>(to + shape.k(kv_head) + 8 * j) =
          pack_bf16(dk[j][2 * h] * args.scale, dk[j][2 * h + 1] * args.scale);
      *reinterpret_cast<uint32_t*>(to + shape.v(kv_head) + 8 * j) = pack_bf16(dv[j][2 * h], dv[j][2 * h + 1]);
    }
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1) key_kernel(BackwardAttention args, AttentionTiles tiles) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int64_t heads = args.shape.kv_heads, items = *tiles.count * heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    key_tile<kD>(args, tiles.tiles[item / heads], item % heads, *reinterpret_cast<KeyShared<kD>*>(memory));
  }
}

template <class Shared, class Kernel>
void launch(Queue& queue, const char* op, const Kernel& kernel, const BackwardAttention& args, int64_t heads,
            const AttentionTiles& tiles) {
  const Context& context = context_of(queue);
  constexpr int kBytes = static_cast<int>(sizeof(Shared));
  FP4T_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto grid = static_cast<unsigned>(std::min<int64_t>(context.sm_count, args.tokens * heads));
  kernel<<<grid, kThreads, kBytes, context.stream>>>(args, tiles);
  check_launch(op);
}

template <int kD>
void launch_both(Queue& queue, const char* op, const BackwardAttention& args, const BackwardTiles& tiles) {
  launch<QueryShared<kD>>(queue, op, query_kernel<kD>, args, args.shape.heads, tiles.queries);
  launch<KeyShared<kD>>(queue, op, key_kernel<kD>, args, args.shape.kv_heads, tiles.keys);
}

}  // namespace

void run(Queue& queue, const AttentionBackward& op) {
  const int64_t tokens = op.qkv.dim(0);
  if (tokens == 0) return;
  if (!attention_on_tensor_cores(op.qkv.dtype, op.head_dim, op.scale)) return general_attention(queue, op);
  Workspace workspace(queue);
  const AlignedInput qkv(queue, workspace, op.qkv), out(queue, workspace, op.out),
      dout(queue, workspace, op.dout);
  const AlignedOutput dqkv(queue, workspace, op.dqkv);
  const BackwardAttention args{qkv.as<Bf16>(),
                               {op.heads, op.kv_heads, op.head_dim},
                               tokens,
                               op.scale,
                               score_factor(op.scale),
                               out.as<Bf16>(),
                               dout.as<Bf16>(),
                               op.lse.as<float>(),
                               workspace.take<float4>(tokens * op.heads),
                               dqkv.as<Bf16>()};
  row_kernel<<<static_cast<unsigned>(ceil_div(tokens * op.heads, kThreads / 32)), kThreads, 0,
               stream_of(queue)>>>(args);
  check_launch(op.kName);
  const auto plan = [&](TileCost cost) {
    return plan_tiles(queue, workspace, op.kName, op.doc_begin.as<int32_t>(), tokens, kOwnRows, cost);
  };
  const BackwardTiles tiles{plan(TileCost::kKeysBefore), plan(TileCost::kQueriesAfter)};
  if (on_sm90(queue)) {
    attention_backward_sm90(queue, op.kName, args, tiles);
  } else if (op.head_dim <= 64) {
    launch_both<64>(queue, op.kName, args, tiles);
  } else {
    launch_both<128>(queue, op.kName, args, tiles);
  }
  dqkv.finish();
}

}  // namespace fp4t::cuda
