// Matrix products in GFLOP/s: ours on one and two threads, OpenBLAS's sgemm on one, in the same run.
//   bench_gemm --benchmark_filter=512
#include <benchmark/benchmark.h>
#include <cblas.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/base/queue.h"
#include "kernels/ops/run.h"
#include "tests/bench/values.h"

extern "C" void openblas_set_num_threads(int);

namespace fp4t {
namespace {

void report(benchmark::State& state, int64_t m, int64_t n, int64_t k) {
  state.counters["FLOP/s"] =
      benchmark::Counter(2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
                         benchmark::Counter::kIsIterationInvariantRate);
}

// Arguments: threads, M, N, K.
template <DType kType>
void gemm(benchmark::State& state) {
  Queue queue = Queue::cpu(static_cast<int>(state.range(0)));
  const int64_t m = state.range(1), n = state.range(2), k = state.range(3);
  Values a(kType, {m, k}), b(kType, {n, k}), out(kType, {m, n});
  const Gemm op{{a.view(), false, {}, {}}, {b.view(), false, {}, {}}, out.view(), false};
  for (auto _ : state) run(queue, op);
  report(state, m, n, k);
}

// Both operands tokens first, FP32 output accumulated: weight gradients.
template <DType kType>
void wgrad(benchmark::State& state) {
  Queue queue = Queue::cpu(static_cast<int>(state.range(0)));
  const int64_t m = state.range(1), n = state.range(2), k = state.range(3);
  Values a(kType, {k, m}), b(kType, {k, n}), out(DType::kF32, {m, n});
  const Gemm op{{a.view(), true, {}, {}}, {b.view(), true, {}, {}}, out.view(), true};
  for (auto _ : state) run(queue, op);
  report(state, m, n, k);
}

// M rows in 8 groups of equal size.
template <DType kType>
void grouped(benchmark::State& state) {
  Queue queue = Queue::cpu(static_cast<int>(state.range(0)));
  const int64_t m = state.range(1), n = state.range(2), k = state.range(3);
  std::vector<int32_t> offsets;
  for (int32_t g = 0; g <= 8; ++g) offsets.push_back(static_cast<int32_t>(m / 8) * g);
  Values a(kType, {m, k}), b(kType, {8, n, k}), out(kType, {m, n});
  const GroupedGemm op{
      {a.view(), false, {}, {}}, {b.view(), false, {}, {}}, {offsets.data(), DType::kI32, {9}}, out.view()};
  for (auto _ : state) run(queue, op);
  report(state, m, n, k);
}

// Codes and scales of a matrix: reproducible codes, all scales one.
class Codes {
 public:
  Codes(Format format, int64_t rows, int64_t cols) {
    QuantSpec spec;
    spec.format = format;
    const bool nvfp4 = format == Format::kNvfp4;
    view_ = quant_layout(spec, GroupAxis::kRows, 1, rows, cols);
    bytes_.resize(static_cast<size_t>(code_bytes(view_)));
    scales_.resize(static_cast<size_t>(block_scale_bytes(view_)), nvfp4 ? uint8_t{0x38} : uint8_t{127});
    uint32_t state = 1;
    for (uint8_t& b : bytes_) {
      state = state * 1664525u + 1013904223u;
      b = static_cast<uint8_t>(state >> 24 & 0xBB);  // no NaN among E4M3
    }
    view_.codes.data = bytes_.data();
    view_.block_scales.data = scales_.data();
    view_.tensor_scale = nvfp4 ? TensorView{&one_, DType::kF32, {1}} : TensorView{};
  }
  const QuantView& view() const { return view_; }

