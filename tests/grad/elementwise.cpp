// SwigluBackward and EmbedBackward against central differences of their definitions in FP64.
#include "kernels/ops/run.h"
#include "tests/support/dense_reference.h"

namespace fp4t::test {
namespace {

TEST(SwigluBackward, matches_differences) {
  for (const Shape& shape : {Shape{1, 1}, Shape{31, 33}, Shape{3, 300}}) {
    for (float clamp : {0.0f, 0.7f}) {
      SCOPED_TRACE(shape.text() + " clamp " + std::to_string(clamp));
      Queue queue = Queue::cpu(2);
      HostTensor gate_up = normal_tensor(DType::kF32, {shape[0], 2 * shape[1]}, 95, 1.5f);
      HostTensor dout = normal_tensor(DType::kF32, shape, 96), gradient(DType::kF32, gate_up.view().shape);
      run(queue,
          SwigluBackward{
              .gate_up = gate_up.view(), .clamp = clamp, .dout = dout.view(), .dgate_up = gradient.view()});
      Values x = values_of(gate_up);
      const Values r = values_of(dout);
      const auto loss = [&] { return inner(reference::swiglu(x, shape[1], clamp), r); };
      EXPECT_TRUE(gradient_matches(x, loss, gradient.view(), 1e-4, 1));
    }
  }
}

TEST(EmbedBackward, matches_differences) {
  Queue queue = Queue::cpu(2);
  const std::vector<int32_t> ids = {3, 0, 3, 6, 3, 0, 1};
  HostTensor tokens = i32_tensor(ids), table = normal_tensor(DType::kF32, {8, 90}, 97);
  HostTensor dout = normal_tensor(DType::kF32, {7, 90}, 98), gradient = zeros(DType::kF32, {8, 90});
  run(queue, EmbedBackward{.dout = dout.view(), .tokens = tokens.view(), .dtable = gradient.view()});
  Values x = values_of(table);
  const Values r = values_of(dout);
  const auto loss = [&] {
    Values rows;
    for (const int32_t id : ids) rows.insert(rows.end(), x.begin() + id * 90, x.begin() + (id + 1) * 90);
    return inner(rows, r);
  };
  EXPECT_TRUE(gradient_matches(x, loss, gradient.view(), 1e-4, 1));
}

}  // namespace
}  // namespace fp4t::test
