// Permutation and combination on the GPU against the CPU.
#include <algorithm>
#include <numeric>
#include <random>

#include "kernels/base/check.h"
#include "kernels/ops/moe.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr DType kTypes[] = {DType::kBf16, DType::kF32};

struct Size {
  int64_t tokens, experts, top_k, width;
};
std::string text(const Size& s) {
  return detail::concat("T=", s.tokens, " E=", s.experts, " k=", s.top_k, " D=", s.width);
}

constexpr Size kSizes[] = {{0, 8, 2, 64},      {1, 1, 1, 1},      {1, 8, 8, 2048},    {5, 8, 2, 90},
                           {130, 7, 3, 128},   {67, 5, 5, 257},   {300, 128, 8, 768}, {33, 512, 10, 520},
                           {70, 300, 33, 40},  {41, 40, 7, 2048}, {200, 64, 1, 264},  {9, 200, 150, 8},
                           {257, 128, 8, 2050}};

// Distinct experts of every token in random order, and the rows of a permutation.
struct Choices {
  Choices(Mirror& m, const Size& s, uint64_t seed = 7) {
    std::mt19937_64 engine(seed);
    std::vector<int32_t> all(static_cast<size_t>(s.experts)), chosen, rows, inverse;
    std::iota(all.begin(), all.end(), 0);
    for (int64_t t = 0; t < s.tokens; ++t) {
      std::shuffle(all.begin(), all.end(), engine);
      chosen.insert(chosen.end(), all.begin(), all.begin() + s.top_k);
    }
    rows.resize(static_cast<size_t>(s.tokens * s.top_k));
    std::iota(rows.begin(), rows.end(), 0);
    std::shuffle(rows.begin(), rows.end(), engine);
    experts = m.i32(chosen).reshape({s.tokens, s.top_k});
    row_of = m.i32(rows).reshape({s.tokens, s.top_k});
  }
  TensorView experts, row_of;
};

TEST(GpuMoe, permuted_rows_are_bitwise) {
  for (DType type : kTypes) {
    for (int64_t width : {1, 2, 90, 128, 2048, 4104}) {
      for (int64_t rows : {0, 1, 33, 1000}) {
        Mirror m;
        std::vector<int32_t> from;
        for (int64_t r = 0; r < rows; ++r) from.push_back(static_cast<int32_t>((r * 31 + 5) % 77));
        m.check(PermuteRows{
            .x = m.normal(type, {77, width}), .token_of = m.i32(from), .out = m.fresh(type, {rows, width})});
      }
    }
  }
}

TEST(GpuMoe, rows_permuted_by_token_are_bitwise) {
  for (DType type : kTypes) {
    for (const Size& s : kSizes) {
      SCOPED_TRACE(text(s));
      Mirror m;
      const Choices c(m, s);
      const int64_t rows = s.tokens * s.top_k;
      std::vector<int32_t> token_of(static_cast<size_t>(rows));
      for (int64_t i = 0; i < rows; ++i) {
        token_of[static_cast<size_t>(c.row_of.as<int32_t>()[i])] = static_cast<int32_t>(i / s.top_k);
      }
      m.check(PermuteRows{.x = m.normal(type, {s.tokens, s.width}),
                          .token_of = m.i32(token_of),
                          .out = m.fresh(type, {rows, s.width}),
                          .row_of = c.row_of});
    }
  }
}

TEST(GpuMoe, combinations_follow_the_tree) {
  for (DType type : kTypes) {
    for (const Size& s : kSizes) {
      SCOPED_TRACE(text(s));
      Mirror m;
      const Choices c(m, s);
      const TensorView y = m.normal(type, {s.tokens * s.top_k, s.width});
      const TensorView gates = m.normal(DType::kF32, {s.tokens, s.top_k});
      const Shape shape{s.tokens, s.width};
      m.check(CombineExperts{.y = y,
                             .row_of = c.row_of,
                             .experts = c.experts,
                             .gates = gates,
                             .num_experts = s.experts,
                             .shared = {},
                             .residual = {},
                             .out = m.fresh(type, shape)});
      const TensorView residual = m.normal(DType::kF32, shape);
      m.check(CombineExperts{.y = y,
                             .row_of = c.row_of,
                             .experts = c.experts,
                             .gates = {},
                             .num_experts = s.experts,
                             .shared = m.normal(DType::kBf16, shape),
                             .residual = residual,
                             .out = residual});
    }
  }
}

