// Where tokens travel when experts lie on several ranks: all of them, once a rank, never more rows a round
// than fit.
#include "engine/model/trip.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

namespace fp4t {
namespace {

struct Case {
  int64_t ranks, experts, top_k, round_rows, chunks;
  std::vector<std::vector<int32_t>> choices;  // by rank
  TripSizes sizes(int64_t rank) const {
    return {static_cast<int64_t>(choices[static_cast<size_t>(rank)].size()) / top_k, top_k, experts, ranks,
            chunks};
  }
  int64_t chunk_of(int64_t expert) const {  // of those of its rank
    const int64_t local = experts / ranks, e = expert % local;
    int64_t chunk = 0;
    while (local * (chunk + 1) / chunks <= e) ++chunk;
    return chunk;
  }
  // The chunks of a token's experts on a rank.
  std::set<int64_t> chunks_on(int64_t from, int64_t token, int64_t rank) const {
    std::set<int64_t> list;
    for (int64_t j = 0; j < top_k; ++j) {
      const int32_t e = choices[static_cast<size_t>(from)][static_cast<size_t>(token * top_k + j)];
      if (e / (experts / ranks) == rank) list.insert(chunk_of(e));
    }
    return list;
  }
};

ThreadPool& threads() {
  static ThreadPool pool(3);
  return pool;
}

// Uneven numbers of tokens, none on some ranks; `lopsided`: nearly all choose the first experts.
Case random_case(std::mt19937_64& engine) {
  Case c;
  c.ranks = 1 + static_cast<int64_t>(engine() % 5);
  c.experts = c.ranks * (1 + static_cast<int64_t>(engine() % 4));
  c.top_k = 1 + static_cast<int64_t>(engine() % static_cast<uint64_t>(std::min<int64_t>(c.experts, 4)));
  c.round_rows = 1 + static_cast<int64_t>(engine() % 60);
  c.chunks = 1 + static_cast<int64_t>(engine() % static_cast<uint64_t>(c.experts / c.ranks));
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
  std::vector<std::vector<Visit>> visits;
  for (int64_t r = 0; r < c.ranks; ++r) {
    visits.push_back(list_visits(c.sizes(r), c.choices[static_cast<size_t>(r)].data(), threads()));
    const auto mine = count_trip(c.sizes(r), visits.back());
    counts.insert(counts.end(), mine.begin(), mine.end());
  }
  std::vector<Trip> trips;
  for (int64_t r = 0; r < c.ranks; ++r) {
    trips.push_back(plan_trip(c.sizes(r), visits[static_cast<size_t>(r)], counts, r, c.round_rows));
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
      // What goes with a chunk are tokens whose first chunk there it is; what returns with one, whose last.
      std::map<std::pair<int64_t, int64_t>, int32_t> returned_from;  // (token, rank)
      size_t sent = 0, returned = 0;
      for (const Trip::Round& part : trip.rounds) {
        ASSERT_EQ(part.first, static_cast<int64_t>(sent));
        for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
          for (int64_t to = 0; to < c.ranks; ++to) {
            for (int64_t i = part.there[static_cast<size_t>(chunk)].send[static_cast<size_t>(to)]; i > 0;
                 --i) {
              const int32_t token = trip.sent[sent++];
              const auto chunks = c.chunks_on(r, token, to);
              ASSERT_FALSE(chunks.empty());
              ASSERT_EQ(*chunks.begin(), chunk);
            }
            for (int64_t i = part.back[static_cast<size_t>(chunk)].receive[static_cast<size_t>(to)]; i > 0;
                 --i) {
              int64_t token = -1;
              for (size_t at = 0; at < trip.place_of.size(); ++at) {
                if (trip.place_of[at] != static_cast<int32_t>(returned)) continue;
                ASSERT_EQ(token, -1) << "two tokens in one place";
                ASSERT_EQ(trip.rank_of[at], to);
                token = static_cast<int64_t>(at) / c.sizes(r).most_ranks();
              }
              ASSERT_GE(token, 0);
              ASSERT_EQ(*c.chunks_on(r, token, to).rbegin(), chunk);
              ++returned;
            }
          }
        }
      }
      ASSERT_EQ(sent, trip.sent.size());
      ASSERT_EQ(sent, trip.tokens.size());
      ASSERT_EQ(returned, sent);
      for (int64_t t = 0; t < c.sizes(r).tokens; ++t) {
        std::vector<int32_t> ranks, given;
        for (int64_t to = 0; to < c.ranks; ++to) {
          if (!c.chunks_on(r, t, to).empty()) ranks.push_back(static_cast<int32_t>(to));
        }
        for (int64_t i = 0; i < c.sizes(r).most_ranks(); ++i) {
          const auto at = static_cast<size_t>(t * c.sizes(r).most_ranks() + i);
          ASSERT_EQ(trip.rank_of[at] < 0, trip.place_of[at] < 0);
          if (trip.rank_of[at] >= 0) given.push_back(trip.rank_of[at]);
        }
        std::sort(given.begin(), given.end());
        ASSERT_EQ(given, ranks);
      }
    }
  }
}

