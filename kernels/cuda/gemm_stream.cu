#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/gemm_cores.h"
#include "kernels/cuda/gemm_stream.cuh"

namespace fp4t::cuda {

namespace {

StreamArgs args_of(const Queue& queue, const GemmProblem& p, int height = 1) {
  StreamArgs args{};
  args.tile_rows = stream_tile_rows(p, context_of(queue).sm_count);
  args.grid = grid_of(p, args.tile_rows, height * kStreamCols);
  args.act = p.a.data;
  args.ld_act = p.a.ld;
  args.sink = fault_sink(queue, "gemm");
  args.scales = scales_of(p);
  args.out = out_of(p);
  return args;
}

// A part of the second-level cache, so that what is asked for early is still there when it is read.
constexpr int64_t kEarlyBytes = int64_t{20} << 20;

void ask_early(StreamArgs& args, int64_t blocks, int64_t row_bytes, int sm_count) {
  const int64_t matrices = args.grid.mode == GemmMode::kDense ? 1 : args.grid.groups;
  // Up to the end of the last row that is read.
  const int64_t all = ((matrices - 1) * args.group_rows + args.grid.n - 1) * args.row_bytes + row_bytes;
  const int64_t share = std::min<int64_t>(blocks, 2 * sm_count);
  args.early_blocks = static_cast<unsigned>(share);
  args.early_bytes = static_cast<uint32_t>(std::min(all, kEarlyBytes) / share / 16 * 16);
  if (args.early_bytes == 0) args.early_blocks = 0;
}

template <class Weights, int kMaxTiles>
void launch_tiles(Queue& queue, const StreamArgs& args, int64_t blocks, int bytes) {
  FP4T_CUDA(cudaFuncSetAttribute(gemm_stream<Weights, kMaxTiles>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes));
  launch_early(queue, "gemm", gemm_stream<Weights, kMaxTiles>, dim3(static_cast<unsigned>(blocks)),
               kStreamThreads, bytes, args);
}

template <class Weights>
void launch(Queue& queue, StreamArgs args) {
  const Context& context = context_of(queue);
  const int64_t blocks = args.grid.blocks();
  if (blocks == 0) return;
  FP4T_CHECK(blocks < int64_t{1} << 31, blocks, " tiles");
  ask_early(args, blocks, args.grid.k / Weights::kDepth * Weights::kRowBytes, context.sm_count);
  const int stage = stream_stage_bytes<Weights>(args.tile_rows);
  args.stages = stream_stages(blocks, stage, context.sm_count, context.shared_bytes_per_block,
                              Weights::kHeight > 1 ? 3 : 4);
  if (args.tile_rows == 16) {
    launch_tiles<Weights, 2>(queue, args, blocks, args.stages * stage);
  } else if constexpr (Weights::kHeight == 1) {
    launch_tiles<Weights, 8>(queue, args, blocks, args.stages * stage);
  }
}

}  // namespace

void launch_stream_bf16(Queue& queue, const GemmProblem& p) {
  context_of(queue).product_kernel = "cuda mma.sync few rows";
  StreamArgs args = args_of(queue, p);
  args.weights = p.b.data;
  args.row_bytes = p.b.ld * 2;
  args.group_rows = p.mode == GemmMode::kGroupedM ? p.b.group_stride / p.b.ld : 0;
  launch<StreamBf16>(queue, args);
}

void launch_stream_nvfp4(Queue& queue, const GemmProblem& p, const QuantView& weights,
                         const RowIndex& index) {
  context_of(queue).product_kernel = "cuda mma.sync few rows of codes";
  const int height = stream_codes_height(p, context_of(queue).sm_count);
  StreamArgs args = args_of(queue, p, height);
  args.act_rows = index.rows;
  args.act_count = index.count;
  args.weights = weights.codes.data;
  args.block_scales = weights.block_scales.as<uint8_t>();
  args.row_bytes = p.k / 2;
  const int64_t outer = outer_padding(weights.spec);
  args.outer_shift = outer == 16 ? 4 : 0;
  args.group_rows = align_up(p.n, outer);
  height == 2 ? launch<StreamNvfp4<2>>(queue, args) : launch<StreamNvfp4<1>>(queue, args);
}

}  // namespace fp4t::cuda