 private:
  QuantView view_;
  std::vector<uint8_t> bytes_, scales_;
  float one_ = 1;
};

template <Format kFormat>
void coded(benchmark::State& state) {
  Queue queue = Queue::cpu(static_cast<int>(state.range(0)));
  const int64_t m = state.range(1), n = state.range(2), k = state.range(3);
  const Codes a(kFormat, m, k), b(kFormat, n, k);
  Values out(DType::kBf16, {m, n});
  const Gemm op{{{}, false, a.view(), {}}, {{}, false, b.view(), {}}, out.view(), false};
  for (auto _ : state) run(queue, op);
  report(state, m, n, k);
}

void openblas(benchmark::State& state) {
  openblas_set_num_threads(static_cast<int>(state.range(0)));
  const int64_t m = state.range(1), n = state.range(2), k = state.range(3);
  Values a(DType::kF32, {m, k}), b(DType::kF32, {n, k}), out(DType::kF32, {m, n});
  const auto i = [](int64_t x) { return static_cast<int>(x); };
  for (auto _ : state) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, i(m), i(n), i(k), 1.0f, a.view().as<float>(), i(k),
                b.view().as<float>(), i(k), 0.0f, out.view().as<float>(), i(n));
  }
  report(state, m, n, k);
}

void shapes(benchmark::internal::Benchmark* b) {
  b->Args({1, 512, 512, 512})->Args({2, 512, 512, 512});
  for (const int64_t n : {256, 257}) b->Args({1, 2048, n, 128})->Args({2, 2048, n, 128});
  for (const int64_t m : {1, 4, 16}) b->Args({1, m, 256, 128})->Args({1, m, 2048, 2048});
  b->Args({1, 512, 256, 128})->Args({2, 512, 256, 128});
  b->Args({1, 1024, 1024, 1024})->Args({2, 1024, 4096, 1024})->Args({1, 512, 2048, 4096});
}
void one_thread_shapes(benchmark::internal::Benchmark* b) {
  b->Args({1, 512, 512, 512})->Args({1, 2048, 256, 128})->Args({1, 1024, 1024, 1024});
  b->Args({1, 1, 2048, 2048})->Args({1, 16, 2048, 2048});
}
void coded_shapes(benchmark::internal::Benchmark* b) {
  for (const int64_t n : {256, 128}) b->Args({1, 2048, n, 128})->Args({2, 2048, n, 128});
  b->Args({1, 16, 2048, 2048})->Args({1, 1, 2048, 2048})->Args({1, 512, 512, 512});
}
void wgrad_shapes(benchmark::internal::Benchmark* b) {
  b->Args({1, 256, 128, 2048})->Args({2, 256, 128, 2048})->Args({1, 1024, 1024, 2048});
}
void grouped_shapes(benchmark::internal::Benchmark* b) {
  for (const int64_t n : {256, 128}) b->Args({1, 4096, n, 128})->Args({2, 4096, n, 128});
  b->Args({1, 64, 256, 128})->Args({2, 64, 256, 128});
}

BENCHMARK(openblas)->Apply(one_thread_shapes)->UseRealTime();
BENCHMARK_TEMPLATE(gemm, DType::kF32)->Apply(shapes)->UseRealTime();
BENCHMARK_TEMPLATE(gemm, DType::kBf16)->Apply(shapes)->UseRealTime();
BENCHMARK_TEMPLATE(wgrad, DType::kF32)->Apply(wgrad_shapes)->UseRealTime();
BENCHMARK_TEMPLATE(wgrad, DType::kBf16)->Apply(wgrad_shapes)->UseRealTime();
BENCHMARK_TEMPLATE(coded, Format::kNvfp4)->Apply(coded_shapes)->UseRealTime();
BENCHMARK_TEMPLATE(coded, Format::kMxfp8)->Apply(coded_shapes)->UseRealTime();
BENCHMARK_TEMPLATE(grouped, DType::kF32)->Apply(grouped_shapes)->UseRealTime();
BENCHMARK_TEMPLATE(grouped, DType::kBf16)->Apply(grouped_shapes)->UseRealTime();

}  // namespace
}  // namespace fp4t

BENCHMARK_MAIN();