// A guest by the rank it came from and its token there.
using Guest = std::pair<int64_t, int32_t>;

struct Arrived {
  std::vector<Guest> guests;     // by rank and token
  std::vector<int32_t> choices;  // of these
  std::vector<int64_t> come_from;
  GuestRows rows;
};

Arrived arrive(const Case& c, const std::vector<Trip>& trips, size_t round, int64_t to) {
  Arrived a;
  for (int64_t r = 0; r < c.ranks; ++r) {
    const Trip& trip = trips[static_cast<size_t>(r)];
    const Trip::Round& part = trip.rounds[round];
    auto at = static_cast<size_t>(std::accumulate(part.send.begin(), part.send.begin() + to, part.first));
    a.come_from.push_back(part.send[static_cast<size_t>(to)]);
    for (int64_t n = a.come_from.back(); n > 0; --n, ++at) {
      const int32_t token = trip.tokens[at];
      const auto first = c.choices[static_cast<size_t>(r)].begin() + token * c.top_k;
      a.guests.emplace_back(r, token);
      a.choices.insert(a.choices.end(), first, first + c.top_k);
    }
  }
  TripSizes sizes = c.sizes(0);
  sizes.tokens = static_cast<int64_t>(a.guests.size());
  a.rows = place_guests(sizes, a.choices.data(), a.come_from, to, 1000, threads());
  return a;
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
        const Arrived a = arrive(c, trips, i, to);
        ASSERT_LE(static_cast<int64_t>(a.guests.size()), c.round_rows);
        ASSERT_LE(a.rows.bounds.back(), most);
      }
    }
  }
  EXPECT_TRUE(saw_several);
}

// Where each guest came, as the senders see it: by chunk, then by rank, in the order of `sent`.
std::vector<Guest> came(const Case& c, const std::vector<Trip>& trips, size_t round, int64_t to) {
  std::vector<Guest> list;
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    for (int64_t r = 0; r < c.ranks; ++r) {
      const Trip& trip = trips[static_cast<size_t>(r)];
      const Trip::Round& part = trip.rounds[round];
      auto at = static_cast<size_t>(part.first);
      for (int64_t before = 0; before < chunk; ++before) {
        at += static_cast<size_t>(part.there[static_cast<size_t>(before)].num_sent());
      }
      const Trip::Flow& flow = part.there[static_cast<size_t>(chunk)];
      at += static_cast<size_t>(std::accumulate(flow.send.begin(), flow.send.begin() + to, int64_t{0}));
      for (int64_t n = flow.send[static_cast<size_t>(to)]; n > 0; --n) list.emplace_back(r, trip.sent[at++]);
    }
  }
  return list;
}

