// Routing, lists for experts of other ranks, permutation, combination, embedding and SwiGLU on a GPU:
// microseconds, and bytes a second over those of a plain copy in the same run.
//   bench_gpu_moe [tokens...]          (8192 and 32768 where none are given; width 2048, 128 experts, top 8)
// Every op runs as a CUDA graph over rotated sets of tensors, together larger than three times the L2;
// medians of the repetitions.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/numeric.h"
#include "kernels/base/queue.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/router_cores.h"
#include "kernels/ops/run.h"
#include "tests/bench/device_memory.h"
#include "tests/support/dispatch.h"

namespace fp4t {
namespace {

constexpr int64_t kWidth = 2048, kExperts = 128, kTopK = 8, kVocabulary = 50304, kHidden = 768;
constexpr int64_t kCacheBytes = int64_t{50} << 20;
constexpr int kRepetitions = 15;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Microseconds of one call of `work(i)`, i = 0.., recorded as a graph of `calls` calls.
double measure(Queue& queue, int calls, const std::function<void(int)>& work) {
  const cudaStream_t stream = cuda::stream_of(queue);
  for (int i = 0; i < calls; ++i) work(i);  // the workspace grows outside of the recording
  queue.synchronize();
  cudaGraph_t graph;
  cudaGraphExec_t recorded;
  FP4T_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) work(i);
  FP4T_CUDA(cudaStreamEndCapture(stream, &graph));
  FP4T_CUDA(cudaGraphInstantiate(&recorded, graph, 0));
  cudaEvent_t begin, end;
  FP4T_CUDA(cudaEventCreate(&begin));
  FP4T_CUDA(cudaEventCreate(&end));
  std::vector<double> times;
  for (int r = 0; r < kRepetitions + 2; ++r) {
    FP4T_CUDA(cudaEventRecord(begin, stream));
    FP4T_CUDA(cudaGraphLaunch(recorded, stream));
    FP4T_CUDA(cudaEventRecord(end, stream));
    queue.synchronize();
    float ms = 0;
    FP4T_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (r >= 2) times.push_back(double{ms} * 1000 / calls);
  }
  FP4T_CUDA(cudaGraphExecDestroy(recorded));
  FP4T_CUDA(cudaGraphDestroy(graph));
  return median(times);
}

class Bench {
 public:
  explicit Bench(Queue& queue) : queue_(queue) {
    const int64_t bytes = int64_t{1} << 30;
    Memory pool(queue);
    const TensorView from = pool.normal(DType::kBf16, {bytes / 2}),
                     to = pool.fresh(DType::kBf16, {bytes / 2});
    const double by_driver = measure(queue, 1, [&](int) {
      FP4T_CUDA(cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice,
                                cuda::stream_of(queue)));
    });
    const double by_kernel = measure(queue, 1, [&](int) { run(queue, Cast{from, to}); });
    copy_rate_ = 2.0 * static_cast<double>(bytes) / std::min(by_driver, by_kernel);
    std::printf("copy: driver %.2f, kernel %.2f TB/s\n", 2e-6 * static_cast<double>(bytes) / by_driver,
                2e-6 * static_cast<double>(bytes) / by_kernel);
  }

  // make(pool) gives an op over tensors of its own; `bytes` is what one call must move.
  template <class Make>
  void op(const char* name, int64_t tokens, double bytes, const Make& make) {
    call(name, tokens, bytes, make, [](Queue& queue, const auto& op) { run(queue, op); });
  }
  template <class Make, class Body>
  void call(const char* name, int64_t tokens, double bytes, const Make& make, const Body& body) {
    Memory pool(queue_);
    const int sets = static_cast<int>(
        std::clamp<double>(std::ceil(3.0 * static_cast<double>(kCacheBytes) / bytes), 2.0, 40.0));
    std::vector<decltype(make(pool))> ops;
    for (int i = 0; i < sets; ++i) ops.push_back(make(pool));
    const double us = measure(queue_, sets, [&](int i) { body(queue_, ops[static_cast<size_t>(i)]); });
    std::printf("%-26s T %6lld  %9.1f us  %6.0f GB/s  %.2f of copy\n", name, static_cast<long long>(tokens),
                us, bytes / us * 1e-3, bytes / us / copy_rate_);
    std::fflush(stdout);
  }

  Queue& queue() { return queue_; }

 private:
  Queue& queue_;
  double copy_rate_;
};

