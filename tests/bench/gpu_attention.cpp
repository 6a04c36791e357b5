// Attention on the GPU: rates of the ops, median of event timings. Random data; what is read from one
// repetition to the next is larger than the L2 cache.
//   bench_gpu_attention [filter]
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/context.h"
#include "kernels/ops/run.h"
#include "tests/bench/device_memory.h"

namespace fp4t {
namespace {

const char* filter = "";

// Median milliseconds of one of body(0), body(1), ..., recorded as one graph so that launching costs the host
// nothing.
double time_of(Queue& queue, int repetitions, const std::function<void(int)>& body) {
  constexpr int kWarm = 2, kRounds = 9;
  const cudaStream_t stream = cuda::stream_of(queue);
  body(0);  // takes its workspace
  queue.synchronize();
  cudaGraph_t graph;
  cudaGraphExec_t recorded;
  FP4T_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < repetitions; ++i) body(i);
  FP4T_CUDA(cudaStreamEndCapture(stream, &graph));
  FP4T_CUDA(cudaGraphInstantiate(&recorded, graph, 0));
  cudaEvent_t begin, end;
  FP4T_CUDA(cudaEventCreate(&begin));
  FP4T_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kWarm + kRounds; ++i) {
    FP4T_CUDA(cudaEventRecord(begin, stream));
    FP4T_CUDA(cudaGraphLaunch(recorded, stream));
    FP4T_CUDA(cudaEventRecord(end, stream));
    queue.synchronize();
    float ms = 0.0f;
    FP4T_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= kWarm) times.push_back(ms / static_cast<float>(repetitions));
  }
  cudaGraphExecDestroy(recorded);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

bool wanted(const std::string& name) { return name.find(filter) != std::string::npos; }

void packed(Queue& queue, int64_t documents, int64_t length, int64_t heads, int64_t kv_heads, int64_t dim) {
  const std::string shape = std::to_string(documents) + " x " + std::to_string(length) + ", heads " +
                            std::to_string(heads) + "/" + std::to_string(kv_heads) + " x " +
                            std::to_string(dim);
  if (!wanted("forward " + shape) && !wanted("backward " + shape)) return;
  Memory memory(queue);
  const int64_t tokens = documents * length;
  std::vector<int32_t> begin(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t)
    begin[static_cast<size_t>(t)] = static_cast<int32_t>(t / length * length);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const TensorView qkv = memory.normal(DType::kBf16, {tokens, (heads + 2 * kv_heads) * dim}),
                   docs = memory.i32(begin);
  const TensorView out = memory.fresh(DType::kBf16, {tokens, heads * dim});
  const TensorView lse = memory.fresh(DType::kF32, {tokens, heads});
  const AttentionForward forward{.qkv = qkv,
                                 .heads = heads,
                                 .kv_heads = kv_heads,
                                 .head_dim = dim,
                                 .doc_begin = docs,
                                 .scale = scale,
                                 .out = out,
                                 .lse = lse};
  const double flops =
      2.0 * static_cast<double>(documents * length * length * heads * dim);  // half the square
  if (wanted("forward " + shape)) {
    const double ms = time_of(queue, 4, [&](int) { run(queue, forward); });
    std::printf("forward  %-36s %8.3f ms %6.0f TFLOP/s\n", shape.c_str(), ms, flops / ms / 1e9);
  }
  run(queue, forward);
  if (wanted("backward " + shape)) {
    const AttentionBackward backward{.qkv = qkv,
                                     .heads = heads,
                                     .kv_heads = kv_heads,
                                     .head_dim = dim,
                                     .doc_begin = docs,
                                     .scale = scale,
                                     .out = out,
                                     .lse = lse,
                                     .dout = memory.normal(DType::kBf16, {tokens, heads * dim}),
                                     .dqkv = memory.fresh(DType::kBf16, qkv.shape)};
    const double ms = time_of(queue, 2, [&](int) { run(queue, backward); });
    std::printf("backward %-36s %8.3f ms %6.0f TFLOP/s\n", shape.c_str(), ms, 2.5 * flops / ms / 1e9);
  }
  std::fflush(stdout);
}