TEST(ModelTrip, rows_of_an_expert_do_not_depend_on_chunks_and_are_there_before_it_computes) {
  std::mt19937_64 engine(13);
  for (int round = 0; round < 200; ++round) {
    Case c = random_case(engine);
    SCOPED_TRACE(::testing::Message() << "case " << round);
    const auto trips = trips_of(c);
    Case whole = c;
    whole.chunks = 1;
    const auto whole_trips = trips_of(whole);
    for (size_t i = 0; i < trips[0].rounds.size(); ++i) {
      for (int64_t to = 0; to < c.ranks; ++to) {
        const Arrived a = arrive(c, trips, i, to), w = arrive(whole, whole_trips, i, to);
        const std::vector<Guest> order = came(c, trips, i, to);
        ASSERT_EQ(a.guests, w.guests);
        ASSERT_EQ(a.rows.bounds, w.rows.bounds);
        for (size_t row = 0; row < a.rows.guest_of.size(); ++row) {
          const Guest guest = order[static_cast<size_t>(a.rows.guest_of[row])];
          ASSERT_EQ(guest, w.guests[static_cast<size_t>(w.rows.guest_of[row])]);
          ASSERT_EQ(a.rows.choice_of[row] / c.top_k, a.rows.guest_of[row]);
          const int64_t expert =
              c.choices[static_cast<size_t>(guest.first)]
                       [static_cast<size_t>(guest.second * c.top_k + a.rows.choice_of[row] % c.top_k)];
          const auto local = static_cast<size_t>(expert - to * (c.experts / c.ranks));
          ASSERT_GE(static_cast<int32_t>(row), a.rows.bounds[local]);
          ASSERT_LT(static_cast<int32_t>(row), a.rows.bounds[local + 1]);
        }
        // Chunk by chunk: its rows' guests have come, and whoever leaves has no row in a later one.
        int64_t so_far = 0, left = 0;
        for (const GuestRows::Chunk& chunk : a.rows.chunks) {
          so_far += std::accumulate(chunk.come.begin(), chunk.come.end(), int64_t{0});
          for (int64_t row = chunk.first_row; row < chunk.first_row + chunk.rows; ++row) {
            ASSERT_LT(a.rows.guest_of[static_cast<size_t>(row)], so_far);
          }
          for (const int64_t n : chunk.leave) {
            for (int64_t g = 0; g < n; ++g, ++left) {
              for (int64_t j = 0; j < c.top_k; ++j) {
                const auto at = static_cast<size_t>(left * c.top_k + j);
                if (a.rows.experts[at] < 0) {
                  ASSERT_EQ(a.rows.row_of[at], 1000);
                  continue;
                }
                ASSERT_LT(a.rows.row_of[at], chunk.first_row + chunk.rows);
                ASSERT_EQ(a.rows.guest_of[static_cast<size_t>(a.rows.row_of[at])],
                          a.rows.leaving[static_cast<size_t>(left)]);
              }
            }
          }
        }
        ASSERT_EQ(so_far, static_cast<int64_t>(a.guests.size()));
        ASSERT_EQ(left, so_far);
      }
    }
  }
}

TEST(ModelTrip, guests_stand_by_expert_and_then_as_they_came) {
  //                     rank 1 of 2 has experts 3, 4, 5
  const std::vector<int32_t> choices = {5, 0, 1, 3, 4, 3, 2, 5};
  const GuestRows rows = place_guests({4, 2, 6, 2}, choices.data(), {1, 3}, 1, 9, threads());
  EXPECT_EQ(rows.experts, (std::vector<int32_t>{5, -1, -1, 3, 4, 3, -1, 5}));
  EXPECT_EQ(rows.offsets, (std::vector<int32_t>{0, 2, 3, 5}));
  EXPECT_EQ(rows.guest_of, (std::vector<int32_t>{1, 2, 2, 0, 3}));
  EXPECT_EQ(rows.row_of, (std::vector<int32_t>{3, 9, 9, 0, 2, 1, 9, 4}));
}

TEST(ModelTrip, many_tokens_are_placed_alike_by_one_thread_and_by_several) {
  std::mt19937_64 engine(14);
  const int64_t tokens = 9000, k = 4, experts = 32;
  std::vector<int32_t> choices;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> all(experts);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin() + 1, all.end(), engine);  // the first is there for every token
    choices.insert(choices.end(), all.begin(), all.begin() + k);
  }
  ThreadPool one(1);
  const TripSizes sizes = {tokens, k, experts, 4, 3};
  const GuestRows a = place_guests(sizes, choices.data(), {1000, 0, 7000, 1000}, 0, -1, one),
                  b = place_guests(sizes, choices.data(), {1000, 0, 7000, 1000}, 0, -1, threads());
  EXPECT_EQ(a.guest_of, b.guest_of);
  EXPECT_EQ(a.row_of, b.row_of);
  EXPECT_EQ(a.leaving, b.leaving);
  EXPECT_EQ(a.choice_of, b.choice_of);
  EXPECT_EQ(a.bounds, b.bounds);
  ASSERT_EQ(a.bounds[1], tokens);
  std::vector<int32_t> rows(a.guest_of.begin(), a.guest_of.begin() + tokens);
  std::sort(rows.begin(), rows.end());
  for (int64_t t = 0; t < tokens; ++t) ASSERT_EQ(rows[static_cast<size_t>(t)], t);
}

}  // namespace
}  // namespace fp4t
