// Quantisers on a GPU: microseconds, and bytes a second over those of a plain copy in the same run.
//   bench_gpu_quantize [--once] [rows cols]...      (8192 2048 and 32768 2048 where none are given)
// --once runs every case once, for a profiler.
// `once` counts x read once and everything written, `moved` counts x twice where maxima need a pass of their
// own. Inputs and outputs rotate over more than three times the L2; medians of the repetitions.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/context.h"
#include "kernels/formats/bf16.h"
#include "kernels/ops/run.h"

namespace fp4t {
namespace {

constexpr int64_t kCacheBytes = int64_t{50} << 20;
constexpr int kRepetitions = 15;

class Bench {
 public:
  explicit Bench(bool once)
      : repetitions_(once ? 1 : kRepetitions),
        warm_ups_(once ? 0 : 2),
        queue_(Queue::cuda(0)),
        stream_(cuda::stream_of(queue_)) {
    std::mt19937_64 engine(1);
    std::normal_distribution<float> normal;
    for (int i = 0; i < 1 << 20; ++i) values_.push_back(f32_to_bf16(normal(engine)));
    FP4T_CUDA(cudaEventCreate(&begin_));
    FP4T_CUDA(cudaEventCreate(&end_));
  }
  ~Bench() {
    for (void* p : memory_) queue_.release(p);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  Queue& queue() { return queue_; }
  cudaStream_t stream() const { return stream_; }
  void* bytes(int64_t count) {
    memory_.push_back(queue_.allocate(count));
    return memory_.back();
  }
  TensorView zeros(DType dtype, const Shape& shape) {
    const TensorView v{bytes(shape.elements() * dtype_bytes(dtype)), dtype, shape};
    FP4T_CUDA(cudaMemsetAsync(v.data, 0, static_cast<size_t>(v.bytes()), stream_));
    return v;
  }
  TensorView normal(const Shape& shape) {
    const TensorView v{bytes(shape.elements() * 2), DType::kBf16, shape};
    const int64_t own = static_cast<int64_t>(values_.size());
    for (int64_t at = 0; at < shape.elements(); at += own) {
      queue_.copy_from_host(v.as<Bf16>() + at, values_.data(), 2 * std::min(own, shape.elements() - at));
    }
    return v;
  }
  QuantView quant(QuantView layout) {
    for (TensorView* part : {&layout.codes, &layout.block_scales, &layout.tensor_scale}) {
      if (part->shape.rank() > 0) part->data = bytes(part->bytes());
    }
    return layout;
  }
  void release_all() {
    queue_.synchronize();
    for (void* p : memory_) queue_.release(p);
    memory_.clear();
  }

  // Median microseconds of one call of body(i), over all i below `sets`.
  double time(int sets, const std::function<void(int)>& body) {
    std::vector<double> times;
    for (int r = -warm_ups_; r < repetitions_; ++r) {
      FP4T_CUDA(cudaEventRecord(begin_, stream_));
      for (int i = 0; i < sets; ++i) body(i);
      FP4T_CUDA(cudaEventRecord(end_, stream_));
      FP4T_CUDA(cudaEventSynchronize(end_));
      float ms = 0;
      FP4T_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
      if (r >= 0) times.push_back(1e3 * double{ms} / sets);
    }
    std::nth_element(times.begin(), times.begin() + repetitions_ / 2, times.end());
    return times[static_cast<size_t>(repetitions_ / 2)];
  }

 private:
  int repetitions_, warm_ups_;
  Queue queue_;
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
  std::vector<Bf16> values_;
  std::vector<void*> memory_;
};

double copy_rate(Bench& bench) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  void *from = bench.bytes(kBytes), *to = bench.bytes(kBytes);
  const double us = bench.time(4, [&](int) {
    FP4T_CUDA(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice, bench.stream()));
  });
  bench.release_all();
  return 2.0 * kBytes / us;
}

struct Case {
  std::string name;
  std::vector<std::pair<QuantSpec, Orientation>> parts;
  int64_t groups = 1;
  bool together = false;  // by QuantizeBoth
  bool counted = false;   // with the monitors' counts, as in training
};

void measure(Bench& bench, bool once_only, double copy, const Case& c, int64_t rows, int64_t cols) {
  const int sets =
      once_only ? 1 : static_cast<int>(std::max<int64_t>(2, 3 * kCacheBytes / (rows * cols * 2) + 1));
  std::vector<std::vector<Quantize>> ops;
  double once = 2.0 * static_cast<double>(rows * cols), moved = 0;
  for (int s = 0; s < sets; ++s) {
    const TensorView x = bench.normal({rows, cols});
    std::vector<Quantize> own;
    for (const auto& [spec, orientation] : c.parts) {
      const bool row = orientation == Orientation::kRow;
      Quantize op{};
      op.x = x;
      op.orientation = orientation;
      op.draw_key = {1, static_cast<uint32_t>(s)};
      op.signs_key = {2, static_cast<uint32_t>(s)};
      if (c.groups > 1) op.first_expert = 0;
      if (c.counted) op.stats = bench.zeros(DType::kF64, {kNumQuantStats});
      op.out = bench.quant(quant_layout(spec, row ? GroupAxis::kRows : GroupAxis::kCols, c.groups,
                                        row ? rows : cols, row ? cols : rows));
      own.push_back(op);
      if (s > 0) continue;
      const double written = static_cast<double>(code_bytes(op.out) + block_scale_bytes(op.out));
      once += written;
      moved += written;
      if (c.together && own.size() == 2) continue;  // the first has read x
      moved += static_cast<double>(rows * cols) * (spec.format == Format::kNvfp4 ? 4 : 2);
    }
    ops.push_back(own);
  }
  const double us = bench.time(sets, [&](int s) {
    const std::vector<Quantize>& own = ops[static_cast<size_t>(s)];
    if (c.together) {
      run(bench.queue(), QuantizeBoth{own[0], own[1]});
    } else {
      for (const Quantize& op : own) run(bench.queue(), op);
    }
  });
  std::printf("%-44s %6ld x %5ld  %9.1f us  once %.3f  moved %.3f of copy\n", c.name.c_str(),
              static_cast<long>(rows), static_cast<long>(cols), us, once / us / copy, moved / us / copy);
  std::fflush(stdout);
  bench.release_all();
}

std::vector<Case> cases() {
  const QuantSpec mxfp8{.format = Format::kMxfp8}, nearest{.format = Format::kNvfp4};
  QuantSpec stochastic = nearest, rotated = nearest, four = nearest, square = nearest, eden = nearest;
  stochastic.rounding = rotated.rounding = Rounding::kStochastic;
  rotated.hadamard = 16;
  rotated.hadamard_out = HadamardOut::kBf16;
  QuantSpec rotated_nearest = rotated;
  rotated_nearest.rounding = Rounding::kNearest;
  four.scale_rule = ScaleRule::kFourOverSix;
  square.block = BlockShape::k16x16;
  eden.rounding = Rounding::kMsEden;
  eden.hadamard = 128;
  eden.signs = Signs::kFresh;
  constexpr Orientation kRow = Orientation::kRow, kColumn = Orientation::kColumn;
  return {
      {"row nearest", {{nearest, kRow}}},
      {"row stochastic", {{stochastic, kRow}}},
      {"column stochastic rotated 16", {{rotated, kColumn}}},
      {"row stochastic + column stochastic rotated 16", {{stochastic, kRow}, {rotated, kColumn}}},
      {"the same together", {{stochastic, kRow}, {rotated, kColumn}}, 1, true},
      {"the same together, counted", {{stochastic, kRow}, {rotated, kColumn}}, 1, true, true},
      {"the same together, counted, 128 groups", {{stochastic, kRow}, {rotated, kColumn}}, 128, true, true},
      {"column nearest rotated 16", {{rotated_nearest, kColumn}}},
      {"row four_over_six", {{four, kRow}}},
      {"row 16x16", {{square, kRow}}},
      {"row 16x16 + column 16x16 together, counted", {{square, kRow}, {square, kColumn}}, 1, true, true},
      {"row ms_eden 128", {{eden, kRow}}},
      {"column ms_eden 128", {{eden, kColumn}}},
      {"row mxfp8 + column mxfp8", {{mxfp8, kRow}, {mxfp8, kColumn}}},
  };
}

}  // namespace
}  // namespace fp4t

int main(int argc, char** argv) {
  using namespace fp4t;
  if (cuda::device_count() == 0) return 77;
  std::vector<std::pair<int64_t, int64_t>> sizes;
  const bool once = argc > 1 && std::string(argv[1]) == "--once";
  for (int i = once ? 2 : 1; i + 1 < argc; i += 2)
    sizes.push_back({std::atoll(argv[i]), std::atoll(argv[i + 1])});
  if (sizes.empty()) sizes = {{8192, 2048}, {32768, 2048}};
  Bench bench(once);
  const double copy = copy_rate(bench);
  std::printf("copy, read + written: %.2f TB/s\n", copy / 1e6);
  for (const auto& [rows, cols] : sizes) {
    for (const Case& c : cases()) measure(bench, once, copy, c, rows, cols);
  }
  return 0;
}
