#include "kernels/cuda/attention_plan.cuh"

#include "kernels/base/check.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kAhead = 4;        // loads of a thread in flight
constexpr int kBins = kThreads;  // tiles of cost kBins - 1 and more are equals

// The first token after t that has another document; doc_begin does not decrease.
__device__ int32_t document_end(const int32_t* doc_begin, int32_t t, int32_t tokens) {
  const int32_t begin = doc_begin[t];
  int32_t low = t + 1, high = tokens;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (doc_begin[middle] > begin) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Tiles are found first, in any order, then have a thread each: to look for a document's end takes many loads
// one after another. A counting sort by cost in one block; which of two equals comes first is not determined,
// and nothing depends on it but time. `found`: [tokens], the begin and the document's end.
__global__ void __launch_bounds__(kThreads)
    plan_kernel(const int32_t* doc_begin, int32_t tokens, int32_t height, TileCost cost, int2* found,
                AttentionTiles out, FaultSink sink) {
  __shared__ int32_t places[kBins];
  __shared__ int32_t sums[kThreads / 32];
  __shared__ int32_t count;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  places[thread] = 0;
  if (thread == 0) count = 0;
  __syncthreads();
  int bad = 0;
  for (int64_t first = thread; first < tokens; first += kThreads * kAhead) {
    int32_t begin[kAhead], before[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t t = first + i * kThreads;
      begin[i] = t < tokens ? doc_begin[t] : 0;
      before[i] = t > 0 && t < tokens ? doc_begin[t - 1] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t t = first + i * kThreads;
      if (t >= tokens) break;
      if (!check_document(t, begin[i], before[i], sink)) {
        bad = 1;
      } else if (static_cast<int32_t>(t - begin[i]) % height == 0) {
        found[atomicAdd(&count, 1)].x = static_cast<int32_t>(t);
      }
    }
  }
  const bool broken = __syncthreads_or(bad) != 0;
  if (broken) {
    if (thread == 0) *out.count = 0, *out.next = 0;
    return;
  }
  const auto bin_of = [&](int2 tile) {
    const int32_t length = cost == TileCost::kKeysBefore ? tile.x - doc_begin[tile.x] : tile.y - tile.x - 1;
    const int32_t blocks = length / height;
    return kBins - 1 - (blocks < kBins ? blocks : kBins - 1);
  };
  for (int32_t i = thread; i < count; i += kThreads) {
    const int32_t t = found[i].x;
    found[i].y = document_end(doc_begin, t, tokens);
    atomicAdd(&places[bin_of(found[i])], 1);
  }
  __syncthreads();
  // Exclusive prefix sums over the bins.
  const int32_t mine = places[thread];
  int32_t sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += sums[w];
  places[thread] = sum - mine;
  if (thread == 0) *out.count = count, *out.next = 0;
  __syncthreads();
  for (int32_t i = thread; i < count; i += kThreads) {
    const int2 tile = found[i];
    const int32_t rows = tile.y - tile.x < height ? tile.y - tile.x : height;
    out.tiles[atomicAdd(&places[bin_of(tile)], 1)] = {tile.x, rows, doc_begin[tile.x], tile.y};
  }
}

}  // namespace

AttentionTiles plan_tiles(Queue& queue, Workspace& workspace, const char* op, const int32_t* doc_begin,
                          int64_t tokens, int height, TileCost cost) {
  FP4T_CHECK(tokens <= INT32_MAX, op, ": ", tokens, " tokens");
  const AttentionTiles out{workspace.take<int32_t>(1), workspace.take<int32_t>(1),
                           workspace.take<AttentionTile>(tokens)};
  Workspace scratch(queue);
  plan_kernel<<<1, kThreads, 0, stream_of(queue)>>>(doc_begin, static_cast<int32_t>(tokens), height, cost,
                                                    scratch.take<int2>(tokens), out, fault_sink(queue, op));
  check_launch(op);
  return out;
}

}  // namespace fp4t::cuda
