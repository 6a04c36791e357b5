// Backwards of the norm family against central differences of their definitions in FP64.
#include "tests/support/dense_cases.h"

namespace fp4t::test {
namespace {

constexpr double kTolerance = 1e-4;

TEST(NormBackward, matches_differences) {
  for (const Shape& shape : {Shape{1, 1}, Shape{1, 90}, Shape{33, 90}, Shape{70, 32}}) {
    SCOPED_TRACE(shape.text());
    Queue queue = Queue::cpu(2);
    NormCase c(DType::kF32, shape, false, 31);
    c.forward(queue);
    c.backward(queue, true);
    Values x = values_of(c.x), weight = values_of(c.weight);
    const Values dout = values_of(c.dout), past = values_of(c.dresidual);
    const auto loss = [&] { return inner(reference::rms_norm(x, weight, kEps), dout) + inner(x, past); };
    EXPECT_TRUE(gradient_matches(x, loss, c.dx.view(), kTolerance, 1));
    EXPECT_TRUE(gradient_matches(weight, loss, c.dweight.view(), kTolerance, 1));
  }
}

TEST(QkNormRopeBackward, matches_differences) {
  for (const auto& heads : {reference::Heads{4, 2, 32}, {3, 1, 18}, {1, 1, 64}}) {
    for (bool norm : {false, true}) {
      Queue queue = Queue::cpu(2);
      RopeCase c(DType::kF32, 5, heads, norm, 32);
      SCOPED_TRACE(c.text());
      c.forward(queue);
      c.backward(queue);
      Values x = values_of(c.qkv), q_weight = values_of(c.q_weight), k_weight = values_of(c.k_weight);
      const Values dout = values_of(c.dout);
      const auto loss = [&] { return inner(c.expected(x, q_weight, k_weight), dout); };
      EXPECT_TRUE(gradient_matches(x, loss, c.dqkv.view(), kTolerance, 3));
      if (!norm) continue;
      EXPECT_TRUE(gradient_matches(q_weight, loss, c.dq_weight.view(), kTolerance, 1));
      EXPECT_TRUE(gradient_matches(k_weight, loss, c.dk_weight.view(), kTolerance, 1));
    }
  }
}

}  // namespace
}  // namespace fp4t::test
