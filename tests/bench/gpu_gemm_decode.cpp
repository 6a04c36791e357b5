// Products at decoding's sizes, and the decoding of codes to BF16, on a GPU: time, and bytes that must be
// read or written over it. Weights are larger than three times the second-level cache; random codes and
// values. Run: bench_gpu_gemm_decode [part of a line's name]
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/context.h"
#include "kernels/cuda/gemm_operand.h"
#include "kernels/ops/run.h"

namespace fp4t {
namespace {

constexpr int64_t kCold = int64_t{200} << 20;  // bytes of inputs that no cache holds

class Bench {
 public:
  explicit Bench(const char* filter) : queue_(Queue::cuda(0)), filter_(filter) {
    std::mt19937_64 engine(1);
    noise_.resize(size_t{32} << 20);
    for (size_t i = 0; i < noise_.size(); i += 8) {
      const uint64_t x = engine();
      std::memcpy(&noise_[i], &x, 8);
    }
  }
  Queue& queue() { return queue_; }
  bool wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  // Device memory of random bytes; values of BF16 lie in [-2, -1] or [1, 2], codes anywhere, scales in
  // the middle of their range.
  enum class Fill { kValues, kCodes, kScales, kNone };
  TensorView tensor(DType dtype, const Shape& shape, Fill fill) {
    TensorView v{nullptr, dtype, shape};
    v.data = queue_.allocate(v.bytes());
    held_.push_back(v.data);
    if (fill == Fill::kNone) return v;
    std::vector<unsigned char> block(noise_);
    for (size_t i = 0; i < block.size(); ++i) {
      if (fill == Fill::kScales) block[i] = static_cast<unsigned char>(0x30 + block[i] % 16);
      if (fill == Fill::kValues && i % 2 == 1)
        block[i] = static_cast<unsigned char>((block[i] & 0x80) | 0x3F);
    }
    for (int64_t at = 0; at < v.bytes(); at += static_cast<int64_t>(block.size())) {
      queue_.copy_from_host(static_cast<char*>(v.data) + at, block.data(),
                            std::min(v.bytes() - at, static_cast<int64_t>(block.size())));
    }
    return v;
  }
  TensorView values(const Shape& shape) { return tensor(DType::kBf16, shape, Fill::kValues); }
  TensorView offsets(const std::vector<int32_t>& bounds) {
    const TensorView v = tensor(DType::kI32, {static_cast<int64_t>(bounds.size())}, Fill::kNone);
    queue_.copy_from_host(v.data, bounds.data(), v.bytes());
    return v;
  }
  Operand codes(Format format, GroupAxis axis, int64_t groups, int64_t rows, int64_t cols) {
    QuantSpec spec;
    spec.format = format;
    Operand o;
    o.codes = quant_layout(spec, axis, groups, rows, cols);
    o.codes.codes = tensor(DType::kU8, o.codes.codes.shape, Fill::kCodes);
    o.codes.block_scales = tensor(DType::kU8, o.codes.block_scales.shape, Fill::kScales);
    if (format == Format::kNvfp4) {
      o.codes.tensor_scale = tensor(DType::kF32, o.codes.tensor_scale.shape, Fill::kNone);
      const std::vector<float> ones(static_cast<size_t>(o.codes.tensor_scale.elements()), 0.01f);
      queue_.copy_from_host(o.codes.tensor_scale.data, ones.data(), o.codes.tensor_scale.bytes());
    }
    return o;
  }
  void release() {
    for (void* p : held_) queue_.release(p);
    held_.clear();
  }

  // Median of calls of body(i), which rotates its inputs by i.
  void time(const std::string& name, double bytes, double flop, const std::function<void(int)>& body) {
    constexpr int kRuns = 31;
    cudaStream_t stream = cuda::stream_of(queue_);
    std::vector<cudaEvent_t> event(kRuns + 1);
    for (cudaEvent_t& e : event) FP4T_CUDA(cudaEventCreate(&e));
    for (int i = 0; i < 5; ++i) body(i);
    for (int i = 0; i < kRuns; ++i) {
      FP4T_CUDA(cudaEventRecord(event[static_cast<size_t>(i)], stream));
      body(i);
    }
    FP4T_CUDA(cudaEventRecord(event[kRuns], stream));
    queue_.synchronize();
    std::vector<float> ms(kRuns);
    for (size_t i = 0; i < kRuns; ++i) FP4T_CUDA(cudaEventElapsedTime(&ms[i], event[i], event[i + 1]));
    for (cudaEvent_t e : event) cudaEventDestroy(e);
    std::nth_element(ms.begin(), ms.begin() + kRuns / 2, ms.end());
    const double t = ms[kRuns / 2] * 1e-3;
    std::printf("%-58s %9.1f us  %6.2f TB/s  %6.1f TFLOP/s\n", name.c_str(), t * 1e6, bytes / t * 1e-12,
                flop / t * 1e-12);
    std::fflush(stdout);
  }

