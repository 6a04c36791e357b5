// Kernels whose limit is the memory: bytes that must move over time, beside a copy in the same round.
// Random data; three sets of buffers in turn, so that no round finds its data in the L2 cache.
//   bench_gpu_memory [filter]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/context.h"
#include "kernels/ops/run.h"
#include "tests/bench/device_memory.h"

namespace fp4t {
namespace {

constexpr int kSets = 3;
const char* filter = "";

class Bench {
 public:
  explicit Bench(Queue& queue) : queue_(queue), memory_(queue) {
    for (int i = 0; i < 2; ++i) buffers_[i] = memory_.normal(DType::kBf16, {kCopyBytes / 2});
    for (cudaEvent_t& e : events_) cudaEventCreate(&e);
  }

  // body(set) moves `bytes`; rounds of a copy and it, small bodies several times over, as in a run's queue.
  void measure(const std::string& name, int64_t bytes, const std::function<void(int)>& body,
               int rounds = 12) {
    const cudaStream_t stream = cuda::stream_of(queue_);
    std::vector<double> rates, ratios, times;
    const int calls = kSets * static_cast<int>(std::clamp<int64_t>(kCopyBytes / (kSets * bytes), 1, 8));
    for (int round = -2; round < rounds; ++round) {
      cudaEventRecord(events_[0], stream);
      cudaMemcpyAsync(buffers_[0].data, buffers_[1].data, kCopyBytes, cudaMemcpyDeviceToDevice, stream);
      cudaEventRecord(events_[1], stream);
      for (int call = 0; call < (bytes > kCopyBytes ? 1 : calls); ++call) body(call % kSets);
      cudaEventRecord(events_[2], stream);
      queue_.synchronize();
      float copy_ms = 0.0f, ms = 0.0f;
      cudaEventElapsedTime(&copy_ms, events_[0], events_[1]);
      cudaEventElapsedTime(&ms, events_[1], events_[2]);
      if (round < 0) continue;
      const double copy_rate = 2.0 * kCopyBytes / static_cast<double>(copy_ms);
      const double time = static_cast<double>(ms) / (bytes > kCopyBytes ? 1 : calls);
      const double rate = static_cast<double>(bytes) / time;
      times.push_back(time);
      rates.push_back(rate);
      ratios.push_back(rate / copy_rate);
    }
    std::printf("%-52s %9.1f us %6.2f TB/s %5.2f of copy (%.2f .. %.2f)\n", name.c_str(), 1e3 * median(times),
                median(rates) / 1e9, median(ratios), *std::min_element(ratios.begin(), ratios.end()),
                *std::max_element(ratios.begin(), ratios.end()));
    std::fflush(stdout);
  }

