// Where tokens travel when experts lie on several ranks: all of them, once a rank, never more rows a round
// than fit.
#include "engine/model/trip.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

namespace fp4t {
namespace {

struct Case {
  int64_t ranks, experts, top_k, round_rows;
  std::vector<std::vector<int32_t>> choices;  // by rank
  TripSizes sizes(int64_t rank) const {
    return {static_cast<int64_t>(choices[static_cast<size_t>(rank)].size()) / top_k, top_k, experts, ranks};
  }
};

// Uneven numbers of tokens, none on some ranks; `lopsided`: nearly all choose the first experts.
Case random_case(std::mt19937_64& engine) {
  Case c;
  c.ranks = 1 + static_cast<int64_t>(engine() % 5);
  c.experts = c.ranks * (1 + static_cast<int64_t>(engine() % 4));
  c.top_k = 1 + static_cast<int64_t>(engine() % static_cast<uint64_t>(std::min<int64_t>(c.experts, 4)));
  c.round_rows = 1 + static_cast<int64_t>(engine() % 60);
  const bool lopsided = engine() % 3 == 0;
  for (int64_t r = 0; r < c.ranks; ++r) {
    std::vector<int32_t> list;
    const uint64_t tokens = engine() % 4 == 0 ? 0 : engine() % 40;
    for (uint64_t t = 0; t < tokens; ++t) {
      std::vector<int32_t> all(static_cast<size_t>(c.experts));
      std::iota(all.begin(), all.end(), 0);
      if (!lopsided || engine() % 8 == 0) std::shuffle(all.begin(), all.end(), engine);
      list.insert(list.end(), all.begin(), all.begin() + c.top_k);
    }
    c.choices.push_back(std::move(list));
  }
  return c;
}

std::vector<Trip> trips_of(const Case& c) {
  std::vector<TripCounts> counts;
  for (int64_t r = 0; r < c.ranks; ++r) {
    const auto mine = count_trip(c.sizes(r), c.choices[static_cast<size_t>(r)].data());
    counts.insert(counts.end(), mine.begin(), mine.end());
  }
  std::vector<Trip> trips;
  for (int64_t r = 0; r < c.ranks; ++r) {
    trips.push_back(plan_trip(c.sizes(r), c.choices[static_cast<size_t>(r)].data(), counts, r, c.round_rows));
  }
  return trips;
}

TEST(ModelTrip, every_token_goes_once_to_every_rank_that_has_an_expert_of_it) {
  std::mt19937_64 engine(11);
  for (int round = 0; round < 200; ++round) {
    const Case c = random_case(engine);
    SCOPED_TRACE(::testing::Message() << "case " << round);
    const auto trips = trips_of(c);
    for (int64_t r = 0; r < c.ranks; ++r) {
      const Trip& trip = trips[static_cast<size_t>(r)];
      ASSERT_EQ(trip.rounds.size(), trips[0].rounds.size());
      size_t at = 0;
      for (const Trip::Round& part : trip.rounds) {
        ASSERT_EQ(part.first, static_cast<int64_t>(at));
        for (size_t to = 0; to < part.send.size(); ++to) {
          for (int64_t i = 0; i < part.send[to]; ++i, ++at) {
            const size_t place = static_cast<size_t>(trip.sent[at]) * part.send.size() + to;
            ASSERT_EQ(trip.place_of[place], static_cast<int32_t>(at));
            ASSERT_EQ(trip.rank_of[place], static_cast<int32_t>(to));
          }
        }
      }
      ASSERT_EQ(at, trip.sent.size());
      const auto& choices = c.choices[static_cast<size_t>(r)];
      for (int64_t t = 0; t < c.sizes(r).tokens; ++t) {
        std::set<int64_t> ranks;
        for (int64_t j = 0; j < c.top_k; ++j) {
          ranks.insert(choices[static_cast<size_t>(t * c.top_k + j)] / (c.experts / c.ranks));
        }
        for (int64_t to = 0; to < c.ranks; ++to) {
          ASSERT_EQ(trip.place_of[static_cast<size_t>(t * c.ranks + to)] >= 0, ranks.count(to) == 1);
        }
      }
    }
  }
}

TEST(ModelTrip, a_round_brings_no_more_rows_than_fit) {
  std::mt19937_64 engine(12);
  bool saw_several = false;
  for (int round = 0; round < 200; ++round) {
    const Case c = random_case(engine);
    SCOPED_TRACE(::testing::Message() << "case " << round);
    const auto trips = trips_of(c);
    const int64_t most = c.round_rows + std::min(c.top_k, c.experts / c.ranks) - 1;
    saw_several = saw_several || trips[0].rounds.size() > 1;
    for (size_t i = 0; i < trips[0].rounds.size(); ++i) {
      for (int64_t to = 0; to < c.ranks; ++to) {
        std::vector<int32_t> guests;
        for (int64_t r = 0; r < c.ranks; ++r) {
          const Trip& trip = trips[static_cast<size_t>(r)];
          const Trip::Round& part = trip.rounds[i];
          auto at =
              static_cast<size_t>(std::accumulate(part.send.begin(), part.send.begin() + to, part.first));
          for (int64_t n = part.send[static_cast<size_t>(to)]; n > 0; --n, ++at) {
            const auto first = c.choices[static_cast<size_t>(r)].begin() + trip.sent[at] * c.top_k;
            guests.insert(guests.end(), first, first + c.top_k);
          }
        }
        TripSizes sizes = c.sizes(0);
        sizes.tokens = static_cast<int64_t>(guests.size()) / c.top_k;
        const GuestRows rows = place_guests(sizes, guests.data(), to);
        ASSERT_LE(sizes.tokens, c.round_rows);
        ASSERT_LE(rows.offsets.back(), most);
      }
    }
  }
  EXPECT_TRUE(saw_several);
}

TEST(ModelTrip, guests_stand_by_expert_and_then_as_they_came) {
  //                     rank 1 of 2 has experts 3, 4, 5
  const std::vector<int32_t> choices = {5, 0, 1, 3, 4, 3, 2, 5};
  const GuestRows rows = place_guests({4, 2, 6, 2}, choices.data(), 1);
  EXPECT_EQ(rows.experts, (std::vector<int32_t>{5, -1, -1, 3, 4, 3, -1, 5}));
  EXPECT_EQ(rows.offsets, (std::vector<int32_t>{0, 2, 3, 5}));
  EXPECT_EQ(rows.guest_of, (std::vector<int32_t>{1, 2, 2, 0, 3}));
  EXPECT_EQ(rows.row_of, (std::vector<int32_t>{3, -1, -1, 0, 2, 1, -1, 4}));
}

}  // namespace
}  // namespace fp4t
