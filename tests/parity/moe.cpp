// The CPU bodies of the mixture of experts against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "tests/support/compare.h"
#include "tests/support/routing.h"

namespace fp4t::test {
namespace {

float value(HostTensor& t, int64_t i) { return static_cast<float>(element(t.view(), i)); }

void set(HostTensor& t, int64_t i, float x) {
  if (t.view().dtype == DType::kF32) {
    t.as<float>()[i] = x;
  } else {
    t.as<Bf16>()[i] = to_bf16(x);
  }
}

struct Sizes {
  int64_t tokens, width, experts;
};
constexpr Sizes kProductSizes[] = {{1, 1, 1},     {3, 5, 2},    {65, 31, 7},
                                   {130, 128, 8}, {67, 100, 9}, {4, 257, 33}};

TEST(RouterLogits, is_the_chain_of_fma_over_k) {
  Queue one = Queue::cpu(1), three = Queue::cpu(3);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const auto& [tokens, width, experts] : kProductSizes) {
      SCOPED_TRACE(detail::concat(dtype_name(dtype), " ", tokens, " ", width, " ", experts));
      HostTensor x(dtype, {tokens, width}), weight(DType::kF32, {experts, width});
      HostTensor want(DType::kF32, {tokens, experts}), got = want, threaded = want;
      fill_normal(x, 1);
      fill_normal(weight, 2);
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t e = 0; e < experts; ++e) {
          float acc = 0.0f;
          for (int64_t k = 0; k < width; ++k) {
            acc = std::fma(value(x, t * width + k), value(weight, e * width + k), acc);
          }
          want.as<float>()[t * experts + e] = acc;
        }
      }
      run(one, RouterLogits{x.view(), weight.view(), got.view()});
      run(three, RouterLogits{x.view(), weight.view(), threaded.view()});
      EXPECT_TRUE(matches_bitwise(want.view(), got.view()));
      EXPECT_TRUE(got.same_bytes(threaded));
    }
  }
}

TEST(RouterLogitsBackward, matches_double) {
  Queue one = Queue::cpu(1), three = Queue::cpu(3);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const auto& [tokens, width, experts] : kProductSizes) {
      SCOPED_TRACE(detail::concat(dtype_name(dtype), " ", tokens, " ", width, " ", experts));
      HostTensor x(dtype, {tokens, width}), weight(DType::kF32, {experts, width});
      HostTensor dlogits(DType::kF32, {tokens, experts}), dx(DType::kF32, {tokens, width}), dx3 = dx,
                                                                                            want_dx = dx;
      HostTensor dweight(DType::kF32, {experts, width}), dweight3 = dweight, want_dweight = dweight;
      fill_normal(x, 3);
      fill_normal(weight, 4);
      fill_normal(dlogits, 5);
      for (HostTensor* h : {&dweight, &dweight3}) fill_normal(*h, 6);
      for (int64_t k = 0; k < width; ++k) {
        for (int64_t e = 0; e < experts; ++e) {
          double sum = double{dweight.as<float>()[e * width + k]};
          for (int64_t t = 0; t < tokens; ++t) {
            sum += double{dlogits.as<float>()[t * experts + e]} * double{value(x, t * width + k)};
          }
          want_dweight.as<float>()[e * width + k] = static_cast<float>(sum);
        }
        for (int64_t t = 0; t < tokens; ++t) {
          double sum = 0;
          for (int64_t e = 0; e < experts; ++e) {
            sum += double{dlogits.as<float>()[t * experts + e]} * double{weight.as<float>()[e * width + k]};
          }
          want_dx.as<float>()[t * width + k] = static_cast<float>(sum);
        }
      }
      run(one, RouterLogitsBackward{x.view(), weight.view(), dlogits.view(), dx.view(), dweight.view()});
      run(three, RouterLogitsBackward{x.view(), weight.view(), dlogits.view(), dx3.view(), dweight3.view()});
      EXPECT_TRUE(matches(want_dx.view(), dx.view(), Nmse(1e-12)));
      EXPECT_TRUE(matches(want_dweight.view(), dweight.view(), Nmse(1e-12)));
      EXPECT_TRUE(dx.same_bytes(dx3) && dweight.same_bytes(dweight3));
    }
  }
}

