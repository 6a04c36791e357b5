#include "kernels/cuda/attention_plan.cuh"

#include "kernels/base/check.h"

namespace fp4t::cuda {

namespace {

constexpr int kThreads = 1024;
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

// A counting sort by cost in one block. Which of two equals comes first is not determined; nothing depends
// on it but time.
__global__ void __launch_bounds__(kThreads)
    plan_kernel(const int32_t* doc_begin, int32_t tokens, int32_t height, TileCost cost, AttentionTiles out,
                FaultSink sink) {
  __shared__ int32_t places[kBins];
  __shared__ int32_t sums[kThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  places[thread] = 0;
  __syncthreads();
  const auto is_tile = [&](int32_t t) { return (t - doc_begin[t]) % height == 0; };
  const auto bin_of = [&](int32_t t, int32_t end) {
    const int32_t length = cost == TileCost::kKeysBefore ? t - doc_begin[t] : end - t - 1;
    const int32_t blocks = length / height;
    return kBins - 1 - (blocks < kBins ? blocks : kBins - 1);
  };
  int bad = 0;
  for (int32_t t = thread; t < tokens; t += kThreads) {
    if (!check_document(doc_begin, t, sink)) {
      bad = 1;
    } else if (is_tile(t)) {
      atomicAdd(&places[bin_of(t, document_end(doc_begin, t, tokens))], 1);
    }
  }
  const bool broken = __syncthreads_or(bad) != 0;
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
  if (thread == kThreads - 1) *out.count = broken ? 0 : sum, *out.next = 0;
  __syncthreads();
  if (broken) return;
  for (int32_t t = thread; t < tokens; t += kThreads) {
    if (!is_tile(t)) continue;
    const int32_t end = document_end(doc_begin, t, tokens);
    const int32_t rows = end - t < height ? end - t : height;
    out.tiles[atomicAdd(&places[bin_of(t, end)], 1)] = {t, rows, doc_begin[t], end};
  }
}

}  // namespace

AttentionTiles plan_tiles(Queue& queue, Workspace& workspace, const char* op, const int32_t* doc_begin,
                          int64_t tokens, int height, TileCost cost) {
  FP4T_CHECK(tokens <= INT32_MAX, op, ": ", tokens, " tokens");
  const AttentionTiles out{workspace.take<int32_t>(1), workspace.take<int32_t>(1),
                           workspace.take<AttentionTile>(tokens)};
  plan_kernel<<<1, kThreads, 0, stream_of(queue)>>>(doc_begin, static_cast<int32_t>(tokens), height, cost,
                                                    out, fault_sink(queue, op));
  check_launch(op);
  return out;
}

}  // namespace fp4t::cuda
