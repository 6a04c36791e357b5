// Launches of the mma.sync core for one tile.
#pragma once

#include "kernels/cuda/context.h"
#include "kernels/cuda/gemm_cores.h"
#include "kernels/cuda/gemm_mma.cuh"

namespace fp4t::cuda {

template <class Kernel>
void launch_kernel(Queue& queue, const MmaArgs& args) {
  const int64_t blocks = args.grid.blocks();
  if (blocks == 0) return;
  FP4T_CHECK(blocks < int64_t{1} << 31, blocks, " tiles");
  FP4T_CUDA(cudaFuncSetAttribute(gemm_mma<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Kernel::kSharedBytes));
  gemm_mma<Kernel>
      <<<static_cast<unsigned>(blocks), Kernel::kThreads, Kernel::kSharedBytes, stream_of(queue)>>>(args);
  check_launch("gemm");
}

template <int kTileM, int kTileN, int kWarpM, int kWarpN>
void launch_tile(Queue& queue, const GemmProblem& p) {
  const auto side = [](const GemmSide& s) { return MmaSide{s.data, s.ld, s.group_stride, copy_bytes(s)}; };
  const MmaArgs args{grid_of(p, kTileM, kTileN), side(p.a), side(p.b), scales_of(p), out_of(p)};
  if (!p.a.mn_major && !p.b.mn_major) {
    launch_kernel<MmaKernel<kTileM, kTileN, kWarpM, kWarpN, false, false>>(queue, args);
  } else if (!p.a.mn_major) {
    launch_kernel<MmaKernel<kTileM, kTileN, kWarpM, kWarpN, false, true>>(queue, args);
  } else if (!p.b.mn_major) {
    launch_kernel<MmaKernel<kTileM, kTileN, kWarpM, kWarpN, true, false>>(queue, args);
  } else {
    launch_kernel<MmaKernel<kTileM, kTileN, kWarpM, kWarpN, true, true>>(queue, args);
  }
}

}  // namespace fp4t::cuda