Route make_route(Memory& p, int64_t tokens) {
  return {p.normal(DType::kF32, {tokens, kExperts}, 2.0f),
          p.normal(DType::kF32, {kExperts}, 0.01f),
          RouterKind::kSoftmax,
          kTopK,
          true,
          1.0f,
          p.fresh(DType::kF32, {tokens, kExperts}),
          p.fresh(DType::kI32, {tokens, kTopK}),
          p.fresh(DType::kF32, {tokens, kTopK}),
          p.fresh(DType::kI32, {kExperts + 1}),
          p.fresh(DType::kI32, {tokens, kTopK}),
          p.fresh(DType::kI32, {tokens * kTopK})};
}

void routing(Bench& b, int64_t tokens) {
  const double t = static_cast<double>(tokens), logits = t * kExperts * 4;
  const auto routed = [&](Memory& p) {
    const Route r = make_route(p, tokens);
    run(b.queue(), r);
    return r;
  };
  b.op("router_logits", tokens, t * kWidth * 2 + logits, [&](Memory& p) {
    return RouterLogits{p.normal(DType::kBf16, {tokens, kWidth}),
                        p.normal(DType::kF32, {kExperts, kWidth}, 0.02f),
                        p.fresh(DType::kF32, {tokens, kExperts})};
  });
  b.op("router_logits_backward", tokens, t * kWidth * 6 + logits, [&](Memory& p) {
    return RouterLogitsBackward{
        p.normal(DType::kBf16, {tokens, kWidth}), p.normal(DType::kF32, {kExperts, kWidth}, 0.02f),
        p.normal(DType::kF32, {tokens, kExperts}), p.fresh(DType::kF32, {tokens, kWidth}),
        p.fresh(DType::kF32, {kExperts, kWidth})};
  });
  b.op("route", tokens, 2 * logits + t * kTopK * 16, [&](Memory& p) { return make_route(p, tokens); });
  b.op("router_stats", tokens, 2 * logits, [&](Memory& p) {
    const Route r = routed(p);
    return RouterStats{r.logits,
                       r.scores,
                       r.offsets,
                       r.kind,
                       kTopK,
                       p.fresh(DType::kF64, {2}),
                       p.fresh(DType::kI64, {kExperts})};
  });
  b.op("route_backward", tokens, 3 * logits + t * kTopK * 8, [&](Memory& p) {
    const Route r = routed(p);
    return RouteBackward{
        r.logits, r.scores, r.experts, r.offsets, p.normal(DType::kF32, {tokens, kTopK}),  r.kind,
        true,     1.0f,     0.001f,    0.001f,    p.fresh(DType::kF32, {tokens, kExperts})};
  });
}

// 64 experts on two ranks; a round's lists are those of all visits, found by their rows.
void dispatch(Bench& b, int64_t tokens) {
  std::mt19937_64 engine(3);
  const double t = static_cast<double>(tokens);
  for (int64_t chunks : {1, 8}) {
    const ExpertSplit split{64, 2, chunks};
    std::vector<int32_t> choices = test::random_choices(engine, tokens, kTopK, split.experts, false);
    const auto lists = [&](Memory& p) {
      test::DispatchTensors list(p, split, tokens, kTopK);
      list.experts = p.i32(choices).reshape({tokens, kTopK});
      return list;
    };
    const std::string cut = chunks == 1 ? "" : ", " + std::to_string(chunks) + " chunks";
    const double visits = t * (kTopK + 2 * 4) * 4;  // two ranks of a token, in four lists
    b.op(("dispatch_tokens" + cut).c_str(), tokens, visits, [&](Memory& p) { return lists(p).all(0); });
    b.op(("dispatch, a round" + cut).c_str(), tokens, visits,
         [&](Memory& p) { return lists(p).window(0, tokens * kTopK, 0); });
    test::bring_to(0, split, kTopK, engine, choices);
    const int64_t rows = test::rows_on(0, split, choices);
    const double guests = t * (3 * kTopK + 1) * 4 + static_cast<double>(rows) * 8;
    b.op(("place_guests" + cut).c_str(), tokens, guests, [&](Memory& p) {
      test::GuestTensors list(p, split, 0, tokens, kTopK, rows);
      list.choices = p.i32(choices).reshape({tokens, kTopK});
      list.come_from = p.i32({static_cast<int32_t>(tokens / 2), static_cast<int32_t>(tokens - tokens / 2)});
      return list.place();
    });
  }
}

// The two tilings of the router's logits, where they meet.
void router_cores(Bench& b) {
  for (int64_t tokens : {1, 16, 64, 256, 512, 1024, 2048, 4096}) {
    const auto make = [&](Memory& p) {
      return RouterLogits{p.normal(DType::kBf16, {tokens, kWidth}),
                          p.normal(DType::kF32, {kExperts, kWidth}, 0.02f),
                          p.fresh(DType::kF32, {tokens, kExperts})};
    };
    const double bytes = static_cast<double>(tokens) * (kWidth * 2 + kExperts * 4) + kExperts * kWidth * 4;
    b.call("router_logits, few", tokens, bytes, make, cuda::router_logits_few);
    b.call("router_logits, many", tokens, bytes, make, cuda::router_logits_many);
  }
}

