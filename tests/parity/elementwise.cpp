// SwigluForward, SwigluBackward, Add, Cast, LinearCombination. The gradient of SwiGLU is checked against
// differences in tests/grad/elementwise.cpp.
#include "kernels/ops/elementwise.h"

#include "kernels/ops/run.h"
#include "tests/support/dense_reference.h"

namespace fp4t::test {
namespace {

const Shape kShapes[] = {{0, 16}, {1, 1}, {31, 90}, {33, 256}, {70, 257}};

HostTensor swiglu(Queue& queue, HostTensor& gate_up, float clamp) {
  const Shape& shape = gate_up.view().shape;
  HostTensor out(gate_up.view().dtype, {shape[0], shape[1] / 2});
  run(queue, SwigluForward{.gate_up = gate_up.view(), .clamp = clamp, .out = out.view()});
  return out;
}

HostTensor swiglu_gradient(Queue& queue, HostTensor& gate_up, float clamp, HostTensor& dout) {
  HostTensor out(gate_up.view().dtype, gate_up.view().shape);
  run(queue,
      SwigluBackward{.gate_up = gate_up.view(), .clamp = clamp, .dout = dout.view(), .dgate_up = out.view()});
  return out;
}

// Ulp(2) is what another backend may differ from this body; against the definition, two roundings more.
TEST(Swiglu, forward_is_within_four_ulp_of_the_definition) {
  for (const Shape& shape : kShapes) {
    for (float clamp : {0.0f, 1.5f}) {
      SCOPED_TRACE(shape.text() + " clamp " + std::to_string(clamp));
      Queue queue = Queue::cpu(2);
      HostTensor gate_up = normal_tensor(DType::kF32, {shape[0], 2 * shape[1]}, 81, 4.0f);
      HostTensor out = swiglu(queue, gate_up, clamp), expected(DType::kF32, shape);
      const Values exact = reference::swiglu(values_of(gate_up), shape[1], clamp);
      std::transform(exact.begin(), exact.end(), expected.as<float>(),
                     [](double x) { return static_cast<float>(x); });
      EXPECT_TRUE(matches_ulp(expected.view(), out.view(), 4));
    }
  }
}

TEST(Swiglu, bf16_is_fp32_on_the_same_values_rounded_once) {
  for (float clamp : {0.0f, 1.5f}) {
    Queue queue = Queue::cpu(2);
    HostTensor narrow = normal_tensor(DType::kBf16, {33, 2 * 90}, 82, 3.0f),
               wide = in_dtype(narrow, DType::kF32);
    HostTensor dnarrow = normal_tensor(DType::kBf16, {33, 90}, 83), dwide = in_dtype(dnarrow, DType::kF32);
    HostTensor out = swiglu(queue, wide, clamp), gradient = swiglu_gradient(queue, wide, clamp, dwide);
    EXPECT_TRUE(matches_bitwise(in_dtype(out, DType::kBf16).view(), swiglu(queue, narrow, clamp).view()));
    EXPECT_TRUE(matches_bitwise(in_dtype(gradient, DType::kBf16).view(),
                                swiglu_gradient(queue, narrow, clamp, dnarrow).view()));
  }
}

TEST(Swiglu, large_inputs_keep_finite_values_and_gradients) {
  Queue queue = Queue::cpu(1);
  HostTensor gate_up(DType::kF32, {1, 8}), dout(DType::kF32, {1, 4});
  const float gate[] = {-1e30f, -200.0f, 200.0f, 1e30f};
  for (int i = 0; i < 4; ++i) {
    gate_up.as<float>()[i] = gate[i];
    gate_up.as<float>()[4 + i] = 2.0f;
    dout.as<float>()[i] = 3.0f;
  }
  HostTensor out = swiglu(queue, gate_up, 0.0f), gradient = swiglu_gradient(queue, gate_up, 0.0f, dout);
  EXPECT_TRUE(near_values({0, 0, 400, 2e30}, out.view(), 1e-6));
  EXPECT_TRUE(near_values({0, 0, 6, 6, 0, 0, 600, 3e30}, gradient.view(), 1e-6));
  for (int i = 0; i < 2; ++i) EXPECT_NEAR(out.as<float>()[i], 0.0f, 1e-30f);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(gradient.as<float>()[i], i < 2 ? 0.0f : 6.0f, 1e-5f);
}

TEST(Swiglu, gradient_may_overwrite_its_input) {
  for (DType dtype : {DType::kF32, DType::kBf16}) {
    Queue queue = Queue::cpu(2);
    HostTensor gate_up = normal_tensor(dtype, {33, 2 * 300}, 84), dout = normal_tensor(dtype, {33, 300}, 85);
    HostTensor expected = swiglu_gradient(queue, gate_up, 2.0f, dout);
    run(queue,
        SwigluBackward{
            .gate_up = gate_up.view(), .clamp = 2.0f, .dout = dout.view(), .dgate_up = gate_up.view()});
    EXPECT_TRUE(expected.same_bytes(gate_up));
  }
}

TEST(Swiglu, threads_change_no_bit_and_rows_no_other_row) {
  expect_same_with_any_threads([](Queue& queue) {
    HostTensor gate_up = normal_tensor(DType::kBf16, {333, 2 * 90}, 86);
    HostTensor dout = normal_tensor(DType::kBf16, {333, 90}, 87);
    return std::vector<HostTensor>{swiglu(queue, gate_up, 0.0f), swiglu_gradient(queue, gate_up, 0.0f, dout)};
  });
  Queue queue = Queue::cpu(2);
  HostTensor all = normal_tensor(DType::kBf16, {333, 2 * 90}, 86), one(DType::kBf16, {1, 2 * 90});
  HostTensor out = swiglu(queue, all, 0.0f);
  for (int64_t t : {0, 91, 332}) {
    std::memcpy(one.view().data, all.view().rows(t, 1).data, static_cast<size_t>(one.view().bytes()));
    EXPECT_TRUE(matches_bitwise(out.view().rows(t, 1), swiglu(queue, one, 0.0f).view()));
  }
}

TEST(Add, sums_in_fp32_and_rounds_once) {
  for (DType a_type : {DType::kF32, DType::kBf16}) {
    for (DType b_type : {DType::kF32, DType::kBf16}) {
      for (DType out_type : {DType::kF32, DType::kBf16}) {
        for (const Shape& shape : {Shape{0}, Shape{1}, Shape{31, 33}, Shape{70, 257, 2}}) {
          Queue queue = Queue::cpu(2);
          HostTensor a = normal_tensor(a_type, shape, 88), b = normal_tensor(b_type, shape, 89);
          HostTensor sum(DType::kF32, shape), out(out_type, shape);
          for (int64_t i = 0; i < sum.elements(); ++i) {
            sum.as<float>()[i] =
                static_cast<float>(element(a.view(), i)) + static_cast<float>(element(b.view(), i));
          }
          run(queue, Add{.a = a.view(), .b = b.view(), .out = out.view()});
          EXPECT_TRUE(matches_bitwise(in_dtype(sum, out_type).view(), out.view()));
          if (a_type == out_type) {
            run(queue, Add{.a = a.view(), .b = b.view(), .out = a.view()});
            EXPECT_TRUE(out.same_bytes(a));
          }
        }
      }
    }
  }
}

TEST(Cast, rounds_to_nearest_even_and_back_exactly) {
  for (const Shape& shape : {Shape{0}, Shape{1}, Shape{33, 90}, Shape{70, 257}}) {
    Queue queue = Queue::cpu(2);
    HostTensor wide = normal_tensor(DType::kF32, shape, 90), narrow(DType::kBf16, shape),
               back(DType::kF32, shape);
    run(queue, Cast{.x = wide.view(), .out = narrow.view()});
    EXPECT_TRUE(matches_bitwise(in_dtype(wide, DType::kBf16).view(), narrow.view()));
    run(queue, Cast{.x = narrow.view(), .out = back.view()});
    EXPECT_TRUE(matches_bitwise(in_dtype(narrow, DType::kF32).view(), back.view()));
  }
}

TEST(LinearCombination, rounds_each_operation) {
  for (const Shape& shape : {Shape{0}, Shape{1}, Shape{31, 33}, Shape{70, 257}}) {
    for (bool both : {false, true}) {
      Queue queue = Queue::cpu(2);
      const float a = 0.3f, b = -1.7f;
      HostTensor x = normal_tensor(DType::kF32, shape, 91), y = normal_tensor(DType::kF32, shape, 92);
      HostTensor expected(DType::kF32, shape), out(DType::kF32, shape);
      for (int64_t i = 0; i < x.elements(); ++i) {
        const float first = a * x.as<float>()[i], second = b * y.as<float>()[i];
        expected.as<float>()[i] = both ? first + second : first;
      }
      LinearCombination op{
          .a = a, .x = x.view(), .b = b, .y = both ? y.view() : TensorView{}, .out = out.view()};
      run(queue, op);
      EXPECT_TRUE(matches_bitwise(expected.view(), out.view()));
      op.out = x.view();
      run(queue, op);
      EXPECT_TRUE(expected.same_bytes(x));
    }
  }
}

TEST(Elementwise, shifted_overlaps_and_wrong_shapes_are_refused) {
  Queue queue = Queue::cpu(1);
  HostTensor x = normal_tensor(DType::kF32, {8}, 93);
  TensorView low = x.view().rows(0, 4), middle = x.view().rows(2, 4), high = x.view().rows(4, 4);
  EXPECT_THROW(run(queue, Add{.a = low, .b = high, .out = middle}), InternalError);
  EXPECT_THROW(run(queue, Add{.a = low, .b = x.view(), .out = high}), InternalError);
  EXPECT_THROW(run(queue, Cast{.x = low, .out = middle}), InternalError);
  EXPECT_THROW(run(queue, LinearCombination{.a = 1, .x = low, .b = 1, .y = {}, .out = middle}),
               InternalError);
  EXPECT_THROW(run(queue, SwigluForward{.gate_up = x.view(), .clamp = 0, .out = low}), InternalError);
}

}  // namespace
}  // namespace fp4t::test
