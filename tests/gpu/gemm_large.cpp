// Operands and outputs of more than 2^31 elements: their last rows against small products on the CPU.
#include <random>
#include <vector>

#include "kernels/base/numeric.h"
#include "tests/gpu/gemm_operands.h"

namespace fp4t::test {
namespace {

constexpr DType kBf16 = DType::kBf16, kF32 = DType::kF32;

// Device memory that ends with the test.
class Device {
 public:
  Device() : queue_(Queue::cuda(0)) {}
  ~Device() {
    for (void* p : held_) queue_.release(p);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  Queue& queue() { return queue_; }
  TensorView tensor(DType dtype, const Shape& shape) {
    TensorView v{nullptr, dtype, shape};
    v.data = queue_.allocate(v.bytes());
    held_.push_back(v.data);
    queue_.fill_bytes(v.data, 0, v.bytes());
    return v;
  }
  // The tensor's last bytes get those of `tail`.
  void put_tail(const TensorView& v, const void* tail, int64_t bytes) {
    queue_.copy_from_host(static_cast<char*>(v.data) + v.bytes() - bytes, tail, bytes);
  }
  TensorView i32(const std::vector<int32_t>& values) {
    const TensorView v = tensor(DType::kI32, {static_cast<int64_t>(values.size())});
    put_tail(v, values.data(), v.bytes());
    return v;
  }
  HostTensor tail(const TensorView& v, const Shape& shape) {
    HostTensor out(v.dtype, shape);
    const int64_t bytes = out.view().bytes();
    queue_.copy_to_host(out.view().data, static_cast<char*>(v.data) + v.bytes() - bytes, bytes);
    return out;
  }

 private:
  Queue queue_;
  std::vector<void*> held_;
};

HostTensor normal(const Shape& shape, uint64_t seed) {
  HostTensor t(kBf16, shape);
  fill_normal(t, seed);
  return t;
}

Operand plain_values(const TensorView& v, bool transposed = false) { return {v, transposed, {}, {}}; }

// Codes of the device's size whose last bytes are those of a small operand.
Operand coded_tail(Device& d, const CodedOperand& small, GroupAxis axis, int64_t groups, int64_t rows,
                   int64_t cols) {
  const QuantView& from = small.view();
  Operand o;
  o.codes = quant_layout(from.spec, axis, groups, rows, cols);
  for (TensorView* part : {&o.codes.codes, &o.codes.block_scales, &o.codes.tensor_scale}) {
    *part = d.tensor(part->dtype, part->shape);
  }
  d.put_tail(o.codes.codes, from.codes.data, code_bytes(from));
  d.put_tail(o.codes.block_scales, from.block_scales.data, block_scale_bytes(from));
  d.put_tail(o.codes.tensor_scale, from.tensor_scale.data, 4);
  return o;
}

TEST(GpuGemmLarge, last_rows_of_a_large_output) {
  for (const int64_t k : {64, 66}) {  // rows of whole chunks, and not
    const int64_t rows = 65600, n = 32784, few = 8;
    Device d;
    HostTensor a = normal({few, k}, 1), b = normal({n, k}, 2), expected(kF32, {few, n});
    const TensorView da = d.tensor(kBf16, {rows, k}), db = d.tensor(kBf16, {n, k});
    d.put_tail(da, a.view().data, a.view().bytes());
    d.put_tail(db, b.view().data, b.view().bytes());
    const TensorView out = d.tensor(kF32, {rows, n});
    ASSERT_GT(out.elements(), int64_t{1} << 31);
    run(d.queue(), Gemm{plain_values(da), plain_values(db), out, false});
    Queue cpu = Queue::cpu(4);
    run(cpu, Gemm{plain_values(a.view()), plain_values(b.view()), expected.view(), false});
    EXPECT_TRUE(matches_nmse(expected.view(), d.tail(out, {few, n}).view(), 1e-10)) << "depth " << k;
  }
}

constexpr int64_t kExperts = 130, kWide = 4096;

void check_experts(Device& d, const Operand& weights, const Operand& small, int64_t rows) {
  SCOPED_TRACE(rows);
  const int64_t few = 8;
  HostTensor a = normal({few, kWide}, 3), expected(kF32, {few, kWide});
  std::vector<int32_t> bounds(kExperts + 1, 0);
  bounds.back() = static_cast<int32_t>(rows);  // all go to the last expert
  const TensorView da = d.tensor(kBf16, {rows, kWide}), out = d.tensor(kF32, {rows, kWide});
  d.put_tail(da, a.view().data, a.view().bytes());
  run(d.queue(), GroupedGemm{plain_values(da), weights, d.i32(bounds), out});
  Queue cpu = Queue::cpu(4);
  HostTensor one(DType::kI32, {2});
  one.as<int32_t>()[0] = 0;
  one.as<int32_t>()[1] = few;
  run(cpu, GroupedGemm{plain_values(a.view()), small, one.view(), expected.view()});
  EXPECT_TRUE(matches_nmse(expected.view(), d.tail(out, {few, kWide}).view(), 1e-10));
}

TEST(GpuGemmLarge, the_last_of_many_experts) {
  Device d;
  HostTensor b = normal({1, kWide, kWide}, 4);
  const TensorView weights = d.tensor(kBf16, {kExperts, kWide, kWide});
  ASSERT_GT(weights.elements(), int64_t{1} << 31);
  d.put_tail(weights, b.view().data, b.view().bytes());
  for (const int64_t rows : {20, 8000}) {  // few rows an expert, and many
    check_experts(d, plain_values(weights), plain_values(b.view()), rows);
    check_experts(d, plain_values(weights, true), plain_values(b.view(), true), rows);
  }
}

TEST(GpuGemmLarge, the_last_of_many_experts_in_codes) {
  for (const QuantSpec& spec : {nvfp4(), nvfp4(BlockShape::k16x16)}) {
    Device d;
    const CodedOperand small(spec, GroupAxis::kRows, 1, kWide, kWide, 5);
    const Operand weights = coded_tail(d, small, GroupAxis::kRows, kExperts, kExperts * kWide, kWide);
    // 16x16 blocks have room to spare behind the last group.
    if (outer_padding(spec) > 1) {
      QuantView exact = weights.codes;
      ASSERT_GE(exact.padded_rows, kExperts * kWide);
    }
    Operand o = weights;
    if (outer_padding(spec) > 1) {
      o.codes.padded_rows = kExperts * kWide;
      const int64_t spare = (weights.codes.padded_rows - o.codes.padded_rows) * kWide;
      o.codes.codes = {static_cast<uint8_t*>(weights.codes.codes.data) + spare / 2,
                       DType::kU8,
                       {o.codes.padded_rows, kWide / 2}};
      o.codes.block_scales = {static_cast<uint8_t*>(weights.codes.block_scales.data) + spare / 256,
                              DType::kU8,
                              {o.codes.padded_rows / 16, kWide / 16}};
    }
    Operand one;
    one.codes = small.view();
    for (const int64_t rows : {20, 16000}) check_experts(d, o, one, rows);
  }
}

TEST(GpuGemmLarge, the_last_gradient_of_many_experts) {
  Device d;
  const int64_t tokens = 40;
  HostTensor a = normal({tokens, kWide}, 6), b = normal({tokens, kWide}, 7);
  const TensorView da = d.tensor(kBf16, {tokens, kWide}), db = d.tensor(kBf16, {tokens, kWide});
  d.put_tail(da, a.view().data, a.view().bytes());
  d.put_tail(db, b.view().data, b.view().bytes());
  std::vector<int32_t> bounds(kExperts + 1, 0);
  bounds.back() = tokens;
  const TensorView out = d.tensor(kF32, {kExperts, kWide, kWide});
  ASSERT_GT(out.elements(), int64_t{1} << 31);
  run(d.queue(), GroupedGemmK{plain_values(da, true), plain_values(db, true), d.i32(bounds), out, false});
  HostTensor expected(kF32, {kWide, kWide});
  Queue cpu = Queue::cpu(4);
  run(cpu, Gemm{plain_values(a.view(), true), plain_values(b.view(), true), expected.view(), false});
  EXPECT_TRUE(matches_nmse(expected.view(), d.tail(out, {kWide, kWide}).view(), 1e-10));
}

TEST(GpuGemmLarge, the_last_group_of_many_tokens_in_codes) {
  Device d;
  const int64_t rows = 2048, n = 256, first = 1100000, last = 64, groups = 2;
  const CodedOperand a(nvfp4(), GroupAxis::kCols, 1, rows, last, 8),
      b(nvfp4(), GroupAxis::kCols, 1, n, last, 9);
  const int64_t total = first / 32 * 32 + last;
  Operand da = coded_tail(d, a, GroupAxis::kCols, groups, rows, total);
  Operand db = coded_tail(d, b, GroupAxis::kCols, groups, n, total);
  ASSERT_GT(code_bytes(da.codes) * 2, int64_t{1} << 31);
  // The layout has room to spare behind the last group: its storage is made to end with the codes.
  const auto trim = [&](Operand& o, int64_t r) {
    const int64_t spare = (o.codes.padded_cols - total) * r;
    o.codes.padded_cols = total;
    o.codes.codes = {static_cast<uint8_t*>(o.codes.codes.data) + spare / 2, DType::kU8, {r, total / 2}};
    o.codes.block_scales = {
        static_cast<uint8_t*>(o.codes.block_scales.data) + spare / 16, DType::kU8, {r, total / 16}};
  };
  trim(da, rows);
  trim(db, n);
  const TensorView out = d.tensor(kF32, {groups, rows, n});
  const std::vector<int32_t> bounds = {0, static_cast<int32_t>(total - last), static_cast<int32_t>(total)};
  run(d.queue(), GroupedGemmK{da, db, d.i32(bounds), out, false});
  HostTensor expected(kF32, {1, rows, n}), one(DType::kI32, {2});
  one.as<int32_t>()[0] = 0;
  one.as<int32_t>()[1] = last;
  Queue cpu = Queue::cpu(4);
  run(cpu, GroupedGemmK{a.operand(), b.operand(), one.view(), expected.view(), false});
  EXPECT_TRUE(matches_nmse(expected.view(), d.tail(out, {1, rows, n}).view(), 1e-10));
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
