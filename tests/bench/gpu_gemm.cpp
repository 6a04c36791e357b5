// The wgmma core beside cuBLASLt on one GPU: BENCH.md's rows for products.
//   bench_gpu_gemm check    small and ragged products of every mode against cuBLASLt, element by element
//   bench_gpu_gemm dense    ours and cuBLASLt (the best of its first candidates) in turn, medians
//   bench_gpu_gemm few      dense products of a decode step, ours in the one order over K that sampling and
//                           training share, cuBLASLt's in any: what that order costs
//   bench_gpu_gemm grouped  products of experts; scripts/bench/torch_grouped.py times PyTorch's
// A second argument picks cases by a part of their names.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/queue.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/gemm_cores.h"
#include "kernels/cuda/gemm_problem.h"
#include "kernels/formats/bf16.h"
#include "tests/bench/cublaslt.h"

namespace fp4t {
namespace {

using cuda::GemmMode, cuda::GemmProblem;

constexpr int64_t kRotate = int64_t{200} << 20;  // more than three times the L2

// Standard normals in BF16, a long period repeated from a different place each time.
void fill_normal(const Bytes& to) {
  static const std::vector<Bf16> values = [] {
    std::vector<Bf16> v((1 << 22) + 8191);
    std::mt19937_64 bits(1);
    std::normal_distribution<float> normal;
    for (Bf16& x : v) x = f32_to_bf16(normal(bits));
    return v;
  }();
  static size_t start = 0;
  const int64_t period = static_cast<int64_t>(values.size()) * 2;
  int64_t done = 0;
  while (done < to.size()) {
    start = (start + 1237 * 8) % values.size();
    const int64_t from = done == 0 ? static_cast<int64_t>(start) * 2 : 0;
    const int64_t count = std::min(to.size() - done, period - from);
    FP4T_CUDA(cudaMemcpy(to.as<char>() + done, reinterpret_cast<const char*>(values.data()) + from,
                         static_cast<size_t>(count), cudaMemcpyHostToDevice));
    done += count;
  }
}

// Shapes and operands -------------------------------------------------------------------------------

struct Case {
  GemmMode mode;
  int64_t m, n, k;
  bool mn_a, mn_b;
  DType out;
  bool accumulate = false;
  std::vector<int32_t> offsets = {};  // of grouped modes
  int64_t multiple = 1;
  int64_t groups() const { return offsets.empty() ? 1 : static_cast<int64_t>(offsets.size()) - 1; }
  int64_t b_matrices() const { return mode == GemmMode::kGroupedM ? groups() : 1; }
  int64_t out_matrices() const { return mode == GemmMode::kGroupedK ? groups() : 1; }
};

// The tensors of one case on the device.
struct Tensors {
  Bytes a, b, out, offsets;
  explicit Tensors(const Case& c)
      : a(c.m * c.k * 2),
        b(c.b_matrices() * c.n * c.k * 2),
        out(c.out_matrices() * c.m * c.n * dtype_bytes(c.out)),
        offsets(static_cast<int64_t>(c.offsets.size()) * 4) {
    fill_normal(a);
    fill_normal(b);
    if (!c.offsets.empty()) {
      FP4T_CUDA(
          cudaMemcpy(offsets.as<void>(), c.offsets.data(), c.offsets.size() * 4, cudaMemcpyHostToDevice));
    }
  }
};

GemmProblem problem_of(const Case& c, const Tensors& t) {
  GemmProblem p;
  p.mode = c.mode;
  p.m = c.m, p.n = c.n, p.k = c.k;
  p.a = {t.a.as<Bf16>(), c.mn_a, c.mn_a ? c.m : c.k, 0, nullptr, cuda::ScaleOf::kNone};
  p.b = {t.b.as<Bf16>(), c.mn_b, c.mn_b ? c.n : c.k, c.n * c.k, nullptr, cuda::ScaleOf::kNone};
  if (!c.offsets.empty()) p.offsets = t.offsets.as<int32_t>();
  p.groups = c.groups();
  p.offset_multiple = c.multiple;
  p.out = t.out.as<void>();
  p.out_dtype = c.out;
  p.ld_out = c.n;
  p.accumulate = c.accumulate;
  return p;
}

// The dense products that a case consists of, into FP32 at `out` (same places as the case's own output).
std::vector<GemmProblem> parts_of(const Case& c, const GemmProblem& whole, float* out) {
  std::vector<GemmProblem> parts;
  for (int64_t g = 0; g < c.groups(); ++g) {
    GemmProblem p = whole;
    p.mode = GemmMode::kDense;
    p.out_dtype = DType::kF32;
    p.out = out;
    if (c.mode != GemmMode::kDense) {
      const int64_t begin = c.offsets[static_cast<size_t>(g)],
                    count = c.offsets[static_cast<size_t>(g) + 1] - begin;
      if (count == 0) continue;
      if (c.mode == GemmMode::kGroupedM) {
        p.m = count;
        p.a.data += begin * c.k;
        p.b.data += g * c.n * c.k;
        p.out = out + begin * c.n;
      } else {
        p.k = count;
        p.a.data += begin * (c.mn_a ? c.m : 1);
        p.b.data += begin * (c.mn_b ? c.n : 1);
        p.out = out + g * c.m * c.n;
      }
    }
    parts.push_back(p);
  }
  return parts;
}

const char* mode_name(GemmMode mode) {
  return mode == GemmMode::kDense ? "dense" : mode == GemmMode::kGroupedM ? "m-grouped" : "k-grouped";
}

std::string name_of(const Case& c) {
  return detail::concat(mode_name(c.mode), " ", c.m, "x", c.n, "x", c.k, " ", c.mn_a ? "mn" : "k", ",",
                        c.mn_b ? "mn" : "k", c.out == DType::kBf16 ? " bf16" : " f32",
                        c.accumulate ? " +=" : "", c.offsets.empty() ? "" : detail::concat(" G", c.groups()));
}

// Only cases whose label or name contains this are run.
std::string g_filter;

// Check ----------------------------------------------------------------------------------------------

std::vector<float> floats_of(const Bytes& from, DType dtype, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  if (dtype == DType::kF32) {
    FP4T_CUDA(cudaMemcpy(out.data(), from.as<void>(), out.size() * 4, cudaMemcpyDeviceToHost));
    return out;
  }
  std::vector<Bf16> raw(out.size());
  FP4T_CUDA(cudaMemcpy(raw.data(), from.as<void>(), raw.size() * 2, cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < raw.size(); ++i) out[i] = bf16_to_f32(raw[i]);
  return out;
}

bool check_case(Queue& queue, Lt& lt, const Case& c) {
  const Tensors t(c);
  const cudaStream_t stream = cuda::stream_of(queue);
  const int64_t count = c.out_matrices() * c.m * c.n;
  const GemmProblem p = problem_of(c, t);
  if (!cuda::wgmma_takes(queue, p)) {
    std::printf("REFUSED %s\n", name_of(c).c_str());
    return false;
  }
  // Before: 0x41 bytes (12.1 in FP32) everywhere, so that what is left alone shows.
  t.out.fill(0x41);
  if (c.mode == GemmMode::kGroupedK && c.mn_a) {  // depth beyond the last group is NaN
    for (const auto& [side, width] : {std::pair{&t.a, c.m}, std::pair{&t.b, c.n}}) {
      const int64_t used = c.offsets.back() * width * 2;
      FP4T_CUDA(cudaMemset(side->as<char>() + used, 0xFF, static_cast<size_t>(side->size() - used)));
    }
  }
  const Bytes reference(count * 4);
  if (c.mode == GemmMode::kGroupedK && !c.accumulate) {
    reference.fill(0);
  } else if (c.out == DType::kF32) {
    reference.fill(0x41);
  } else {
    const std::vector<float> before = floats_of(t.out, c.out, count);
    FP4T_CUDA(cudaMemcpy(reference.as<void>(), before.data(), before.size() * 4, cudaMemcpyHostToDevice));
  }
  for (const GemmProblem& part : parts_of(c, p, reference.as<float>())) {
    Lt::Plan plan = lt.plan(part, 1);
    lt.run(plan, part, stream);
    Lt::destroy(plan);
  }
  cuda::launch_wgmma(queue, p);
  queue.synchronize();
  const std::vector<float> ours = floats_of(t.out, c.out, count),
                           theirs = floats_of(reference, DType::kF32, count);
  const double scale = std::sqrt(static_cast<double>(c.k));
  int64_t wrong = 0, first = -1;
  double worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = ours[static_cast<size_t>(i)], y = theirs[static_cast<size_t>(i)], d = std::fabs(x - y);
    const double allowed = 1e-5 * scale + (c.out == DType::kBf16 ? 0x1p-8 * std::fabs(y) : 0);
    if (!(d <= allowed)) {
      ++wrong;
      if (first < 0) first = i;
    }
    worst = std::max(worst, d / scale);
  }
  std::printf("%s %s: worst %.3g of sqrt(K)", wrong == 0 ? "ok    " : "WRONG ", name_of(c).c_str(), worst);
  if (wrong > 0) {
    std::printf(", %ld wrong, first at %ld (row %ld, column %ld): %g instead of %g", static_cast<long>(wrong),
                static_cast<long>(first), static_cast<long>(first / c.n), static_cast<long>(first % c.n),
                ours[static_cast<size_t>(first)], theirs[static_cast<size_t>(first)]);
  }
  std::printf("\n");
  return wrong == 0;
}

std::vector<Case> check_cases() {
  std::vector<Case> cases;
  const auto kBf16 = DType::kBf16, kF32 = DType::kF32;
  for (const auto& [mn_a, mn_b] : {std::pair{false, false}, std::pair{false, true}, std::pair{true, true}}) {
    for (const DType out : {kBf16, kF32}) {
      cases.push_back({GemmMode::kDense, 256, 512, 256, mn_a, mn_b, out});
      cases.push_back({GemmMode::kDense, 2048, 1536, 512, mn_a, mn_b, out});
      cases.push_back({GemmMode::kDense, 136, 200, 88, mn_a, mn_b, out});
      cases.push_back({GemmMode::kDense, 8, 384, 1000, mn_a, mn_b, out});
      cases.push_back({GemmMode::kDense, 4104, 3000, 320, mn_a, mn_b, out});
    }
    cases.push_back({GemmMode::kDense, 1024, 768, 512, mn_a, mn_b, kF32, true});
    cases.push_back({GemmMode::kDense, 200, 136, 72, mn_a, mn_b, kF32, true});
  }
  cases.push_back({GemmMode::kDense, 77, 257, 256, false, false, kBf16});
  cases.push_back({GemmMode::kDense, 77, 257, 256, false, false, kF32, true});
  const std::vector<int32_t> ragged = {0, 0, 1, 130, 130, 386, 703, 704, 1200};
  for (const bool mn_b : {false, true}) {
    for (const DType out : {kBf16, kF32}) {
      cases.push_back({GemmMode::kGroupedM, 1300, 768, 512, false, mn_b, out, false, ragged});
      cases.push_back({GemmMode::kGroupedM, 1300, 200, 88, false, mn_b, out, false, ragged});
      cases.push_back({GemmMode::kGroupedM, 1200, 128, 64, false, mn_b, out, false, ragged});
    }
  }
  cases.push_back({GemmMode::kGroupedM, 1300, 264, 88, false, true, kBf16, false, {5, 5, 133, 200}});
  cases.push_back({GemmMode::kGroupedM, 64, 264, 88, false, true, kBf16, false, {0, 0, 0}});
  for (const bool add : {false, true}) {
    cases.push_back({GemmMode::kGroupedK, 768, 512, 1300, true, true, kF32, add, ragged});
    cases.push_back({GemmMode::kGroupedK, 200, 88, 1300, true, true, kF32, add, ragged});
    cases.push_back(
        {GemmMode::kGroupedK, 384, 512, 1280, false, false, kF32, add, {0, 0, 32, 96, 992, 1248, 1248}, 32});
  }
  cases.push_back({GemmMode::kGroupedK, 384, 520, 1300, true, true, kBf16, false, ragged});
  cases.push_back(
      {GemmMode::kGroupedK, 384, 520, 1280, false, false, kBf16, false, {0, 0, 32, 96, 992, 1248, 1248}, 32});
  return cases;
}

// A row's bits must not depend on the rows around it.
bool check_invariance(Queue& queue) {
  const Case big{GemmMode::kDense, 3000, 1536, 1000, false, false, DType::kF32};
  const Tensors t(big);
  GemmProblem p = problem_of(big, t);
  cuda::launch_wgmma(queue, p);
  queue.synchronize();
  const std::vector<float> whole = floats_of(t.out, DType::kF32, big.m * big.n);
  bool same = true;
  for (const int64_t row : {0, 63, 1111, 2999}) {
    p.m = 1;
    p.a.data = t.a.as<Bf16>() + row * big.k;
    cuda::launch_wgmma(queue, p);
    queue.synchronize();
    const std::vector<float> alone = floats_of(t.out, DType::kF32, big.n);
    same &= std::memcmp(alone.data(), whole.data() + row * big.n, alone.size() * 4) == 0;
  }
  std::printf("%s rows alone have the bits that they have among others\n", same ? "ok    " : "WRONG ");
  return same;
}

int check() {
  Queue queue = Queue::cuda(0);
  Lt lt;
  bool good = true;
  for (const Case& c : check_cases()) {
    if (name_of(c).find(g_filter) != std::string::npos) good &= check_case(queue, lt, c);
  }
  good &= check_invariance(queue);
  std::printf(good ? "all right\n" : "FAILED\n");
  return good ? 0 : 1;
}

// Speed ----------------------------------------------------------------------------------------------

class Timer {
 public:
  Timer() {
    FP4T_CUDA(cudaEventCreate(&begin_));
    FP4T_CUDA(cudaEventCreate(&end_));
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  double milliseconds(cudaStream_t stream, const std::function<void()>& work) {
    FP4T_CUDA(cudaEventRecord(begin_, stream));
    work();
    FP4T_CUDA(cudaEventRecord(end_, stream));
    FP4T_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    FP4T_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms;
  }

 private:
  cudaEvent_t begin_, end_;
};

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

// Sets of tensors, so many that one turn through them passes the L2 three times.
std::vector<std::unique_ptr<Tensors>> rotation(const Case& c) {
  std::vector<std::unique_ptr<Tensors>> sets;
  int64_t bytes = 0;
  while (bytes < kRotate) {
    sets.push_back(std::make_unique<Tensors>(c));
    const Tensors& t = *sets.back();
    t.out.fill(0);
    bytes += t.a.size() + t.b.size() + t.out.size();
  }
  return sets;
}

// `repeat` launches a measurement: short kernels one by one would be timed by their launches.
void bench_case(Queue& queue, Lt* lt, const Case& c, const char* label, int repeat = 1) {
  if ((label + (" " + name_of(c))).find(g_filter) == std::string::npos) return;
  const auto sets = rotation(c);
  std::vector<GemmProblem> problems;
  for (const auto& t : sets) problems.push_back(problem_of(c, *t));
  const cudaStream_t stream = cuda::stream_of(queue);
  Timer timer;
  size_t turn = 0;
  const auto next = [&]() -> const GemmProblem& { return problems[turn++ % problems.size()]; };
  double flops = 2.0 * static_cast<double>(c.m) * static_cast<double>(c.n) * static_cast<double>(c.k);
  const auto timed = [&](const std::function<void()>& launch) {
    const auto all = [&] {
      for (int i = 0; i < repeat; ++i) launch();
    };
    return timer.milliseconds(stream, all) / repeat;
  };
  const auto ours = [&] {
    return timed([&] {
      const GemmProblem& p = next();
      cuda::stream_takes(p) ? cuda::launch_stream_bf16(queue, p) : cuda::launch_wgmma(queue, p);
    });
  };
  std::vector<double> mine, theirs;
  Lt::Plan plan{};
  const auto lts = [&] { return timed([&] { lt->run(plan, next(), stream); }); };
  if (lt != nullptr) {
    plan = lt->plan(problems[0], 6);
    std::vector<double> times;
    for (plan.chosen = 0; plan.chosen < plan.algorithms.size(); ++plan.chosen) {
      lts();
      times.push_back(median({lts(), lts(), lts(), lts(), lts()}));
    }
    plan.chosen = static_cast<size_t>(std::min_element(times.begin(), times.end()) - times.begin());
  }
  for (int i = 0; i < 3; ++i) ours();
  for (int i = 0; i < 25; ++i) {
    mine.push_back(ours());
    if (lt != nullptr) theirs.push_back(lts());
  }
  const double ms = median(mine);
  std::printf("%-28s %-44s %8.3f ms %6.0f TFLOP/s", label, name_of(c).c_str(), ms, flops / ms / 1e9);
  if (lt != nullptr) {
    const double other = median(theirs);
    std::printf("   cuBLASLt %8.3f ms %6.0f   ratio %.3f (candidate %zu)", other, flops / other / 1e9,
                other / ms, plan.chosen);
    Lt::destroy(plan);
  }
  std::printf("\n");
  std::fflush(stdout);
}

int bench_dense() {
  Queue queue = Queue::cuda(0);
  Lt lt;
  const auto kBf16 = DType::kBf16, kF32 = DType::kF32;
  const auto dense = [](int64_t m, int64_t n, int64_t k, bool mn_a, bool mn_b, DType out, bool add = false) {
    return Case{GemmMode::kDense, m, n, k, mn_a, mn_b, out, add};
  };
  bench_case(queue, &lt, dense(8192, 8192, 8192, false, false, kBf16), "square");
  bench_case(queue, &lt, dense(4096, 4096, 4096, false, false, kBf16), "square");
  bench_case(queue, &lt, dense(16384, 5120, 2048, false, false, kBf16), "qkv forward");
  bench_case(queue, &lt, dense(16384, 2048, 4096, false, false, kBf16), "attn out forward");
  bench_case(queue, &lt, dense(16384, 50304, 2048, false, false, kBf16), "head forward");
  bench_case(queue, &lt, dense(16384, 2048, 5120, false, true, kBf16), "qkv dgrad");
  bench_case(queue, &lt, dense(16384, 4096, 2048, false, true, kBf16), "attn out dgrad");
  bench_case(queue, &lt, dense(16384, 2048, 50304, false, true, kBf16), "head dgrad");
  bench_case(queue, &lt, dense(5120, 2048, 16384, true, true, kF32), "qkv wgrad");
  bench_case(queue, &lt, dense(5120, 2048, 16384, true, true, kF32, true), "qkv wgrad");
  bench_case(queue, &lt, dense(2048, 4096, 16384, true, true, kF32, true), "attn out wgrad");
  bench_case(queue, &lt, dense(50304, 2048, 16384, true, true, kF32, true), "head wgrad");
  return 0;
}

int bench_few() {
  Queue queue = Queue::cuda(0);
  Lt lt;
  for (const int64_t rows : {1, 16, 64}) {
    const auto dense = [&](int64_t n, int64_t k, DType out) {
      return Case{GemmMode::kDense, rows, n, k, false, false, out};
    };
    bench_case(queue, &lt, dense(5120, 2048, DType::kBf16), "qkv, few rows", 20);
    bench_case(queue, &lt, dense(2048, 4096, DType::kBf16), "attn out, few rows", 20);
    bench_case(queue, &lt, dense(50304, 2048, DType::kF32), "head, few rows", 4);
  }
  return 0;
}

int bench_grouped() {
  Queue queue = Queue::cuda(0);
  const auto kBf16 = DType::kBf16, kF32 = DType::kF32;
  const int64_t groups = 128, rows = 1024, tokens = groups * rows;
  std::vector<int32_t> even, uneven = {0};
  for (int64_t g = 0; g <= groups; ++g) even.push_back(static_cast<int32_t>(g * rows));
  std::mt19937 bits(7);
  for (int64_t g = 1; g < groups; ++g) {  // pairs that share 2048 rows unevenly
    const int32_t base = static_cast<int32_t>((g - 1) / 2 * 2 * rows);
    uneven.push_back(g % 2 == 1 ? base + 300 + static_cast<int32_t>(bits() % 1448)
                                : static_cast<int32_t>(g * rows));
  }
  uneven.push_back(static_cast<int32_t>(tokens));
  for (const auto& [offsets, label] : {std::pair{even, "even"}, std::pair{uneven, "uneven"}}) {
    const std::string l = label;
    const auto rows_case = [&, o = offsets](int64_t n, int64_t k, bool mn_b) {
      return Case{GemmMode::kGroupedM, tokens, n, k, false, mn_b, kBf16, false, o};
    };
    const auto depth_case = [&, o = offsets](int64_t m, int64_t n, DType out, bool add) {
      return Case{GemmMode::kGroupedK, m, n, tokens, true, true, out, add, o};
    };
    bench_case(queue, nullptr, rows_case(1536, 2048, false), ("gate+up forward, " + l).c_str());
    bench_case(queue, nullptr, rows_case(2048, 768, false), ("down forward, " + l).c_str());
    bench_case(queue, nullptr, rows_case(2048, 1536, true), ("gate+up dgrad, " + l).c_str());
    bench_case(queue, nullptr, rows_case(768, 2048, true), ("down dgrad, " + l).c_str());
    bench_case(queue, nullptr, depth_case(1536, 2048, kBf16, false), ("gate+up wgrad, " + l).c_str());
    bench_case(queue, nullptr, depth_case(1536, 2048, kF32, false), ("gate+up wgrad, " + l).c_str());
    bench_case(queue, nullptr, depth_case(1536, 2048, kF32, true), ("gate+up wgrad, " + l).c_str());
    bench_case(queue, nullptr, depth_case(2048, 768, kBf16, false), ("down wgrad, " + l).c_str());
    bench_case(queue, nullptr, depth_case(2048, 768, kF32, true), ("down wgrad, " + l).c_str());
  }
  return 0;
}

}  // namespace
}  // namespace fp4t

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  if (argc > 2) fp4t::g_filter = argv[2];
  if (what == "check") return fp4t::check();
  if (what == "dense") return fp4t::bench_dense();
  if (what == "few") return fp4t::bench_few();
  if (what == "grouped") return fp4t::bench_grouped();
  std::fprintf(stderr, "usage: bench_gpu_gemm check|dense|few|grouped [part of a case's name]\n");
  return 2;
}