void cached(Queue& queue, Format format, int64_t batch, int64_t context, int64_t rows_a_slot, int64_t heads,
            int64_t kv_heads, int64_t dim) {
  const std::string shape = std::to_string(batch) + " x " + std::to_string(rows_a_slot) + " rows at " +
                            std::to_string(context) + ", heads " + std::to_string(heads) + "/" +
                            std::to_string(kv_heads) + " x " + std::to_string(dim) + ", " + name_of(format);
  if (!wanted("cached " + shape)) return;
  Memory memory(queue);
  const bool codes = format == Format::kMxfp8;
  const int64_t width = kv_heads * dim, rows = batch * rows_a_slot;
  const int64_t bytes =
      batch * context * width * (codes ? 1 : 2) * 2 + (codes ? batch * context * width / 16 : 0);
  const int64_t copies = std::max<int64_t>(1, 200'000'000 / bytes), slots = batch * copies;
  KvCacheView cache{format, {}, {}, {}, {}};
  if (codes) {
    cache.k = memory.fresh(DType::kU8, {slots, context, width});
    cache.v = memory.fresh(DType::kU8, {slots, context, width});
    cache.k_scales = memory.fresh(DType::kU8, {slots, context, width / 32});
    cache.v_scales = memory.fresh(DType::kU8, {slots, context, width / 32});
    for (const TensorView& t : {cache.k, cache.v}) queue.fill_bytes(t.data, 0x35, t.bytes());
    for (const TensorView& t : {cache.k_scales, cache.v_scales}) queue.fill_bytes(t.data, 127, t.bytes());
  } else {
    cache.k = memory.normal(DType::kBf16, {slots, context, width});
    cache.v = memory.normal(DType::kBf16, {slots, context, width});
  }
  const TensorView qkv = memory.normal(DType::kBf16, {rows, (heads + 2 * kv_heads) * dim});
  const TensorView out = memory.fresh(DType::kBf16, {rows, heads * dim});
  std::vector<TensorView> slot_of;
  std::vector<int32_t> positions(static_cast<size_t>(rows));
  for (int64_t c = 0; c < copies; ++c) {
    std::vector<int32_t> slot(static_cast<size_t>(rows));
    for (int64_t t = 0; t < rows; ++t) {
      slot[static_cast<size_t>(t)] = static_cast<int32_t>(c * batch + t / rows_a_slot);
      positions[static_cast<size_t>(t)] = static_cast<int32_t>(context - rows_a_slot + t % rows_a_slot);
    }
    slot_of.push_back(memory.i32(slot));
  }
  const TensorView position = memory.i32(positions);
  const double ms = time_of(queue, rows_a_slot > 1 ? 2 : 32, [&](int i) {
    run(queue, AttentionCached{.qkv = qkv,
                               .heads = heads,
                               .kv_heads = kv_heads,
                               .head_dim = dim,
                               .slots = slot_of[static_cast<size_t>(i) % slot_of.size()],
                               .positions = position,
                               .cache = cache,
                               .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                               .out = out});
  });
  std::printf("cached   %-52s %8.1f us %6.2f TB/s\n", shape.c_str(), ms * 1e3,
              static_cast<double>(bytes) / ms / 1e9);
  std::fflush(stdout);
}

}  // namespace
}  // namespace fp4t

int main(int argc, char** argv) {
  using namespace fp4t;
  if (argc > 1) filter = argv[1];
  if (cuda::device_count() == 0) {
    std::fprintf(stderr, "no GPU on this machine\n");
    return 77;
  }
  Queue queue = Queue::cuda(0);
  packed(queue, 4, 4096, 32, 32, 128);
  packed(queue, 4, 4096, 32, 4, 128);
  packed(queue, 16, 1024, 32, 4, 128);
  packed(queue, 16, 1000, 32, 4, 128);  // ends within a step
  packed(queue, 4, 4096, 32, 32, 64);
  for (const Format format : {Format::kBf16, Format::kMxfp8}) {
    for (const int64_t batch : {1, 16, 64, 256}) cached(queue, format, batch, 1024, 1, 32, 4, 128);
    cached(queue, format, 1, 16384, 1, 32, 4, 128);
    cached(queue, format, 16, 8192, 1, 32, 4, 128);
    cached(queue, format, 4, 4096, 1024, 32, 4, 128);
  }
  return 0;
}
