// Causal attention of packed documents in BF16 on tensor cores.
#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/attention_forward.cuh"
#include "kernels/cuda/attention_general.cuh"
#include "kernels/cuda/attention_plan.cuh"
#include "kernels/cuda/attention_select.h"
#include "kernels/cuda/attention_sm90.h"
#include "kernels/cuda/load.cuh"
#include "kernels/ops/run.h"

namespace fp4t::cuda {

namespace {

constexpr int kRows = kPackedRows, kThreads = 2 * kGroupThreads;

template <int kD>
struct Shared {
  Bf16 q[kRows * kD];
  Bf16 k[2][kBlockKeys * kD], v[2][kBlockKeys * kD];
  float sum[kD / 2 * kThreads];
};

// Rows of one tile with one query head.
template <int kD>
__device__ void attend_tile(const PackedAttention& args, const AttentionTile& tile, int64_t head,
                            Shared<kD>& shared) {
  const HeadShape& shape = args.shape;
  const int columns = static_cast<int>(shape.head_dim), lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int64_t width = shape.width(), kv_head = head / shape.group();
  const Bf16* first = args.qkv + tile.doc_begin * width;
  const int before = tile.begin - tile.doc_begin, num_keys = before + tile.rows;
  const int num_blocks = (num_keys + kBlockKeys - 1) / kBlockKeys;
  const uint32_t q = shared_address(shared.q);
  const auto load_block = [&](int b) {
    const Bf16* row = first + int64_t{b} * kBlockKeys * width;
    const int valid = num_keys - b * kBlockKeys;
    load_tile<kD, kThreads>(shared_address(shared.k[b % 2]), kBlockKeys, row + shape.k(kv_head), width, valid,
                            columns);
    load_tile<kD, kThreads>(shared_address(shared.v[b % 2]), kBlockKeys, row + shape.v(kv_head), width, valid,
                            columns);
    cp_async_commit();
  };
  load_tile<kD, kThreads>(q, kRows, first + before * width + shape.q(head), width, tile.rows, columns);
  load_block(0);

  Fragment<kD> o;
  clear<kD>(o);
  SoftmaxState state;
  state.clear();
  SplitSum<kD, kThreads> total{shared.sum + threadIdx.x, {}, {}, false};
  for (int b = 0; b < num_blocks; ++b) {
    if (b > 0 && b % (kSplitKeys / kBlockKeys) == 0) total.add(args.c, o, state);
    if (b + 1 < num_blocks) {
      load_block(b + 1);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    Fragment<kBlockKeys> s;
    clear<kBlockKeys>(s);
    multiply_rows<kD, kBlockKeys>(q, kRows, warp_row, shared_address(shared.k[b % 2]), kBlockKeys, s);
    if (b == num_blocks - 1) {
      const int row = before + warp_row + lane / 4 + 1 - b * kBlockKeys;
      mask_scores<kBlockKeys>(s, {row, row + 8});
    }
    float rescale[2];
    softmax_block<kBlockKeys>(s, args.c, state, rescale);
    rescale_rows<kD>(o, rescale);
    uint32_t p[kBlockKeys / 16][4];
    pack_operand<kBlockKeys>(s, p);
    multiply_columns<kD, kBlockKeys>(p, shared_address(shared.v[b % 2]), kBlockKeys, o);
    __syncthreads();
  }
  total.join(args.c, o, state);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp_row + lane / 4 + 8 * h;
    if (row >= tile.rows) continue;
    const int64_t place = (int64_t{tile.begin} + row) * shape.heads + head;
    store_row<kD>(o, h, total.l[h], columns, args.out + place * columns);
    if (lane % 4 == 0) args.lse[place] = log_sum(total.m[h], total.l[h], args.c);
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(PackedAttention args, AttentionTiles tiles) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<kD>& shared = *reinterpret_cast<Shared<kD>*>(memory);
  const int64_t heads = args.shape.heads, items = *tiles.count * heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    attend_tile<kD>(args, tiles.tiles[item / heads], item % heads, shared);
  }
}

template <int kD>
void launch(Queue& queue, const char* op, const PackedAttention& args, const AttentionTiles& tiles) {
  const Context& context = context_of(queue);
  constexpr int kBytes = static_cast<int>(sizeof(Shared<kD>));
  FP4T_CUDA(cudaFuncSetAttribute(attention_kernel<kD>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto grid =
      static_cast<unsigned>(std::min<int64_t>(context.sm_count, args.tokens * args.shape.heads));
  attention_kernel<kD><<<grid, kThreads, kBytes, context.stream>>>(args, tiles);
  check_launch(op);
}

}  // namespace

void run(Queue& queue, const AttentionForward& op) {
  if (op.qkv.dim(0) == 0) return;
  if (!attention_on_tensor_cores(op.qkv.dtype, op.head_dim, op.scale)) return general_attention(queue, op);
  Workspace workspace(queue);
  const AlignedInput qkv(queue, workspace, op.qkv);
  const AlignedOutput out(queue, workspace, op.out);
  const int64_t tokens = op.qkv.dim(0);
  const PackedAttention args{qkv.as<Bf16>(), {op.heads, op.kv_heads, op.head_dim},
                             tokens,         score_factor(op.scale),
                             out.as<Bf16>(), op.lse.as<float>()};
  const AttentionTiles tiles = plan_tiles(queue, workspace, op.kName, op.doc_begin.as<int32_t>(), tokens,
                                          kRows, TileCost::kKeysBefore);
  if (on_sm90(queue)) {
    attention_sm90(queue, op.kName, args, tiles);
  } else if (op.head_dim <= 64) {
    launch<64>(queue, op.kName, args, tiles);
  } else {
    launch<128>(queue, op.kName, args, tiles);
  }
  out.finish();
}

}  // namespace fp4t::cuda