// Sums along the tree as the definition reads: every node of [low, high), absent experts as "nothing".
bool tree(const std::vector<const float*>& leaf, int64_t low, int64_t high, int64_t i, float* out) {
  if (high - low == 1) {
    if (leaf[static_cast<size_t>(low)] == nullptr) return false;
    *out = leaf[static_cast<size_t>(low)][i];
    return true;
  }
  const int64_t middle = (low + high) / 2;
  float a = 0.0f, b = 0.0f;
  const bool left = tree(leaf, low, middle, i, &a), right = tree(leaf, middle, high, i, &b);
  *out = left && right ? a + b : left ? a : b;
  return left || right;
}

struct CombineCase {
  int64_t tokens, width, experts, top_k;
  bool gates, shared, residual;
  DType dtype, residual_dtype;
};

struct CombineTensors {
  explicit CombineTensors(const CombineCase& c)
      : routing({c.tokens, c.experts, c.top_k}),
        y(c.dtype, {c.tokens * c.top_k, c.width}),
        shared(c.dtype, {c.tokens, c.width}),
        residual(c.residual_dtype, {c.tokens, c.width}),
        out(c.dtype, {c.tokens, c.width}) {
    fill_normal(routing.logits, 10);
    fill_normal(y, 11);
    fill_normal(shared, 12);
    fill_normal(residual, 13);
  }
  CombineExperts op(const CombineCase& c) {
    return {y.view(),
            routing.row_of.view(),
            routing.experts.view(),
            c.gates ? routing.gates.view() : TensorView{},
            c.experts,
            c.shared ? shared.view() : TensorView{},
            c.residual ? residual.view() : TensorView{},
            out.view()};
  }
  Routing routing;
  HostTensor y, shared, residual, out;
};

HostTensor combine_reference(const CombineCase& c, CombineTensors& x) {
  HostTensor want(c.dtype, {c.tokens, c.width});
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::vector<std::vector<float>> rows(static_cast<size_t>(c.experts));
    std::vector<const float*> leaf(static_cast<size_t>(c.experts), nullptr);
    for (int64_t j = 0; j < c.top_k; ++j) {
      const int64_t row = x.routing.row_of.as<int32_t>()[t * c.top_k + j];
      const auto e = static_cast<size_t>(x.routing.experts.as<int32_t>()[t * c.top_k + j]);
      for (int64_t i = 0; i < c.width; ++i) {
        const float y = value(x.y, row * c.width + i);
        rows[e].push_back(c.gates ? x.routing.gates.as<float>()[t * c.top_k + j] * y : y);
      }
      leaf[e] = rows[e].data();
    }
    for (int64_t i = 0; i < c.width; ++i) {
      float sum = 0.0f;
      tree(leaf, 0, c.experts, i, &sum);
      if (c.shared) sum += value(x.shared, t * c.width + i);
      if (c.residual) sum += value(x.residual, t * c.width + i);
      set(want, t * c.width + i, sum);
    }
  }
  return want;
}

TEST(CombineExperts, follows_the_tree_bit_for_bit) {
  Queue one = Queue::cpu(1), three = Queue::cpu(3);
  for (const auto& [experts, top_k] :
       {std::pair<int64_t, int64_t>{1, 1}, {8, 2}, {8, 8}, {7, 3}, {64, 6}, {33, 5}}) {
    for (const int64_t width : {1, 100, 257, 600}) {
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        for (int flags = 0; flags < 8; ++flags) {
          const CombineCase c{9,
                              width,
                              experts,
                              top_k,
                              (flags & 1) != 0,
                              (flags & 2) != 0,
                              (flags & 4) != 0,
                              dtype,
                              (flags & 1) != 0 ? DType::kF32 : dtype};
          SCOPED_TRACE(detail::concat("E=", experts, " k=", top_k, " D=", width, " flags=", flags));
          CombineTensors x(c);
          x.routing.route(one);
          const HostTensor want = combine_reference(c, x);
          run(one, x.op(c));
          EXPECT_TRUE(x.out.same_bytes(want));
          x.out = HostTensor(dtype, {c.tokens, width});
          run(three, x.op(c));
          EXPECT_TRUE(x.out.same_bytes(want));
        }
      }
    }
  }
}