 private:
  static constexpr int64_t kCopyBytes = int64_t{1} << 30;
  static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  }
  Queue& queue_;
  Memory memory_;
  TensorView buffers_[2];
  cudaEvent_t events_[3];
};

bool wanted(const std::string& name) { return name.find(filter) != std::string::npos; }

void norms(Queue& queue, Bench& bench, int64_t tokens, int64_t width) {
  for (bool residual : {false, true}) {
    const std::string name =
        std::to_string(tokens) + " x " + std::to_string(width) + (residual ? " residual" : "");
    if (!wanted("norm forward " + name) && !wanted("norm backward " + name)) continue;
    Memory m(queue);
    const Shape shape = {tokens, width};
    const TensorView weight = m.normal(DType::kF32, {width}), dweight = m.fresh(DType::kF32, {width});
    std::vector<NormForward> forward;
    std::vector<NormBackward> backward;
    for (int s = 0; s < kSets; ++s) {
      const TensorView none, x = m.normal(DType::kBf16, shape);
      const TensorView other = residual ? m.normal(DType::kBf16, shape) : none;
      const TensorView sum = residual ? m.fresh(DType::kBf16, shape) : none;
      const TensorView rstd = m.fresh(DType::kF32, {tokens});
      forward.push_back({x, other, weight, 1e-5f, sum, m.fresh(DType::kBf16, shape), rstd});
      backward.push_back({residual ? sum : x, weight, rstd, m.normal(DType::kBf16, shape), other,
                          m.fresh(DType::kBf16, shape), dweight});
    }
    const int64_t plane = tokens * width * 2;
    bench.measure("norm forward " + name, plane * (residual ? 4 : 2),
                  [&](int s) { run(queue, forward[static_cast<size_t>(s)]); });
    bench.measure("norm backward " + name, plane * (residual ? 4 : 3),
                  [&](int s) { run(queue, backward[static_cast<size_t>(s)]); });
  }
}

void ropes(Queue& queue, Bench& bench, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim) {
  for (bool norm : {false, true}) {
    const std::string name = std::to_string(tokens) + " x " + std::to_string(heads) + "/" +
                             std::to_string(kv_heads) + " x " + std::to_string(dim) + (norm ? " norm" : "");
    if (!wanted("rope forward " + name) && !wanted("rope backward " + name)) continue;
    Memory m(queue);
    constexpr int64_t kLength = 4096;
    const Shape shape = {tokens, (heads + 2 * kv_heads) * dim};
    std::vector<int32_t> position;
    for (int64_t t = 0; t < tokens; ++t) position.push_back(static_cast<int32_t>(t % kLength));
    const TensorView none, positions = m.i32(position);
    const TensorView cos = m.normal(DType::kF32, {kLength, dim / 2});
    const TensorView sin = m.normal(DType::kF32, {kLength, dim / 2});
    const TensorView weight = norm ? m.normal(DType::kF32, {dim}) : none;
    const TensorView dweight[2] = {m.fresh(DType::kF32, {dim}), m.fresh(DType::kF32, {dim})};
    std::vector<QkNormRopeForward> forward;
    std::vector<QkNormRopeBackward> backward;
    for (int s = 0; s < kSets; ++s) {
      const TensorView qkv = m.normal(DType::kBf16, shape);
      const TensorView rstd = norm ? m.fresh(DType::kF32, {tokens, heads + kv_heads}) : none;
      forward.push_back({qkv, heads, kv_heads, dim, positions, cos, sin, weight, weight, 1e-5f,
                         m.fresh(DType::kBf16, shape), rstd});
      backward.push_back({qkv, heads, kv_heads, dim, positions, cos, sin, weight, weight, rstd,
                          m.normal(DType::kBf16, shape), m.fresh(DType::kBf16, shape),
                          norm ? dweight[0] : none, norm ? dweight[1] : none});
    }
    const int64_t plane = shape.elements() * 2, values = tokens * kv_heads * dim * 2;
    bench.measure("rope forward " + name, plane * 2,
                  [&](int s) { run(queue, forward[static_cast<size_t>(s)]); });
    bench.measure("rope backward " + name, norm ? plane * 3 - values : plane * 2,
                  [&](int s) { run(queue, backward[static_cast<size_t>(s)]); });
    if (!norm) continue;
    for (QkNormRopeBackward& op : backward) op.dqkv = op.dout;
    bench.measure("rope backward in place " + name, plane * 3 - 3 * values,
                  [&](int s) { run(queue, backward[static_cast<size_t>(s)]); });
  }
}

struct Adam {
  Adam(Memory& m, int64_t n, DType gradient, DType state, const TensorView& scale,
       const TensorView& go = {}) {
    op = {.grad = m.normal(gradient, {n}, 1e-3f),
          .grad_scale = scale,
          .master = m.normal(state, {n}, 0.02f),
          .m = m.normal(state, {n}, 1e-3f),
          .v = m.normal(state, {n}, 1e-6f, true),
          .copy = state == DType::kF32 ? m.fresh(DType::kBf16, {n}) : TensorView{},
          .lr = 1e-4f,
          .beta1 = 0.9f,
          .beta2 = 0.95f,
          .eps = 1e-8f,
          .weight_decay = 0.1f,
          .bias1 = 1.1f,
          .bias2 = 1.2f,
          .store_key = {1, 2},
          .apply = go};
    bytes = op.grad.bytes() + 2 * (op.master.bytes() + op.m.bytes() + op.v.bytes()) +
            (op.copy.empty() ? 0 : op.copy.bytes());
  }
  AdamWStep op;
  int64_t bytes;
};

void optimizers(Queue& queue, Bench& bench, int64_t n) {
  for (DType gradient : {DType::kBf16, DType::kF32}) {
    const std::string name = std::to_string(n) + " gradients " + dtype_name(gradient);
    if (wanted("sum of squares " + name)) {
      Memory m(queue);
      const SumSquares op{m.normal(gradient, {n}), m.fresh(DType::kF64, {1}), m.fresh(DType::kF64, {1})};
      bench.measure("sum of squares " + name, op.x.bytes(), [&](int) { run(queue, op); });
    }
    for (DType state : {DType::kF32, DType::kBf16}) {
      if (!wanted("adamw " + name + " state " + dtype_name(state))) continue;
      Memory m(queue);
      const Adam adam(m, n, gradient, state, m.f32({0.5f}));
      bench.measure("adamw " + name + " state " + dtype_name(state), adam.bytes,
                    [&](int) { run(queue, adam.op); });
    }
  }
}

// The update of 6 layers of Qwen3-30B-A3B (hidden 2048, 128 experts of 768): 3.95 billion parameters.
void whole_step(Queue& queue, Bench& bench) {
  if (!wanted("optimizer step of Q6")) return;
  Memory m(queue);
  const TensorView sum = m.fresh(DType::kF64, {1}), bad = m.fresh(DType::kF64, {1});
  const TensorView factor = m.fresh(DType::kF32, {1}), go = m.fresh(DType::kI32, {1});
  std::vector<Adam> list;
  const auto add = [&](int64_t n, DType gradient) {
    list.emplace_back(m, n, gradient, DType::kF32, factor, go);
    if (n < 1000000) list.back().op.copy = {};
  };
  add(int64_t{50304} * 2048, DType::kF32);
  for (int layer = 0; layer < 6; ++layer) {
    add(2048, DType::kF32);
    add(int64_t{5120} * 2048, DType::kBf16);
    for (int i = 0; i < 2; ++i) add(128, DType::kF32);
    add(int64_t{4096} * 2048, DType::kBf16);
    add(2048, DType::kF32);
    add(int64_t{128} * 2048, DType::kF32);
    add(int64_t{128} * 1536 * 2048, DType::kBf16);
    add(int64_t{128} * 768 * 2048, DType::kBf16);
  }
  add(2048, DType::kF32);
  add(int64_t{50304} * 2048, DType::kF32);
  int64_t bytes = 0;
  for (const Adam& a : list) bytes += a.bytes + a.op.grad.bytes();
  bench.measure(
      "optimizer step of Q6", bytes,
      [&](int) {
        queue.fill_bytes(sum.data, 0, 8);
        queue.fill_bytes(bad.data, 0, 8);
        for (const Adam& a : list) run(queue, SumSquares{a.op.grad, sum, bad});
        run(queue, ClipFactor{sum, bad, 0.0, 1.0, factor, go});
        for (const Adam& a : list) run(queue, a.op);
      },
      6);
}

}  // namespace
}  // namespace fp4t

int main(int argc, char** argv) {
  using namespace fp4t;
  if (argc > 1) filter = argv[1];
  if (cuda::device_count() == 0) {
    std::fprintf(stderr, "no GPU on this machine\n");
    return 1;
  }
  Queue queue = Queue::cuda(0);
  Bench bench(queue);
  norms(queue, bench, 16384, 2048);
  norms(queue, bench, 32768, 2048);
  norms(queue, bench, 16384, 4096);
  norms(queue, bench, 16384, 768);
  ropes(queue, bench, 16384, 32, 4, 128);
  ropes(queue, bench, 32768, 16, 4, 128);
  ropes(queue, bench, 16384, 12, 12, 64);
  optimizers(queue, bench, int64_t{400} << 20);
  whole_step(queue, bench);
  return 0;
}
