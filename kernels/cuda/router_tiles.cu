// The tilings of the router's products (router_tiles.cuh).
#include "kernels/cuda/router_tiles.cuh"

#include "kernels/cuda/router_cores.h"

namespace fp4t::cuda {

void router_logits_many(Queue& queue, const RouterLogits& op) {
  const int64_t tokens = op.x.dim(0), width = op.x.dim(1), experts = op.weight.dim(0);
  const TiledProduct p{op.x.data, op.weight.data, tokens, experts, width, op.logits.as<float>(), width};
  if (experts <= 32) {
    launch_tiles<Bf16, true, float, true, 8, 1, 1, 4>(queue, op.kName, p);
  } else if (tokens <= int64_t{64} * context_of(queue).sm_count) {
    launch_tiles<Bf16, true, float, true, 2, 2, 4, 4>(queue, op.kName, p);
  } else {
    launch_tiles<Bf16, true, float, true, 2, 4, 4, 4>(queue, op.kName, p);
  }
}

void router_dweight(Queue& queue, const RouterLogitsBackward& op) {
  const int64_t tokens = op.x.dim(0), width = op.x.dim(1), experts = op.weight.dim(0);
  const int64_t tiles = ceil_div(experts, 128) * ceil_div(width, 128);
  // One block a multiprocessor, of at least 512 tokens.
  const int64_t wanted = std::max<int64_t>(1, context_of(queue).sm_count / tiles);
  const int64_t slice = align_up(std::max<int64_t>(512, ceil_div(tokens, wanted)), kRouterChunk);
  const int64_t slices = ceil_div(tokens, slice);
  Workspace workspace(queue);
  float* partial = workspace.take<float>(slices * experts * width);
  launch_tiles<float, false, Bf16, false, 4, 2, 2, 8>(
      queue, op.kName, {op.dlogits.data, op.x.data, experts, width, tokens, partial, slice});
  add_slices(queue, partial, experts * width, slices, op.dweight.as<float>());
}

void router_dx(Queue& queue, const RouterLogitsBackward& op) {
  const int64_t tokens = op.x.dim(0), width = op.x.dim(1), experts = op.weight.dim(0);
  launch_tiles<float, true, float, false, 2, 4, 4, 4>(
      queue, op.kName, {op.dlogits.data, op.weight.data, tokens, width, experts, op.dx.as<float>(), experts});
}

}  // namespace fp4t::cuda
