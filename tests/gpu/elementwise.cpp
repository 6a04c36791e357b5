// Elementwise ops on the GPU against the CPU.
#include "kernels/ops/elementwise.h"

#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr DType kTypes[] = {DType::kBf16, DType::kF32};
constexpr int64_t kSizes[] = {0, 1, 7, 8, 2049, 1000003};

TEST(GpuElementwise, casts_are_bitwise) {
  for (DType from : kTypes) {
    for (DType to : kTypes) {
      for (int64_t n : kSizes) {
        Mirror m;
        const TensorView x = m.normal(from, {n}), out = m.fresh(to, {n});
        m.check(Cast{.x = x, .out = out});
      }
    }
  }
}

TEST(GpuElementwise, sums_are_bitwise_also_in_place) {
  for (DType a_type : kTypes) {
    for (DType b_type : kTypes) {
      for (int64_t n : kSizes) {
        Mirror m;
        const TensorView a = m.normal(a_type, {n}), b = m.normal(b_type, {n});
        m.check(Add{.a = a, .b = b, .out = m.fresh(DType::kBf16, {n})});
        m.check(Add{.a = a, .b = b, .out = a});
      }
    }
  }
}

TEST(GpuElementwise, linear_combinations_are_bitwise) {
  for (int64_t n : kSizes) {
    Mirror m;
    const TensorView x = m.normal(DType::kF32, {n}), y = m.normal(DType::kF32, {n});
    m.check(LinearCombination{.a = 0.3f, .x = x, .b = -1.7f, .y = y, .out = m.fresh(DType::kF32, {n})});
    m.check(LinearCombination{.a = 0.3f, .x = x, .b = 0.0f, .y = {}, .out = x});
  }
}

TEST(GpuElementwise, swiglu_and_its_gradient_hold_their_ulps) {
  for (DType type : kTypes) {
    for (float clamp : {0.0f, 1.5f}) {
      for (const Shape& shape : {Shape{0, 8}, Shape{1, 1}, Shape{33, 90}, Shape{257, 768}}) {
        Mirror m;
        const TensorView gate_up = m.normal(type, {shape[0], 2 * shape[1]}, 3.0f);
        m.check(SwigluForward{.gate_up = gate_up, .clamp = clamp, .out = m.fresh(type, shape)});
        const TensorView dout = m.normal(type, shape);
        m.check(SwigluBackward{.gate_up = gate_up,
                               .clamp = clamp,
                               .dout = dout,
                               .dgate_up = m.fresh(type, {shape[0], 2 * shape[1]})});
        m.check(SwigluBackward{.gate_up = gate_up, .clamp = clamp, .dout = dout, .dgate_up = gate_up});
      }
    }
  }
}

// Dense over the arguments, in FP32: the device's functions are the host's, bit for bit.
TEST(GpuElementwise, silu_and_its_gradient_are_bitwise_where_nothing_else_rounds) {
  constexpr int64_t kCount = 1 << 20;
  for (float scale : {1e-30f, 1e-6f, 1e-3f, 0.1f, 1.0f, 5.0f, 30.0f, 110.0f}) {
    Mirror m;
    const TensorView gate_up = m.fresh(DType::kF32, {kCount, 2}), dout = m.fresh(DType::kF32, {kCount, 1});
    for (int64_t i = 0; i < kCount; ++i) {
      gate_up.as<float>()[2 * i] = scale * static_cast<float>(2 * i - kCount) / static_cast<float>(kCount);
      gate_up.as<float>()[2 * i + 1] = 1.0f;
      dout.as<float>()[i] = 1.0f;
    }
    const TensorView out = m.fresh(DType::kF32, {kCount, 1}), dgate_up = m.fresh(DType::kF32, {kCount, 2});
    m.compare_by(out, Bitwise());
    m.compare_by(dgate_up, Bitwise());
    m.check(SwigluForward{.gate_up = gate_up, .clamp = 0.0f, .out = out});
    m.check(SwigluBackward{.gate_up = gate_up, .clamp = 0.0f, .dout = dout, .dgate_up = dgate_up});
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