TEST(CombineExperts, the_residual_may_be_the_output) {
  Queue queue = Queue::cpu(2);
  const CombineCase c{70, 300, 8, 2, true, false, true, DType::kBf16, DType::kBf16};
  CombineTensors x(c);
  x.routing.route(queue);
  run(queue, x.op(c));
  CombineExperts in_place = x.op(c);
  in_place.out = x.residual.view();
  run(queue, in_place);
  EXPECT_TRUE(x.residual.same_bytes(x.out));
}

// A token's result is the same alone and among others, whose rows lie elsewhere then.
TEST(CombineExperts, rows_do_not_depend_on_the_batch) {
  Queue queue = Queue::cpu(2);
  const CombineCase c{70, 100, 8, 2, true, true, true, DType::kBf16, DType::kBf16};
  CombineTensors x(c);
  x.routing.route(queue);
  run(queue, x.op(c));
  CombineCase alone = c;
  alone.tokens = 1;
  for (int64_t t = 0; t < c.tokens; t += 11) {
    CombineTensors a(alone);
    std::copy_n(x.routing.logits.as<float>() + t * 8, 8, a.routing.logits.as<float>());
    std::copy_n(x.shared.as<Bf16>() + t * c.width, c.width, a.shared.as<Bf16>());
    std::copy_n(x.residual.as<Bf16>() + t * c.width, c.width, a.residual.as<Bf16>());
    a.routing.route(queue);
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t from = x.routing.row_of.as<int32_t>()[t * 2 + j], to = a.routing.row_of.as<int32_t>()[j];
      std::copy_n(x.y.as<Bf16>() + from * c.width, c.width, a.y.as<Bf16>() + to * c.width);
    }
    run(queue, a.op(alone));
    EXPECT_TRUE(matches_bitwise(x.out.view().rows(t, 1), a.out.view()));
  }
}

TEST(CombineExperts, an_expert_named_twice_is_refused) {
  Queue queue = Queue::cpu(1);
  const CombineCase c{2, 4, 8, 2, true, false, false, DType::kF32, DType::kF32};
  CombineTensors x(c);
  x.routing.route(queue);
  x.routing.experts.as<int32_t>()[1] = x.routing.experts.as<int32_t>()[0];
  EXPECT_THROW(run(queue, x.op(c)), InternalError);
}

// Partial sums of ranks that hold equal shares of the experts, then their sum: the tree of the whole.
TEST(CombineExperts, partial_sums_of_any_power_of_two_ranks_make_up_the_whole) {
  Queue queue = Queue::cpu(2);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const CombineCase c{41, 300, 16, 5, true, true, true, dtype, dtype};
    CombineTensors x(c);
    x.routing.route(queue);
    run(queue, x.op(c));
    for (const int64_t ranks : {2, 4, 16}) {
      HostTensor partials(DType::kF32, {ranks * c.tokens, c.width});
      HostTensor here(DType::kI32, {c.tokens, c.top_k}), rank_of(DType::kI32, {c.tokens, ranks});
      HostTensor place(DType::kI32, {c.tokens, ranks}), out(dtype, {c.tokens, c.width});
      std::fill_n(rank_of.as<int32_t>(), rank_of.view().elements(), -1);
      for (int64_t r = 0; r < ranks; ++r) {
        for (int64_t i = 0; i < c.tokens * c.top_k; ++i) {
          const int32_t expert = x.routing.experts.as<int32_t>()[i];
          const bool is_here = expert / (c.experts / ranks) == r;
          here.as<int32_t>()[i] = is_here ? expert : -1;
          if (!is_here) continue;
          rank_of.as<int32_t>()[i / c.top_k * ranks + r] = static_cast<int32_t>(r);
          place.as<int32_t>()[i / c.top_k * ranks + r] = static_cast<int32_t>(r * c.tokens + i / c.top_k);
        }
        CombineExperts part = x.op(c);
        part.experts = here.view();
        part.shared = part.residual = {};
        part.out = partials.view().rows(r * c.tokens, c.tokens);
        part.partial = true;
        run(queue, part);
      }
      run(queue, CombineExperts{.y = partials.view(),
                                .row_of = place.view(),
                                .experts = rank_of.view(),
                                .gates = {},
                                .num_experts = ranks,
                                .shared = x.shared.view(),
                                .residual = x.residual.view(),
                                .out = out.view(),
                                .partial = true});
      EXPECT_TRUE(out.same_bytes(x.out)) << ranks << " ranks, " << dtype_name(dtype);
    }
  }
}

