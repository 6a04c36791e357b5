#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/gemm_cores.h"
#include "kernels/cuda/gemm_stream.cuh"

namespace fp4t::cuda {

namespace {

StreamArgs args_of(const Queue& queue, const GemmProblem& p) {
  StreamArgs args{};
  args.tile_rows = stream_tile_rows(p, context_of(queue).sm_count);
  args.grid = grid_of(p, args.tile_rows, kStreamCols);
  args.act = p.a.data;
  args.ld_act = p.a.ld;
  args.sink = fault_sink(queue, "gemm");
  args.scales = scales_of(p);
  args.out = out_of(p);
  return args;
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
  const int stage = stream_stage_bytes<Weights>(args.tile_rows);
  args.stages = stream_stages(blocks, stage, context.sm_count, context.shared_bytes_per_block);
  if (args.tile_rows == 16) {
    launch_tiles<Weights, 2>(queue, args, blocks, args.stages * stage);
  } else {
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
  StreamArgs args = args_of(queue, p);
  args.act_rows = index.rows;
  args.act_count = index.count;
  args.weights = weights.codes.data;
  args.block_scales = weights.block_scales.as<uint8_t>();
  args.row_bytes = p.k / 2;
  const int64_t outer = outer_padding(weights.spec);
  args.outer_shift = outer == 16 ? 4 : 0;
  args.group_rows = align_up(p.n, outer);
  launch<StreamNvfp4>(queue, args);
}

}  // namespace fp4t::cuda