void rows(Bench& b, int64_t tokens) {
  const double row = static_cast<double>(tokens) * kWidth * 2;
  const auto routed = [&](Memory& p) {
    const Route r = make_route(p, tokens);
    run(b.queue(), r);
    return r;
  };
  b.op("permute_rows", tokens, 2 * kTopK * row, [&](Memory& p) {
    return PermuteRows{p.normal(DType::kBf16, {tokens, kWidth}), routed(p).token_of,
                       p.fresh(DType::kBf16, {tokens * kTopK, kWidth})};
  });
  b.op("permute_rows by token", tokens, (kTopK + 1) * row, [&](Memory& p) {
    const Route r = routed(p);
    return PermuteRows{p.normal(DType::kBf16, {tokens, kWidth}), r.token_of,
                       p.fresh(DType::kBf16, {tokens * kTopK, kWidth}), r.row_of};
  });
  for (bool residual : {true, false}) {
    b.op(residual ? "combine_experts" : "combine (dx: no gates)", tokens, (kTopK + (residual ? 2 : 1)) * row,
         [&](Memory& p) {
           const Route r = routed(p);
           return CombineExperts{p.normal(DType::kBf16, {tokens * kTopK, kWidth}),
                                 r.row_of,
                                 r.experts,
                                 residual ? r.gates : TensorView{},
                                 kExperts,
                                 {},
                                 residual ? p.normal(DType::kBf16, {tokens, kWidth}) : TensorView{},
                                 p.fresh(DType::kBf16, {tokens, kWidth})};
         });
  }
  b.op("combine_experts_backward", tokens, (2 * kTopK + 1) * row, [&](Memory& p) {
    const Route r = routed(p);
    return CombineExpertsBackward{p.normal(DType::kBf16, {tokens, kWidth}),
                                  p.normal(DType::kBf16, {tokens * kTopK, kWidth}),
                                  r.row_of,
                                  r.gates,
                                  p.fresh(DType::kBf16, {tokens * kTopK, kWidth}),
                                  p.fresh(DType::kF32, {tokens, kTopK})};
  });
  b.op("embed_forward", tokens, 2 * row, [&](Memory& p) {
    return EmbedForward{p.normal(DType::kBf16, {kVocabulary, kWidth}), p.indices(tokens, kVocabulary),
                        p.fresh(DType::kBf16, {tokens, kWidth})};
  });
  const double hit = kVocabulary * (1.0 - std::exp(-static_cast<double>(tokens) / kVocabulary));
  b.op("embed_backward", tokens, row + hit * kWidth * 8, [&](Memory& p) {
    return EmbedBackward{p.normal(DType::kBf16, {tokens, kWidth}), p.indices(tokens, kVocabulary),
                         p.fresh(DType::kF32, {kVocabulary, kWidth})};
  });
}

void swiglu(Bench& b, int64_t tokens) {
  const int64_t n = tokens * kTopK;
  const double half = static_cast<double>(n) * kHidden * 2;
  b.op("swiglu_forward", tokens, 3 * half, [&](Memory& p) {
    return SwigluForward{p.normal(DType::kBf16, {n, 2 * kHidden}), 0.0f, p.fresh(DType::kBf16, {n, kHidden})};
  });
  b.op("swiglu_backward", tokens, 5 * half, [&](Memory& p) {
    return SwigluBackward{p.normal(DType::kBf16, {n, 2 * kHidden}), 0.0f,
                          p.normal(DType::kBf16, {n, kHidden}), p.fresh(DType::kBf16, {n, 2 * kHidden})};
  });
}

int bench(int argc, char** argv) {
  std::vector<int64_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  if (sizes.empty()) sizes = {8192, 32768};
  Queue queue = Queue::cuda(0);
  cudaDeviceProp device;
  FP4T_CUDA(cudaGetDeviceProperties(&device, 0));
  std::printf("%s\n", device.name);
  Bench b(queue);
  router_cores(b);
  for (int64_t tokens : sizes) {
    routing(b, tokens);
    dispatch(b, tokens);
    rows(b, tokens);
    swiglu(b, tokens);
  }
  return 0;
}

}  // namespace
}  // namespace fp4t

int main(int argc, char** argv) { return fp4t::bench(argc, argv); }