 private:
  Queue queue_;
  std::string filter_;
  std::vector<unsigned char> noise_;
  std::vector<void*> held_;
};

std::vector<int32_t> routed(int64_t groups, int64_t rows) {
  std::mt19937_64 engine(7);
  std::vector<int32_t> bounds(static_cast<size_t>(groups) + 1, 0);
  for (int64_t i = 0; i < rows; ++i) ++bounds[1 + engine() % static_cast<uint64_t>(groups)];
  for (size_t g = 1; g < bounds.size(); ++g) bounds[g] += bounds[g - 1];
  return bounds;
}

void experts(Bench& b, Format format, int64_t rows, int64_t n, int64_t k) {
  const int64_t groups = 128;
  const std::string name = std::string("experts ") + name_of(format) + " " + std::to_string(rows) +
                           " rows, 128 x " + std::to_string(n) + " x " + std::to_string(k);
  if (!b.wants(name)) return;
  const TensorView a = b.values({rows, k}), out = b.tensor(DType::kBf16, {rows, n}, Bench::Fill::kNone);
  const std::vector<int32_t> bounds = routed(groups, rows);
  const TensorView offsets = b.offsets(bounds);
  int64_t active = 0;
  for (size_t g = 0; g < 128; ++g) active += bounds[g + 1] > bounds[g] ? 1 : 0;
  std::vector<Operand> w;
  for (int i = 0; i < 2; ++i) {
    Operand o;
    if (format == Format::kBf16) o.values = b.values({groups, n, k});
    if (format != Format::kBf16) o = b.codes(format, GroupAxis::kRows, groups, groups * n, k);
    if (format == Format::kNvfp4) o.codes.order = CodeOrder::kStream;
    w.push_back(o);
  }
  const double per_element = format == Format::kBf16 ? 2 : format == Format::kNvfp4 ? 0.5625 : 1.03125;
  b.time(name, static_cast<double>(active * n * k) * per_element, 2.0 * static_cast<double>(rows * n * k),
         [&](int i) {
           run(b.queue(), GroupedGemm{{a, false, {}, {}}, w[static_cast<size_t>(i % 2)], offsets, out});
         });
  b.release();
}

void dense(Bench& b, Format format, int64_t rows, int64_t n, int64_t k) {
  const std::string name = std::string("dense ") + name_of(format) + " " + std::to_string(rows) + " x " +
                           std::to_string(n) + " x " + std::to_string(k);
  if (!b.wants(name)) return;
  const TensorView a = b.values({rows, k}), out = b.tensor(DType::kBf16, {rows, n}, Bench::Fill::kNone);
  const double bytes = static_cast<double>(n * k) * (format == Format::kBf16    ? 2
                                                     : format == Format::kNvfp4 ? 0.5625
                                                                                : 1.03125);
  const int copies = static_cast<int>(static_cast<double>(kCold) / bytes) + 2;
  std::vector<Operand> w;
  for (int i = 0; i < copies; ++i) {
    Operand o;
    if (format == Format::kBf16) o.values = b.values({n, k});
    if (format != Format::kBf16) o = b.codes(format, GroupAxis::kRows, 1, n, k);
    if (format == Format::kNvfp4) o.codes.order = CodeOrder::kStream;
    w.push_back(o);
  }
  b.time(name, bytes, 2.0 * static_cast<double>(rows * n * k), [&](int i) {
    run(b.queue(), Gemm{{a, false, {}, {}}, w[static_cast<size_t>(i % copies)], out, false});
  });
  b.release();
}

// Codes to BF16, as products of many rows need them.
void to_bf16(Bench& b, Format format, GroupAxis axis, int64_t groups, int64_t rows, int64_t cols) {
  const bool by_rows = axis == GroupAxis::kRows;
  const std::string name = std::string(by_rows ? "rows of " : "columns of ") + name_of(format) +
                           " to bf16, " + std::to_string(rows) + " x " + std::to_string(cols);
  if (!b.wants(name)) return;
  const QuantView codes = b.codes(format, axis, groups, rows, cols).codes;
  std::vector<int32_t> bounds;
  for (int64_t g = 0; g <= groups; ++g) bounds.push_back(static_cast<int32_t>(g * cols / groups));
  const TensorView padded = b.offsets(bounds);
  const TensorView out = b.tensor(DType::kBf16, {codes.padded_rows, codes.padded_cols}, Bench::Fill::kNone);
  const double bytes = static_cast<double>(rows * cols) * (format == Format::kNvfp4 ? 2.5625 : 3.03125);
  b.time(name, bytes, 0, [&](int) {
    if (by_rows) {
      cuda::decode_rows(b.queue(), codes, {}, rows, out.as<Bf16>());
    } else {
      cuda::decode_columns(b.queue(), codes, padded.as<int32_t>(), out.as<Bf16>());
    }
  });
  b.release();
}

}  // namespace
}  // namespace fp4t

int main(int argc, char** argv) {
  using namespace fp4t;
  Bench b(argc > 1 ? argv[1] : "");
  for (const Format format : {Format::kNvfp4, Format::kMxfp8}) {
    to_bf16(b, format, GroupAxis::kRows, 1, 128 * 1536, 2048);
    to_bf16(b, format, GroupAxis::kRows, 1, 131072, 768);
    to_bf16(b, format, GroupAxis::kCols, 128, 2048, 131072);
    to_bf16(b, format, GroupAxis::kCols, 1, 2048, 131072);
  }
  for (const Format format : {Format::kBf16, Format::kNvfp4}) {
    for (const int64_t batch : {1, 16, 64, 256, 1024}) {
      experts(b, format, batch * 8, 1536, 2048);
      experts(b, format, batch * 8, 2048, 768);
    }
    for (const int64_t rows : {1, 16, 64}) {
      dense(b, format, rows, 5120, 2048);
      dense(b, format, rows, 2048, 4096);
      dense(b, format, rows, 8192, 8192);
    }
    dense(b, format, 64, 50304, 2048);
  }
  return 0;
}
