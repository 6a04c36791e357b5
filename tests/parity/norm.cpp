// NormForward, NormBackward, QkNormRopeForward, QkNormRopeBackward: values, claims and refusals.
// Gradients are checked against differences in tests/grad/norm.cpp.
#include "kernels/ops/norm.h"

#include "kernels/ops/run.h"
#include "tests/support/dense_cases.h"
#include "tests/support/dense_reference.h"

namespace fp4t::test {
namespace {

const Shape kShapes[] = {{0, 8}, {1, 1}, {1, 90}, {31, 90}, {33, 128}, {200, 32}, {3, 1000}};

TEST(Norm, forward_matches_the_definition) {
  for (const Shape& shape : kShapes) {
    for (bool residual : {false, true}) {
      SCOPED_TRACE(shape.text() + (residual ? " with residual" : ""));
      NormCase c(DType::kF32, shape, residual, 11);
      Queue queue = Queue::cpu(2);
      c.forward(queue);
      Values x = values_of(c.x);
      if (residual) {
        const Values r = values_of(c.residual);
        for (size_t i = 0; i < x.size(); ++i) x[i] += r[i];
        EXPECT_TRUE(near_values(x, c.sum.view(), 1e-7));
      }
      EXPECT_TRUE(near_values(reference::rms_norm(x, values_of(c.weight), kEps), c.out.view(), 1e-6));
      Values rstd;
      for (int64_t t = 0; t < shape[0]; ++t) {
        rstd.push_back(reference::reciprocal_rms(&x[static_cast<size_t>(t * shape[1])], shape[1], kEps));
      }
      EXPECT_TRUE(near_values(rstd, c.rstd.view(), 1e-6));
    }
  }
}

TEST(Norm, bf16_is_fp32_on_the_same_values_rounded_once) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(shape.text());
    Queue queue = Queue::cpu(2);
    NormCase narrow(DType::kBf16, shape, false, 12);
    NormCase wide = narrow.in_f32();
    for (NormCase* c : {&narrow, &wide}) c->forward(queue), c->backward(queue, true);
    EXPECT_TRUE(matches_bitwise(in_dtype(wide.out, DType::kBf16).view(), narrow.out.view()));
    EXPECT_TRUE(matches_bitwise(in_dtype(wide.dx, DType::kBf16).view(), narrow.dx.view()));
    EXPECT_TRUE(matches_bitwise(wide.rstd.view(), narrow.rstd.view()));
    EXPECT_TRUE(matches_bitwise(wide.dweight.view(), narrow.dweight.view()));
  }
}

TEST(Norm, bf16_normalises_the_rounded_sum) {
  Queue queue = Queue::cpu(1);
  NormCase c(DType::kBf16, {33, 90}, true, 13);
  c.forward(queue);
  NormCase of_sum(DType::kBf16, {33, 90}, false, 13);
  of_sum.x = c.sum;
  of_sum.forward(queue);
  EXPECT_TRUE(matches_bitwise(of_sum.out.view(), c.out.view()));
  EXPECT_TRUE(matches_bitwise(of_sum.rstd.view(), c.rstd.view()));
}

TEST(Norm, a_row_does_not_depend_on_its_batch) {
  Queue queue = Queue::cpu(3);
  NormCase all(DType::kBf16, {333, 90}, true, 14);
  all.forward(queue);
  all.backward(queue, true);
  for (int64_t t : {0, 1, 181, 182, 332}) {
    NormCase one(DType::kBf16, {1, 90}, true, 14);
    one.take_row(all, t);
    one.forward(queue);
    one.backward(queue, true);
    EXPECT_TRUE(matches_bitwise(all.out.view().rows(t, 1), one.out.view()));
    EXPECT_TRUE(matches_bitwise(all.dx.view().rows(t, 1), one.dx.view()));
  }
}

TEST(Norm, threads_change_no_bit) {
  for (DType dtype : {DType::kF32, DType::kBf16}) {
    expect_same_with_any_threads([&](Queue& queue) {
      NormCase c(dtype, {333, 90}, true, 15);
      c.forward(queue);
      c.backward(queue, true);
      return std::vector<HostTensor>{c.sum, c.out, c.rstd, c.dx, c.dweight};
    });
  }
}

TEST(Norm, dx_may_alias_dresidual) {
  Queue queue = Queue::cpu(2);
  NormCase c(DType::kBf16, {70, 90}, false, 16);
  c.forward(queue);
  c.backward(queue, true);
  HostTensor shared = c.dresidual, dweight = zeros(DType::kF32, {90});
  run(queue, NormBackward{.x = c.x.view(),
                          .weight = c.weight.view(),
                          .rstd = c.rstd.view(),
                          .dout = c.dout.view(),
                          .dresidual = shared.view(),
                          .dx = shared.view(),
                          .dweight = dweight.view()});
  EXPECT_TRUE(matches_bitwise(c.dx.view(), shared.view()));
}