TEST(CombineExperts, a_token_without_a_choice_here_gets_its_addends) {
  Queue queue = Queue::cpu(1);
  const CombineCase c{3, 70, 8, 2, true, true, false, DType::kF32, DType::kF32};
  CombineTensors x(c);
  std::fill_n(x.routing.experts.as<int32_t>(), 6, -1);
  CombineExperts op = x.op(c);
  EXPECT_THROW(run(queue, op), InternalError);  // all are here unless it says otherwise
  op.partial = true;
  run(queue, op);
  EXPECT_TRUE(x.out.same_bytes(x.shared));
}

TEST(CombineExpertsBackward, sums_in_index_order) {
  Queue one = Queue::cpu(1), three = Queue::cpu(3);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const auto& [tokens, top_k] : {std::pair<int64_t, int64_t>{1, 1}, {1, 2}, {9, 3}, {70, 2}, {5, 8}}) {
      for (const int64_t width : {1, 128, 300}) {
        SCOPED_TRACE(detail::concat(dtype_name(dtype), " T=", tokens, " k=", top_k, " D=", width));
        Routing r({tokens, 8, top_k});
        fill_normal(r.logits, 20);
        r.route(one);
        HostTensor dout(dtype, {tokens, width}), y(dtype, {tokens * top_k, width}), dy = y, dy3 = y,
                                                                                    want_dy = y;
        HostTensor dgates(DType::kF32, {tokens, top_k}), dgates3 = dgates, want_dgates = dgates;
        fill_normal(dout, 21);
        fill_normal(y, 22);
        for (int64_t i = 0; i < tokens * top_k; ++i) {
          const int64_t row = r.row_of.as<int32_t>()[i], t = i / top_k;
          float sum = 0.0f;
          for (int64_t d = 0; d < width; ++d) {
            const float grad = value(dout, t * width + d), product = grad * value(y, row * width + d);
            sum = sum + product;
            set(want_dy, row * width + d, r.gates.as<float>()[i] * grad);
          }
          want_dgates.as<float>()[i] = sum;
        }
        const auto op = [&](HostTensor& out, HostTensor& gates) {
          return CombineExpertsBackward{dout.view(),    y.view(),   r.row_of.view(),
                                        r.gates.view(), out.view(), gates.view()};
        };
        run(one, op(dy, dgates));
        run(three, op(dy3, dgates3));
        EXPECT_TRUE(dy.same_bytes(want_dy) && dy3.same_bytes(want_dy));
        EXPECT_TRUE(matches_bitwise(want_dgates.view(), dgates.view()));
        EXPECT_TRUE(dgates.same_bytes(dgates3));
        run(three, op(y, dgates3));  // dy in the place of y
        EXPECT_TRUE(y.same_bytes(want_dy) && dgates.same_bytes(dgates3));
      }
    }
  }
}

