// Log-probabilities, their gradients and sampling on one GPU: time and bytes a second (each row read once,
// gradients written once), beside a copy of the same bytes.
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

// Median milliseconds of calls(i), each timed by itself.
double median(Queue& queue, const std::function<void(int)>& call) {
  cudaStream_t stream = cuda::stream_of(queue);
  cudaEvent_t begin, end;
  FP4T_CUDA(cudaEventCreate(&begin));
  FP4T_CUDA(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = 0; i < 25; ++i) {
    FP4T_CUDA(cudaEventRecord(begin, stream));
    call(i);
    FP4T_CUDA(cudaEventRecord(end, stream));
    queue.synchronize();
    float ms = 0;
    FP4T_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 5) times.push_back(static_cast<double>(ms));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void report(const std::string& what, double ms, double bytes) {
  std::printf("%-52s %9.4f ms %8.1f GB/s\n", what.c_str(), ms, bytes / ms * 1e-6);
}

void measure_loss(Queue& queue, int64_t rows, int64_t vocab) {
  Memory b(queue);
  const std::string shape = std::to_string(rows) + " x " + std::to_string(vocab);
  const TensorView logits = b.normal(DType::kF32, {rows, vocab}, 2.0f),
                   dlogits = b.fresh(DType::kBf16, {rows, vocab});
  const TensorView targets = b.fresh(DType::kI32, {rows}), log_prob = b.fresh(DType::kF32, {rows});
  const TensorView lse = b.fresh(DType::kF32, {rows}), entropy = b.fresh(DType::kF32, {rows});
  const TensorView weight = b.fresh(DType::kF32, {rows});
  const std::vector<float> ones(static_cast<size_t>(rows), 1.0f);
  queue.copy_from_host(weight.data, ones.data(), weight.bytes());
  const auto read = static_cast<double>(logits.bytes());
  report("copy " + shape,
         median(queue,
                [&](int) {
                  FP4T_CUDA(cudaMemcpyAsync(dlogits.data, logits.data, static_cast<size_t>(dlogits.bytes()),
                                            cudaMemcpyDeviceToDevice, cuda::stream_of(queue)));
                }),
         2.0 * static_cast<double>(dlogits.bytes()));
  for (const float top_p : {1.0f, 0.9f}) {
    for (const float temperature : {1.0f, 0.7f}) {
      const std::string suffix = " " + shape + " T " + std::to_string(temperature).substr(0, 3) + " top_p " +
                                 std::to_string(top_p).substr(0, 3);
      report("forward" + suffix,
             median(queue,
                    [&](int) {
                      run(queue, LogProbForward{logits, targets, temperature, top_p, log_prob, lse, {}});
                    }),
             read);
      report("forward, entropy" + suffix,
             median(queue,
                    [&](int) {
                      run(queue, LogProbForward{logits, targets, temperature, top_p, log_prob, lse, entropy});
                    }),
             read);
      report("backward BF16" + suffix,
             median(queue,
                    [&](int) {
                      run(queue, LogProbBackward{
                                     logits, targets, temperature, top_p, lse, {}, weight, {}, {}, dlogits});
                    }),
             1.5 * read);
    }
  }
  report("backward in place " + shape,
         median(queue,
                [&](int) {
                  run(queue, LogProbBackward{logits, targets, 1.0f, 1.0f, lse, {}, weight, {}, {}, logits});
                }),
         2.0 * read);
}

void measure_sample(Queue& queue, int64_t rows, int64_t vocab) {
  Memory b(queue);
  const std::string shape = std::to_string(rows) + " x " + std::to_string(vocab);
  // Calls take turns over more than three times the L2.
  const int64_t copies = std::max<int64_t>(1, (int64_t{200} << 20) / (rows * vocab * 4));
  const TensorView logits = b.normal(DType::kF32, {copies * rows, vocab}, 2.0f);
  const TensorView ids = b.fresh(DType::kI64, {rows}), positions = b.fresh(DType::kI32, {rows});
  const TensorView tokens = b.fresh(DType::kI32, {rows}), log_prob = b.fresh(DType::kF32, {rows});
  for (const float top_p : {1.0f, 0.9f}) {
    for (const float temperature : {1.0f, 0.7f, 0.0f}) {
      report("sample " + shape + " T " + std::to_string(temperature).substr(0, 3) + " top_p " +
                 std::to_string(top_p).substr(0, 3),
             median(queue,
                    [&](int i) {
                      run(queue, SampleTokens{logits.rows(i % copies * rows, rows), temperature, top_p,
                                              PhiloxKey{1, 2}, ids, positions, tokens, log_prob});
                    }),
             static_cast<double>(rows * vocab * 4));
    }
  }
}

}  // namespace
}  // namespace fp4t

int main() {
  using namespace fp4t;
  if (cuda::device_count() == 0) return 77;
  Queue queue = Queue::cuda(0);
  measure_loss(queue, 8192, 50304);
  measure_loss(queue, 4096, 151936);
  measure_loss(queue, 8192, 50257);
  measure_loss(queue, 262144, 257);
  for (const int64_t vocab : {50304, 151936}) {
    for (const int64_t rows : {1, 32, 256, 1024}) measure_sample(queue, rows, vocab);
  }
  measure_sample(queue, 256, 257);
  return 0;
}
