// Routing on the GPU against the CPU.
#include <limits>

#include "kernels/base/check.h"
#include "kernels/ops/moe.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr RouterKind kKinds[] = {RouterKind::kSoftmax, RouterKind::kSigmoid};

struct Size {
  int64_t tokens, experts, top_k;
};
std::string text(const Size& s) { return detail::concat("T=", s.tokens, " E=", s.experts, " k=", s.top_k); }

constexpr Size kSizes[] = {{0, 8, 2},     {1, 1, 1},     {1, 8, 2},     {31, 7, 3},     {32, 8, 8},
                           {33, 8, 2},    {257, 40, 33}, {1000, 64, 6}, {2049, 128, 8}, {300, 512, 10},
                           {97, 2000, 5}, {9, 16, 4},    {64, 128, 8},  {100, 128, 8},  {250, 24, 3}};

// The tensors of one routing.
struct Tensors {
  Tensors(Mirror& m, const Size& s)
      : logits(m.normal(DType::kF32, {s.tokens, s.experts}, 2.0f)),
        bias(m.normal(DType::kF32, {s.experts}, 0.1f)),
        scores(m.fresh(DType::kF32, {s.tokens, s.experts})),
        experts(m.fresh(DType::kI32, {s.tokens, s.top_k})),
        gates(m.fresh(DType::kF32, {s.tokens, s.top_k})),
        offsets(m.fresh(DType::kI32, {s.experts + 1})),
        row_of(m.fresh(DType::kI32, {s.tokens, s.top_k})),
        token_of(m.fresh(DType::kI32, {s.tokens * s.top_k})) {}

  Route route(RouterKind kind, bool normalise) const {
    return {logits, bias,    kind,  experts.dim(1), normalise, 2.5f,
            scores, experts, gates, offsets,        row_of,    token_of};
  }

  TensorView logits, bias, scores, experts, gates, offsets, row_of, token_of;
};

TEST(GpuRouting, routes_are_bitwise) {
  for (const Size& s : kSizes) {
    for (RouterKind kind : kKinds) {
      for (bool normalise : {true, false}) {
        SCOPED_TRACE(text(s));
        Mirror m;
        m.check(Tensors(m, s).route(kind, normalise));
      }
    }
  }
}

// Given experts for two tokens of three, some of them the token's own.
TEST(GpuRouting, replays_are_bitwise) {
  for (const Size& s : kSizes) {
    SCOPED_TRACE(text(s));
    Mirror m;
    const Tensors t(m, s);
    Route op = t.route(RouterKind::kSoftmax, true);
    op.replay = m.fresh(DType::kI32, {s.tokens, s.top_k});
    op.differs = m.fresh(DType::kI32, {s.tokens});
    for (int64_t i = 0; i < s.tokens; ++i) {
      int32_t* row = op.replay.as<int32_t>() + i * s.top_k;
      for (int64_t j = 0; j < s.top_k; ++j) {
        row[j] = i % 3 == 0 ? -1 : static_cast<int32_t>((i * 5 + j) % s.experts);
      }
    }
    m.check(op);
  }
}

TEST(GpuRouting, ties_go_to_the_lower_index) {
  Mirror m;
  const Size s{200, 64, 6};
  const Tensors t(m, s);
  for (int64_t i = 0; i < s.tokens * s.experts; ++i) {
    t.logits.as<float>()[i] = static_cast<float>(i * 7 % 5) - (i % 3 == 0 ? 0.0f : 2.0f);
  }
  std::fill_n(t.bias.as<float>(), s.experts, -0.0f);
  m.check(t.route(RouterKind::kSigmoid, true));
  m.check(t.route(RouterKind::kSoftmax, true));
}

TEST(GpuRouting, all_tokens_to_the_same_experts) {
  Mirror m;
  const Size s{5000, 16, 2};
  const Tensors t(m, s);
  for (int64_t i = 0; i < s.tokens * s.experts; ++i) {
    t.logits.as<float>()[i] = i % s.experts == 3 ? 5.0f : i % s.experts == 12 ? 6.0f : 0.0f;
  }
  m.check(t.route(RouterKind::kSoftmax, true));
}

// NaN counts as largest and stays visible; payloads are the machine's.
TEST(GpuRouting, non_finite_logits_choose_alike) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (RouterKind kind : kKinds) {
    Mirror m;
    const Size s{70, 32, 4};
    const Tensors t(m, s);
    float* logits = t.logits.as<float>();
    logits[0 * 32 + 5] = std::numeric_limits<float>::quiet_NaN();
    logits[33 * 32 + 7] = kInf;
    logits[34 * 32 + 9] = -kInf;
    std::fill_n(logits + 40 * 32, 32, -kInf);
    std::fill_n(logits + 41 * 32, 32, -200.0f);  // scores of 0 under sigmoid: gates of 0
    t.bias.as<float>()[11] = -kInf;
    m.compare_by(t.scores, Ulp(0));
    m.compare_by(t.gates, Ulp(0));
    m.check(t.route(kind, true));
  }
}