TEST(CombineExpertsBackward, row_by_row_gives_the_same_bits) {
  Queue queue = Queue::cpu(3);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const int64_t tokens = 37, top_k = 3, width = 130, rows = tokens * top_k;
    Routing r({tokens, 8, top_k});
    fill_normal(r.logits, 24);
    r.route(queue);
    HostTensor dout(dtype, {tokens, width}), y(dtype, {rows, width}), dy = y, row_dy = y;
    HostTensor dgates(DType::kF32, {tokens, top_k}), gates(DType::kF32, {rows, 1}), row_dgates = gates;
    fill_normal(dout, 25);
    fill_normal(y, 26);
    run(queue, CombineExpertsBackward{dout.view(), y.view(), r.row_of.view(), r.gates.view(), dy.view(),
                                      dgates.view()});
    for (int64_t i = 0; i < rows; ++i) {
      gates.as<float>()[r.row_of.as<int32_t>()[i]] = r.gates.as<float>()[i];
    }
    CombineExpertsBackward op{.dout = dout.view(),
                              .y = y.view(),
                              .row_of = {},
                              .gates = gates.view(),
                              .dy = row_dy.view(),
                              .dgates = row_dgates.view(),
                              .dout_of = r.token_of.view()};
    run(queue, op);
    EXPECT_TRUE(row_dy.same_bytes(dy));
    for (int64_t i = 0; i < rows; ++i) {
      const int32_t row = r.row_of.as<int32_t>()[i];
      EXPECT_EQ(row_dgates.as<float>()[row], dgates.as<float>()[i]) << i;
    }
    r.token_of.as<int32_t>()[5] = static_cast<int32_t>(tokens);
    EXPECT_THROW(run(queue, op), InternalError);
    op.dout_of = {};
    EXPECT_THROW(run(queue, op), InternalError);  // as many rows of dout as of y then
    op.gates = gates.view().reshape({tokens, top_k});
    EXPECT_THROW(run(queue, op), InternalError);
  }
}

TEST(PermuteRows, copies_rows_and_refuses_rows_that_are_not_there) {
  Queue queue = Queue::cpu(3);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    Routing r({70, 8, 2});
    fill_normal(r.logits, 30);
    r.route(queue);
    HostTensor x(dtype, {70, 33}), out(dtype, {140, 33});
    fill_normal(x, 31);
    const PermuteRows op{x.view(), r.token_of.view(), out.view()};
    run(queue, op);
    for (int64_t row = 0; row < 140; ++row) {
      const TensorView want = x.view().rows(r.token_of.as<int32_t>()[row], 1);
      ASSERT_TRUE(matches_bitwise(want, out.view().rows(row, 1)));
    }
    for (const int32_t wrong : {-1, 70}) {
      r.token_of.as<int32_t>()[139] = wrong;
      EXPECT_THROW(run(queue, op), InternalError);
    }
  }
}

TEST(MoeOps, nothing_to_do_for_no_tokens) {
  Queue queue = Queue::cpu(2);
  const CombineCase c{0, 16, 8, 2, true, true, true, DType::kF32, DType::kF32};
  CombineTensors x(c);
  x.routing.route(queue);
  run(queue, x.op(c));
  HostTensor in(DType::kF32, {0, 16}), weight(DType::kF32, {8, 16}), dweight = weight, before = weight;
  HostTensor dgates(DType::kF32, {0, 2});
  fill_normal(weight, 40);
  fill_normal(dweight, 41);
  fill_normal(before, 41);
  run(queue, PermuteRows{in.view(), x.routing.token_of.view(), x.out.view()});
  run(queue, RouterLogits{in.view(), weight.view(), x.routing.logits.view()});
  run(queue,
      RouterLogitsBackward{in.view(), weight.view(), x.routing.logits.view(), x.out.view(), dweight.view()});
  run(queue, CombineExpertsBackward{in.view(), x.y.view(), x.routing.row_of.view(), x.routing.gates.view(),
                                    x.out.view(), dgates.view()});
  EXPECT_TRUE(dweight.same_bytes(before));
}

}  // namespace
}  // namespace fp4t::test
