// Who owns what: every element one rank, pieces between chunks, parts as even as they can be.
#include "engine/plan/ranks.h"

#include <gtest/gtest.h>

#include <random>

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

TEST(PlanRanks, every_element_has_one_owner_and_pieces_end_between_chunks) {
  std::mt19937_64 engine(7);
  for (int round = 0; round < 60; ++round) {
    std::vector<int64_t> sizes;
    const int count = 1 + static_cast<int>(engine() % 9);
    for (int i = 0; i < count; ++i) sizes.push_back(1 + static_cast<int64_t>(engine() % (4 * kNormChunk)));
    const auto parameters = parameters_of(sizes);
    const auto ranks = static_cast<int64_t>(1 + engine() % 9);
    const auto cut = engine() % 2 == 0 ? ShardTable::Cut::kChunks : ShardTable::Cut::kParameters;
    const ShardTable table(parameters, ranks, cut);
    SCOPED_TRACE(::testing::Message() << "round " << round << ", " << count << " parameters, " << ranks);
    int64_t total = 0;
    for (const ParamInfo& p : parameters) {
      int64_t next = 0;
      for (int64_t r = 0; r < ranks; ++r) {
        const Span s = table.owned(p, r);
        if (s.count() == 0) continue;
        ASSERT_EQ(s.begin, next);
        next = s.end;
        const bool ends = s.end == p.shape.elements();
        ASSERT_TRUE(ends || s.end % kNormChunk == 0) << s.end;
        if (cut == ShardTable::Cut::kParameters) {
          ASSERT_EQ(s.count(), p.shape.elements());
        }
      }
      ASSERT_EQ(next, p.shape.elements());
      total += next;
    }
    // The row's pieces are the same elements, and no rank has more than its part and the unit that it was cut
    // by.
    int64_t row = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      ASSERT_EQ(table.row(r).begin, row);
      row = table.row(r).end;
      int64_t parts = 0;
      table.for_parts(table.row(r), [&](size_t p, const Span& s) {
        EXPECT_EQ(s, table.owned(parameters[p], r));
        parts += s.count();
      });
      ASSERT_EQ(parts, table.row(r).count());
      if (cut == ShardTable::Cut::kChunks) {
        ASSERT_LE(parts, largest_part(total, ranks) + kNormChunk);
      }
    }
    ASSERT_EQ(row, total);
  }
}

TEST(PlanRanks, a_table_by_default_is_one_rank_that_owns_all) {
  const auto parameters = parameters_of({5, 70000});
  EXPECT_FALSE(ShardTable().is_sharded());
  EXPECT_EQ(ShardTable().owned(parameters[1], 0), (Span{0, 70000}));
  EXPECT_FALSE(ShardTable(parameters, 1, ShardTable::Cut::kChunks).is_sharded());
}

}  // namespace
}  // namespace fp4t