TEST(GpuRouting, statistics_and_gradients_hold_their_bounds) {
  for (const Size& s : kSizes) {
    for (RouterKind kind : kKinds) {
      for (bool normalise : {true, false}) {
        SCOPED_TRACE(text(s));
        Mirror m;
        const Tensors t(m, s);
        m.check(t.route(kind, normalise));
        const TensorView sums = m.zeros(DType::kF64, {2}), load = m.zeros(DType::kI64, {s.experts});
        const RouterStats stats{t.logits, t.scores, t.offsets, kind, s.top_k, sums, load};
        m.check(stats);
        m.check(stats);  // adds
        m.check(RouteBackward{t.logits, t.scores, t.experts, t.offsets,
                              m.normal(DType::kF32, {s.tokens, s.top_k}), kind, normalise, 2.5f, 0.01f,
                              0.001f, m.fresh(DType::kF32, {s.tokens, s.experts})});
        m.check(RouteBackward{t.logits, t.scores, t.experts, t.offsets,
                              m.normal(DType::kF32, {s.tokens, s.top_k}), kind, normalise, 1.0f, 0.0f, 0.0f,
                              m.fresh(DType::kF32, {s.tokens, s.experts})});
      }
    }
  }
}

TEST(GpuRouting, bias_updates_are_bitwise) {
  for (int64_t n : {1, 8, 300}) {
    Mirror m;
    const TensorView load = m.fresh(DType::kI64, {n});
    for (int64_t e = 0; e < n; ++e) load.as<int64_t>()[e] = (e * 37) % 11 + (int64_t{1} << 33);
    m.check(UpdateExpertBias{.load = load, .rate = 0.001f, .bias = m.normal(DType::kF32, {n})});
    for (int64_t e = 0; e < n; ++e) load.as<int64_t>()[e] = 7;
    m.check(UpdateExpertBias{.load = load, .rate = 0.001f, .bias = m.normal(DType::kF32, {n})});
  }
}

TEST(GpuRouting, an_expert_out_of_range_is_a_fault) {
  Mirror m;
  const Size s{40, 8, 2};
  const Tensors t(m, s);
  m.check(t.route(RouterKind::kSoftmax, true));
  t.experts.as<int32_t>()[33] = 8;
  EXPECT_THROW(
      m.run_on_gpu(RouteBackward{t.logits, t.scores, t.experts, t.offsets,
                                 m.normal(DType::kF32, {s.tokens, s.top_k}), RouterKind::kSoftmax, true, 1.0f,
                                 0.0f, 0.0f, m.fresh(DType::kF32, {s.tokens, s.experts})}),
      InternalError);
}

struct RouterSize {
  int64_t tokens, experts, width;
};
constexpr RouterSize kRouterSizes[] = {{0, 8, 64},    {1, 1, 1},      {3, 8, 128},    {65, 7, 90},
                                       {64, 64, 256}, {300, 128, 96}, {1000, 40, 33}, {1537, 128, 2048}};

TEST(GpuRouting, router_products_hold_their_bounds) {
  for (DType type : {DType::kBf16, DType::kF32}) {
    for (const RouterSize& s : kRouterSizes) {
      SCOPED_TRACE(detail::concat("T=", s.tokens, " E=", s.experts, " D=", s.width, " ", dtype_name(type)));
      Mirror m;
      const TensorView x = m.normal(type, {s.tokens, s.width});
      const TensorView weight = m.normal(DType::kF32, {s.experts, s.width}, 0.02f);
      m.check(RouterLogits{.x = x, .weight = weight, .logits = m.fresh(DType::kF32, {s.tokens, s.experts})});
      m.check(RouterLogitsBackward{.x = x,
                                   .weight = weight,
                                   .dlogits = m.normal(DType::kF32, {s.tokens, s.experts}),
                                   .dx = m.fresh(DType::kF32, {s.tokens, s.width}),
                                   .dweight = m.normal(DType::kF32, {s.experts, s.width})});
    }
  }
}

// The sampler meets a token alone or among few, the trainer among thousands: they must route alike.
TEST(GpuRouting, logits_of_a_token_do_not_depend_on_its_neighbours) {
  constexpr int64_t kTokens = 5000, kExperts = 128, kWidth = 1056;
  for (DType type : {DType::kBf16, DType::kF32}) {
    Mirror m;
    const TensorView x = m.normal(type, {kTokens, kWidth});
    const TensorView weight = m.normal(DType::kF32, {kExperts, kWidth}, 0.02f);
    const TensorView all = m.fresh(DType::kF32, {kTokens, kExperts});
    m.run_on_gpu(RouterLogits{.x = x, .weight = weight, .logits = all});
    int64_t first = 0;
    for (int64_t count : {1, 2, 17, 64, 65, 300, 1025, 3000}) {
      const TensorView some = m.fresh(DType::kF32, {count, kExperts});
      m.run_on_gpu(RouterLogits{.x = x.rows(first, count), .weight = weight, .logits = some});
      EXPECT_TRUE(matches_bitwise(all.rows(first, count), some)) << dtype_name(type) << " " << count;
      first += count;
    }
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