TEST(Norm, dweight_is_added_to_in_chunk_order) {
  Queue queue = Queue::cpu(2);
  NormCase once(DType::kF32, {150, 90}, false, 17), twice(DType::kF32, {150, 90}, false, 17);
  once.forward(queue);
  once.backward(queue, false);
  twice.forward(queue);
  // Chunks of 64 tokens, each on its own and in order, accumulate the same bits.
  for (int64_t begin : {0, 64, 128}) {
    const int64_t count = std::min<int64_t>(64, 150 - begin);
    run(queue, NormBackward{.x = twice.x.view().rows(begin, count),
                            .weight = twice.weight.view(),
                            .rstd = twice.rstd.view().rows(begin, count),
                            .dout = twice.dout.view().rows(begin, count),
                            .dresidual = {},
                            .dx = twice.dx.view().rows(begin, count),
                            .dweight = twice.dweight.view()});
  }
  EXPECT_TRUE(matches_bitwise(once.dweight.view(), twice.dweight.view()));
}

TEST(Norm, a_nan_stays_in_its_row) {
  Queue queue = Queue::cpu(1);
  NormCase c(DType::kF32, {3, 40}, false, 18);
  c.x.as<float>()[45] = NAN;
  c.forward(queue);
  for (int64_t i = 0; i < 120; ++i) EXPECT_EQ(std::isnan(c.out.as<float>()[i]), i / 40 == 1) << i;
}

TEST(Norm, wrong_arguments_are_refused) {
  Queue queue = Queue::cpu(1);
  NormCase c(DType::kF32, {4, 8}, false, 19);
  NormForward op = c.forward_op();
  op.out = op.x;
  EXPECT_THROW(run(queue, op), InternalError);
  op = c.forward_op();
  op.weight.shape = {7};
  EXPECT_THROW(run(queue, op), InternalError);
  op = c.forward_op();
  op.residual = c.residual.view();
  EXPECT_THROW(run(queue, op), InternalError);
}

const reference::Heads kHeads[] = {{1, 1, 2}, {4, 2, 32}, {6, 2, 64}, {3, 3, 18}, {2, 1, 128}};

TEST(QkNormRope, forward_matches_the_definition) {
  for (const auto& heads : kHeads) {
    for (int64_t tokens : {0, 1, 31, 130}) {
      for (bool norm : {false, true}) {
        RopeCase c(DType::kF32, tokens, heads, norm, 21);
        SCOPED_TRACE(c.text());
        Queue queue = Queue::cpu(2);
        c.forward(queue);
        EXPECT_TRUE(near_values(c.expected(values_of(c.qkv)), c.out.view(), 1e-6));
      }
    }
  }
}

TEST(QkNormRope, bf16_is_fp32_on_the_same_values_rounded_once) {
  for (bool norm : {false, true}) {
    Queue queue = Queue::cpu(2);
    RopeCase narrow(DType::kBf16, 67, {4, 2, 32}, norm, 22);
    RopeCase wide = narrow.in_f32();
    for (RopeCase* c : {&narrow, &wide}) c->forward(queue), c->backward(queue);
    EXPECT_TRUE(matches_bitwise(in_dtype(wide.out, DType::kBf16).view(), narrow.out.view()));
    EXPECT_TRUE(matches_bitwise(in_dtype(wide.dqkv, DType::kBf16).view(), narrow.dqkv.view()));
    EXPECT_TRUE(matches_bitwise(wide.dq_weight.view(), narrow.dq_weight.view()));
    EXPECT_TRUE(matches_bitwise(wide.dk_weight.view(), narrow.dk_weight.view()));
  }
}

TEST(QkNormRope, values_pass_unchanged) {
  Queue queue = Queue::cpu(1);
  RopeCase c(DType::kBf16, 9, {4, 2, 32}, true, 23);
  c.forward(queue);
  c.backward(queue);
  for (int64_t t = 0; t < 9; ++t) {
    for (int64_t i = 6 * 32; i < 8 * 32; ++i) {
      EXPECT_EQ(c.qkv.as<Bf16>()[t * 256 + i].bits, c.out.as<Bf16>()[t * 256 + i].bits);
      EXPECT_EQ(c.dout.as<Bf16>()[t * 256 + i].bits, c.dqkv.as<Bf16>()[t * 256 + i].bits);
    }
  }
}

TEST(QkNormRope, threads_change_no_bit) {
  expect_same_with_any_threads([](Queue& queue) {
    RopeCase c(DType::kBf16, 333, {4, 2, 32}, true, 24);
    c.forward(queue);
    c.backward(queue);
    return std::vector<HostTensor>{c.out, c.rstd, c.dqkv, c.dq_weight, c.dk_weight};
  });
}

TEST(QkNormRope, dqkv_may_alias_dout) {
  for (bool norm : {false, true}) {
    Queue queue = Queue::cpu(2);
    RopeCase c(DType::kBf16, 70, {4, 2, 32}, norm, 25);
    c.forward(queue);
    QkNormRopeBackward op = c.backward_op();
    run(queue, op);
    HostTensor shared = c.dout;
    op.dout = op.dqkv = shared.view();
    run(queue, op);
    EXPECT_TRUE(matches_bitwise(c.dqkv.view(), shared.view()));
  }
}

TEST(QkNormRope, positions_outside_the_table_are_refused) {
  for (int32_t position : {-1, kMaxPosition}) {
    Queue queue = Queue::cpu(1);
    RopeCase c(DType::kF32, 5, {4, 2, 32}, false, 26);
    c.positions.as<int32_t>()[3] = position;
    EXPECT_THROW(c.forward(queue), InternalError);
    EXPECT_THROW(c.backward(queue), InternalError);
  }
}

}  // namespace
}  // namespace fp4t::test