// Every way in which 1 to 8 of 16 experts can be chosen: every shape of tree with up to eight leaves.
TEST(GpuMoe, every_choice_of_up_to_eight_experts_follows_the_tree) {
  for (int64_t top_k = 1; top_k <= 8; ++top_k) {
    std::vector<int32_t> chosen;
    for (int32_t mask = 0; mask < 1 << 16; ++mask) {
      if (__builtin_popcount(static_cast<unsigned>(mask)) != top_k) continue;
      for (int32_t e = 0; e < 16; ++e) {
        if (mask >> e & 1) chosen.push_back(e);
      }
    }
    Mirror m;
    const int64_t tokens = static_cast<int64_t>(chosen.size()) / top_k;
    std::vector<int32_t> rows(chosen.size());
    std::iota(rows.begin(), rows.end(), 0);
    m.check(CombineExperts{.y = m.normal(DType::kF32, {tokens * top_k, 8}),
                           .row_of = m.i32(rows).reshape({tokens, top_k}),
                           .experts = m.i32(chosen).reshape({tokens, top_k}),
                           .gates = m.normal(DType::kF32, {tokens, top_k}),
                           .num_experts = 16,
                           .shared = {},
                           .residual = {},
                           .out = m.fresh(DType::kF32, {tokens, 8})});
  }
}

// What a rank adds where experts lie on several: about half of the choices are elsewhere, of some tokens all.
TEST(GpuMoe, partial_combinations_are_bitwise) {
  for (DType type : kTypes) {
    for (const Size& s : kSizes) {
      SCOPED_TRACE(text(s));
      Mirror m;
      const Choices c(m, s);
      std::vector<int32_t> experts, rows;
      for (int64_t i = 0; i < s.tokens * s.top_k; ++i) {
        const bool is_here = i / s.top_k % 5 != 3 && (i * 7 + i / s.top_k) % 13 < 7;
        experts.push_back(is_here ? c.experts.as<int32_t>()[i] : -1);
        rows.push_back(is_here ? c.row_of.as<int32_t>()[i] : -1);
      }
      const TensorView here = m.i32(experts).reshape({s.tokens, s.top_k});
      const TensorView row_of = m.i32(rows).reshape({s.tokens, s.top_k});
      const TensorView y = m.normal(type, {s.tokens * s.top_k + 3, s.width});
      const TensorView gates = m.normal(DType::kF32, {s.tokens, s.top_k});
      m.check(CombineExperts{.y = y,
                             .row_of = row_of,
                             .experts = here,
                             .gates = gates,
                             .num_experts = s.experts,
                             .shared = {},
                             .residual = {},
                             .out = m.fresh(DType::kF32, {s.tokens, s.width}),
                             .partial = true});
    }
  }
}

// Rows of experts that take their gradients from tokens of other ranks, which have several rows each.
TEST(GpuMoe, gradients_of_the_combination_row_by_row_are_bitwise) {
  for (DType type : kTypes) {
    for (const Size& s : kSizes) {
      SCOPED_TRACE(text(s));
      Mirror m;
      const int64_t rows = s.tokens * s.top_k - 1, guests = s.tokens + 2;
      if (rows <= 0) continue;
      std::vector<int32_t> dout_of;
      for (int64_t i = 0; i < rows; ++i) dout_of.push_back(static_cast<int32_t>(i * 7 % guests));
      CombineExpertsBackward op{.dout = m.normal(type, {guests, s.width}),
                                .y = m.normal(type, {rows, s.width}),
                                .row_of = {},
                                .gates = m.normal(DType::kF32, {rows, 1}),
                                .dy = m.fresh(type, {rows, s.width}),
                                .dgates = m.fresh(DType::kF32, {rows, 1}),
                                .dout_of = m.i32(dout_of)};
      m.check(op);
      op.dy = op.y;
      m.check(op);
      op.dout_of.as<int32_t>()[rows / 2] = static_cast<int32_t>(guests);
      EXPECT_THROW(m.run_on_gpu(op), InternalError);
    }
  }
}

TEST(GpuMoe, gradients_of_the_combination_are_bitwise) {
  for (DType type : kTypes) {
    for (const Size& s : kSizes) {
      SCOPED_TRACE(text(s));
      Mirror m;
      const Choices c(m, s);
      CombineExpertsBackward op{.dout = m.normal(type, {s.tokens, s.width}),
                                .y = m.normal(type, {s.tokens * s.top_k, s.width}),
                                .row_of = c.row_of,
                                .gates = m.normal(DType::kF32, {s.tokens, s.top_k}),
                                .dy = m.fresh(type, {s.tokens * s.top_k, s.width}),
                                .dgates = m.fresh(DType::kF32, {s.tokens, s.top_k})};
      m.check(op);
      op.dy = op.y;
      m.check(op);
    }
  }
}

