#include "kernels/base/numeric.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/gemm_cores.h"
#include "kernels/cuda/gemm_stream.cuh"

namespace fp4t::cuda {

namespace {

StreamArgs args_of(const GemmProblem& p) {
  StreamArgs args{};
  args.tile_rows = stream_tile_rows(p);
  args.grid = grid_of(p, args.tile_rows, kStreamCols);
  args.act = p.a.data;
  args.ld_act = p.a.ld;
  args.scales = scales_of(p);
  args.out = out_of(p);
  return args;
}

template <class Weights>
void launch(Queue& queue, const StreamArgs& args) {
  using Kernel = StreamKernel<Weights>;
  const int64_t blocks = args.grid.blocks();
  if (blocks == 0) return;
  FP4T_CHECK(blocks < int64_t{1} << 31, blocks, " tiles");
  FP4T_CUDA(cudaFuncSetAttribute(gemm_stream<Weights>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Kernel::shared_bytes(kStreamRows)));
  gemm_stream<Weights><<<static_cast<unsigned>(blocks), kStreamThreads, Kernel::shared_bytes(args.tile_rows),
                         stream_of(queue)>>>(args);
  check_launch("gemm");
}

}  // namespace

void launch_stream_bf16(Queue& queue, const GemmProblem& p) {
  StreamArgs args = args_of(p);
  args.weights = p.b.data;
  args.ld = p.b.ld;
  args.group_rows = p.mode == GemmMode::kGroupedM ? p.b.group_stride / p.b.ld : 0;
  launch<StreamBf16>(queue, args);
}

void launch_stream_nvfp4(Queue& queue, const GemmProblem& p, const QuantView& weights) {
  StreamArgs args = args_of(p);
  args.weights = weights.codes.data;
  args.block_scales = weights.block_scales.as<uint8_t>();
  args.outer = static_cast<int>(outer_padding(weights.spec));
  args.group_rows = align_up(p.n, args.outer);
  launch<StreamNvfp4>(queue, args);
}

}  // namespace fp4t::cuda
