// Who owns what: every element one rank, pieces between chunks, parts as even as they can be.
#include "engine/plan/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace fp4t {
namespace {

std::vector<ParamInfo> parameters_of(const std::vector<int64_t>& sizes) {
  std::vector<ParamInfo> list;
  for (const int64_t n : sizes) {
    ParamInfo info{};
    info.shape = {n};
    info.tensor_id = static_cast<uint32_t>(list.size());
    list.push_back(info);
  }
  return list;
}

TEST(PlanRanks, parts_cover_everything_once_and_differ_by_one) {
  for (int64_t n = 0; n < 40; ++n) {
    for (int64_t parts = 1; parts < 12; ++parts) {
      int64_t next = 0, most = 0;
      for (int64_t i = 0; i < parts; ++i) {
        const Span s = part_of(n, i, parts);
        ASSERT_EQ(s.begin, next);
        ASSERT_GE(s.count(), n / parts);
        ASSERT_LE(s.count(), largest_part(n, parts));
        most = std::max(most, s.count());
        next = s.end;
      }
      ASSERT_EQ(next, n);
      ASSERT_EQ(most, largest_part(n, parts));
    }
  }
}

TEST(PlanRanks, an_expert_group_is_consecutive_ranks) {
  const Axes axes{.data = 3, .expert = 4};
  EXPECT_EQ(axes.ranks(), 12);
  for (int64_t r = 0; r < 12; ++r) {
    EXPECT_EQ(axes.data_index(r) * 4 + axes.expert_index(r), r);
    EXPECT_LT(axes.expert_index(r), 4);
  }
}

// Some of the parameters are experts, of `experts` equal matrices.
std::vector<ParamInfo> random_parameters(std::mt19937_64& engine, int64_t experts) {
  std::vector<int64_t> sizes;
  for (uint64_t i = 1 + engine() % 9; i > 0; --i)
    sizes.push_back(1 + static_cast<int64_t>(engine() % 250000));
  auto parameters = parameters_of(sizes);
  const uint64_t in_block = 1 + engine() % 4;
  for (ParamInfo& p : parameters) {
    p.layer = static_cast<int64_t>(p.tensor_id / in_block);
    if (engine() % 2 == 0) continue;
    p.role = ParamRole::kExpertWeight;
    p.placement = Placement::kSplitByExpert;
    p.shape = {experts, 1 + p.shape.elements() / experts, 1};
  }
  return parameters;
}

TEST(PlanRanks, norm_chunks_cover_a_parameter_and_end_with_every_expert) {
  std::mt19937_64 engine(6);
  for (const ParamInfo& p : random_parameters(engine, 3)) {
    int64_t next = 0;
    for_norm_chunks(p, [&](const Span& chunk) {
      ASSERT_EQ(chunk.begin, next);
      ASSERT_GT(chunk.count(), 0);
      ASSERT_LE(chunk.count(), kNormChunk);
      ASSERT_EQ(chunk.begin / matrix_elements(p), (chunk.end - 1) / matrix_elements(p));
      next = chunk.end;
    });
    ASSERT_EQ(next, p.shape.elements());
  }
}

TEST(PlanRanks, every_element_has_one_owner_and_pieces_end_between_chunks) {
  std::mt19937_64 engine(7);
  for (int round = 0; round < 80; ++round) {
    const Axes axes{.data = static_cast<int64_t>(1 + engine() % 5), .expert = int64_t{1} << engine() % 3};
    const auto parameters = random_parameters(engine, 4 * static_cast<int64_t>(1 + engine() % 2));
    const auto cut = engine() % 2 == 0 ? ShardTable::Cut::kChunks : ShardTable::Cut::kParameters;
    const ShardTable table(parameters, axes, cut);
    SCOPED_TRACE(::testing::Message() << "round " << round << ", " << parameters.size() << " parameters, "
                                      << axes.data << " x " << axes.expert);
    for (const ParamInfo& p : parameters) {
      std::vector<Span> owned;
      int64_t held = 0;
      for (int64_t r = 0; r < axes.ranks(); ++r) {
        const Span has = table.held(p, r), s = table.owned(p, r);
        if (axes.data_index(r) == 0) held += has.count();
        if (s.count() == 0) continue;
        ASSERT_TRUE(s.begin >= has.begin && s.end <= has.end);
        if (cut == ShardTable::Cut::kParameters && axes.ranks() > 1) {
          ASSERT_EQ(s, has);
        }
        owned.push_back(s);
      }
      const bool split = axes.expert > 1 && p.placement == Placement::kSplitByExpert;
      ASSERT_EQ(held, p.shape.elements() * (split ? 1 : axes.expert));
      if (axes.ranks() == 1) continue;
      std::sort(owned.begin(), owned.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
      int64_t next = 0;
      for (const Span& s : owned) {
        ASSERT_EQ(s.begin, next);
        next = s.end;
        ASSERT_EQ(s.end % matrix_elements(p) % kNormChunk, 0) << s.end << " of " << p.shape.elements();
      }
      ASSERT_EQ(next, p.shape.elements());
    }
  }
}

TEST(PlanRanks, pieces_of_a_row_are_what_their_member_owns_and_as_even_as_chunks_allow) {
  std::mt19937_64 engine(8);
  for (int round = 0; round < 60; ++round) {
    const Axes axes{.data = static_cast<int64_t>(1 + engine() % 9), .expert = 2};
    const auto parameters = random_parameters(engine, 4);
    const ShardTable table(parameters, axes, ShardTable::Cut::kChunks);
    const auto check = [&](const ShardRow& row, int64_t first_rank, int64_t stride) {
      int64_t next = 0;
      std::vector<int64_t> owned(static_cast<size_t>(row.members()));
      for (size_t segment = 0; segment < row.segments(); ++segment) {
        const Span whole = row.segment(segment);
        ASSERT_EQ(whole.begin, next);
        next = whole.end;
        int64_t total = 0;
        std::set<int64_t> layers;
        for (int64_t m = 0; m < row.members(); ++m) {
          const Span piece = row.piece(segment, m);
          ASSERT_LE(piece.count(), largest_part(whole.count(), row.members()) + kNormChunk);
          ASSERT_LE(piece.count(), row.largest_piece());
          int64_t parts = 0;
          row.for_parts(piece, [&](size_t p, const Span& s) {
            EXPECT_EQ(s, table.owned(parameters[p], first_rank + m * stride));
            layers.insert(parameters[p].layer);
            parts += s.count();
          });
          ASSERT_EQ(parts, piece.count());
          total += parts;
          owned[static_cast<size_t>(m)] += parts;
        }
        ASSERT_EQ(total, whole.count());
        ASSERT_EQ(layers.size(), 1u);
      }
      ASSERT_EQ(next, row.length());
      for (int64_t m = 0; m < row.members(); ++m) {
        ASSERT_EQ(row.owned_elements(m), owned[static_cast<size_t>(m)]);
      }
    };
    check(table.everywhere(), 0, 1);
    for (int64_t x = 0; x < axes.expert; ++x) check(table.experts(x), x, axes.expert);
  }
}

// What a block's ranks send each other goes both ways, and blocks smaller than the ranks are many do not all
// lie with the first.
TEST(PlanRanks, every_block_is_cut_over_all_ranks_in_turn) {
  std::vector<int64_t> sizes(8, 4 * kNormChunk);
  auto parameters = parameters_of(sizes);
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].layer = static_cast<int64_t>(i);
  const ShardTable two(parameters, {.data = 2}, ShardTable::Cut::kChunks);
  for (const ParamInfo& p : parameters) {
    EXPECT_EQ(two.owned(p, 0).count(), 2 * kNormChunk);
    EXPECT_EQ(two.owned(p, 1).count(), 2 * kNormChunk);
  }
  const ShardTable many(parameters, {.data = 32}, ShardTable::Cut::kChunks);
  for (int64_t r = 0; r < 32; ++r) EXPECT_EQ(many.everywhere().owned_elements(r), kNormChunk) << r;
  EXPECT_EQ(many.largest_owned(), kNormChunk);
}

TEST(PlanRanks, a_table_by_default_is_one_rank_that_owns_all) {
  const auto parameters = parameters_of({5, 70000});
  EXPECT_FALSE(ShardTable().is_sharded());
  EXPECT_EQ(ShardTable().owned(parameters[1], 0), (Span{0, 70000}));
  EXPECT_EQ(ShardTable().held(parameters[1], 0), (Span{0, 70000}));
  EXPECT_FALSE(ShardTable(parameters, {}, ShardTable::Cut::kChunks).is_sharded());
}

}  // namespace
}  // namespace fp4t