TEST(GpuMoe, rows_and_experts_out_of_range_are_faults) {
  Mirror m;
  for (const Size& s : {Size{40, 8, 2, 64}, Size{40, 30, 20, 64}}) {
    const Choices c(m, s);
    const TensorView y = m.normal(DType::kBf16, {s.tokens * s.top_k, s.width}),
                     out = m.fresh(DType::kBf16, {s.tokens, s.width}),
                     gates = m.normal(DType::kF32, {s.tokens, s.top_k}),
                     dy = m.fresh(DType::kBf16, {s.tokens * s.top_k, s.width}),
                     dgates = m.fresh(DType::kF32, {s.tokens, s.top_k});
    int32_t *experts = c.experts.as<int32_t>(), *rows = c.row_of.as<int32_t>();
    const auto combine = [&] {
      m.run_on_gpu(CombineExperts{y, c.row_of, c.experts, gates, s.experts, {}, {}, out});
    };
    combine();
    const int32_t was = experts[5];
    for (int32_t bad : {static_cast<int32_t>(s.experts), -1, experts[4]}) {  // the last comes twice
      experts[5] = bad;
      EXPECT_THROW(combine(), InternalError) << bad;
    }
    experts[5] = was;
    rows[7] = static_cast<int32_t>(s.tokens * s.top_k);
    EXPECT_THROW(combine(), InternalError);
    EXPECT_THROW(m.run_on_gpu(CombineExpertsBackward{out, y, c.row_of, gates, dy, dgates}), InternalError);
    rows[7] = -1;
    EXPECT_THROW(combine(), InternalError);
    EXPECT_THROW(m.run_on_gpu(PermuteRows{out, c.row_of.reshape({s.tokens * s.top_k}), y}), InternalError);
  }
}

// More than 2^31 elements: what the last rows hold shows that no index wraps.
TEST(GpuMoe, rows_beyond_2_31_elements) {
  constexpr int64_t kTokens = 4096, kWidth = 2056, kRows = (int64_t{1} << 31) / kWidth + 4096;
  Queue queue = Queue::cuda(0);
  HostTensor x(DType::kBf16, {kTokens, kWidth}), last(DType::kBf16, {1, kWidth});
  HostTensor index(DType::kI32, {kRows}), few(DType::kI32, {2, 1}), ones(DType::kF32, {2, 1});
  fill_normal(x, 3);
  for (int64_t r = 0; r < kRows; ++r) index.as<int32_t>()[r] = static_cast<int32_t>(r * 17 % kTokens);
  const auto on_device = [&](HostTensor& t) {
    void* p = queue.allocate(t.view().bytes());
    queue.copy_from_host(p, t.view().data, t.view().bytes());
    return TensorView{p, t.view().dtype, t.view().shape};
  };
  const TensorView there = on_device(x), from = on_device(index);
  const TensorView out{queue.allocate(kRows * kWidth * 2), DType::kBf16, {kRows, kWidth}};
  run(queue, PermuteRows{there, from, out});
  queue.copy_to_host(last.view().data, out.as<Bf16>() + (kRows - 1) * kWidth, kWidth * 2);
  const int64_t token = index.as<int32_t>()[kRows - 1];
  EXPECT_TRUE(matches_bitwise(x.view().rows(token, 1), last.view()));

  // Every row to its own token, backwards, and back by the combination of one expert.
  HostTensor reversed(DType::kI32, {kRows, 1}), expert(DType::kI32, {kRows, 1});
  expert.zero();
  for (int64_t r = 0; r < kRows; ++r) reversed.as<int32_t>()[r] = static_cast<int32_t>(kRows - 1 - r);
  const TensorView row_of = on_device(reversed), experts = on_device(expert);
  const TensorView combined{queue.allocate(kRows * kWidth * 2), DType::kBf16, {kRows, kWidth}};
  run(queue, CombineExperts{out, row_of, experts, {}, 1, {}, {}, combined});
  queue.copy_to_host(last.view().data, combined.as<Bf16>() + (kRows - 1) * kWidth, kWidth * 2);
  EXPECT_TRUE(matches_bitwise(x.view().rows(index.as<int32_t>()[0], 1), last.view()));

  const TensorView gates{queue.allocate(kRows * 4), DType::kF32, {kRows, 1}},
      dgates{queue.allocate(kRows * 4), DType::kF32, {kRows, 1}};
  HostTensor one(DType::kF32, {kRows, 1});
  std::fill_n(one.as<float>(), kRows, 1.0f);
  queue.copy_from_host(gates.data, one.view().data, one.view().bytes());
  const TensorView dy{queue.allocate(kRows * kWidth * 2), DType::kBf16, {kRows, kWidth}};
  run(queue, CombineExpertsBackward{combined, out, row_of, gates, dy, dgates});
  queue.copy_to_host(last.view().data, dy.as<Bf16>() + (kRows - 1) * kWidth, kWidth * 2);
  EXPECT_TRUE(matches_bitwise(x.view().rows(token, 1), last.view()));
  for (void* p : {there.data, from.data, out.data, row_of.data, experts.data, combined.data, gates.data,
                  dgates.data, dy.data}) {
    queue.release(p);
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
