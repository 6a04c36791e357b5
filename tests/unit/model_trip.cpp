// Where tokens travel when experts lie on several ranks: all of them, once a rank, never more rows a round
// than fit; what ranks decide alone fits together.
#include "engine/model/trip.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/unit/model_trip_fixture.h"

namespace fp4t::test {
namespace {

// body(case) for random ones, until one fails.
template <class Body>
void for_cases(uint64_t seed, const Body& body) {
  std::mt19937_64 engine(seed);
  for (int number = 0; number < 200 && !testing::Test::HasFailure(); ++number) {
    const Case c = random_case(engine);
    SCOPED_TRACE(detail::concat("case ", number, ": E=", c.split.experts, " X=", c.split.ranks,
                                " n=", c.split.chunks, " k=", c.top_k, " R=", c.round_rows));
    body(c);
  }
}

// What goes with a chunk are tokens whose first chunk there it is.
void expect_sent_in_order(const World& w, int64_t rank) {
  std::set<std::pair<int32_t, int64_t>> visits;  // token, rank
  int64_t sent = 0;
  for (size_t i = 0; i < w.num_rounds_of_all(); ++i) {
    const Trip::Round& part = w.part(rank, i);
    ASSERT_EQ(part.first, sent);
    for (int64_t chunk = 0; chunk < w.c.split.chunks; ++chunk) {
      for (int64_t to = 0; to < w.c.split.ranks; ++to) {
        for (int64_t n = part.there[static_cast<size_t>(chunk)].send[static_cast<size_t>(to)]; n > 0; --n) {
          const int32_t token = w.sent(rank, sent++);
          ASSERT_TRUE(visits.emplace(token, to).second) << "token " << token << " twice to " << to;
          const auto chunks = w.c.chunks_on(rank, token, to);
          ASSERT_FALSE(chunks.empty());
          ASSERT_EQ(*chunks.begin(), chunk);
        }
      }
    }
    ASSERT_EQ(sent, part.first + part.num_sent());
  }
  for (int64_t t = 0; t < w.c.tokens(rank); ++t) {
    for (int64_t to = 0; to < w.c.split.ranks; ++to) {
      ASSERT_EQ(visits.count({static_cast<int32_t>(t), to}), w.c.chunks_on(rank, t, to).empty() ? 0u : 1u);
    }
  }
}

// What returns with a chunk are sums of tokens whose last chunk there it is.
void expect_returned_in_order(const World& w, int64_t rank) {
  const auto places = w.places(rank);
  int32_t returned = 0;
  for (size_t i = 0; i < w.num_rounds_of_all(); ++i) {
    for (int64_t chunk = 0; chunk < w.c.split.chunks; ++chunk) {
      const Trip::Flow& back = w.part(rank, i).back[static_cast<size_t>(chunk)];
      for (int64_t from = 0; from < w.c.split.ranks; ++from) {
        for (int64_t n = back.receive[static_cast<size_t>(from)]; n > 0; --n) {
          const auto place = places.find(returned++);
          ASSERT_NE(place, places.end());
          ASSERT_EQ(place->second.second, from);
          ASSERT_EQ(*w.c.chunks_on(rank, place->second.first, from).rbegin(), chunk);
        }
      }
    }
  }
  ASSERT_EQ(static_cast<size_t>(returned), places.size());
}

TEST(ModelTrip, every_token_goes_once_to_every_rank_that_has_an_expert_of_it) {
  for_cases(11, [](const Case& c) {
    const World w(c);
    for (int64_t r = 0; r < c.split.ranks; ++r) expect_sent_in_order(w, r);
  });
}

TEST(ModelTrip, sums_return_with_the_last_chunk) {
  for_cases(12, [](const Case& c) {
    const World w(c);
    for (int64_t r = 0; r < c.split.ranks; ++r) expect_returned_in_order(w, r);
  });
}

TEST(ModelTrip, ranks_of_a_token_are_those_of_its_experts) {
  for_cases(13, [](const Case& c) {
    const World w(c);
    const int64_t most = c.split.visits_of_token(c.top_k);
    for (int64_t r = 0; w.num_rounds_of_all() > 0 && r < c.split.ranks; ++r) {
      for (int64_t t = 0; t < c.tokens(r); ++t) {
        List want;
        for (int64_t to = 0; to < c.split.ranks; ++to) {
          if (!c.chunks_on(r, t, to).empty()) want.push_back(static_cast<int32_t>(to));
        }
        want.resize(static_cast<size_t>(most), -1);
        ASSERT_EQ(list_of(w.ranks.of(r).rank_of.rows(t, 1)), want);
      }
    }
  });
}

TEST(ModelTrip, a_round_brings_no_more_rows_than_fit) {
  int several = 0;
  for_cases(14, [&](const Case& c) {
    const World w(c);
    const int64_t most = c.round_rows + std::min(c.top_k, c.split.local()) - 1;
    several += w.num_rounds_of_all() > 1 ? 1 : 0;
    int64_t tokens = 0, guests = 0, rows = 0;
    for (int64_t r = 0; r < c.split.ranks; ++r) tokens += c.tokens(r);
    for (size_t i = 0; i < w.num_rounds_of_all(); ++i) {
      for (int64_t to = 0; to < c.split.ranks; ++to) {
        const Trip::Round& part = w.part(to, i);
        ASSERT_EQ(part.num_guests(), static_cast<int64_t>(w.asking(i, to).size()));
        ASSERT_LE(part.num_guests(), c.round_rows);
        ASSERT_LE(part.num_rows(), most);
        guests += part.num_guests();
        rows += part.num_rows();
      }
    }
    ASSERT_EQ(rows, tokens * c.top_k);
    ASSERT_GE(guests, tokens);
    ASSERT_EQ(w.num_rounds_of_all() == 0, tokens == 0);
  });
  EXPECT_GT(several, 50);
}

// Chunk by chunk: its rows' guests have come, and whoever leaves has no row in a later one.
void expect_chunks_in_time(const Arrived& a, int64_t top_k) {
  int64_t came = 0, left = 0, row = 0;
  for (const Trip::Chunk& chunk : a.part.chunks) {
    ASSERT_EQ(chunk.first_came, came);
    ASSERT_EQ(chunk.first_leaving, left);
    ASSERT_EQ(chunk.first_row, row);
    came += chunk.came;
    for (; row < chunk.first_row + chunk.rows; ++row) ASSERT_LT(a.guest_of(row), came);
    for (; left < chunk.first_leaving + chunk.leaving; ++left) {
      for (int64_t at = left * top_k; at < (left + 1) * top_k; ++at) {
        const int32_t its = a.tensors.row_of.as<int32_t>()[at];
        if (a.tensors.experts.as<int32_t>()[at] < 0) {
          ASSERT_EQ(its, kAbsent);
          continue;
        }
        ASSERT_LT(its, chunk.first_row + chunk.rows);
        ASSERT_EQ(a.guest_of(its), a.leaving(left));
      }
    }
  }
  ASSERT_EQ(came, a.part.num_guests());
  ASSERT_EQ(left, came);
  ASSERT_EQ(row, a.part.num_rows());
}

// Every row is that of its expert, and of the choice that it names.
void expect_rows_of_their_experts(const World& w, const Arrived& a, size_t round, int64_t to) {
  const std::vector<Sent> came = w.coming(round, to);
  for (int64_t row = 0; row < a.part.num_rows(); ++row) {
    const Sent& guest = came[static_cast<size_t>(a.guest_of(row))];
    ASSERT_EQ(a.choice_of(row) / w.c.top_k, a.guest_of(row));
    const int64_t e =
        w.c.chosen(guest.rank, guest.token)[a.choice_of(row) % w.c.top_k] - to * w.c.split.local();
    ASSERT_GE(e, 0);
    ASSERT_LT(e, w.c.split.local());
    ASSERT_GE(row, a.part.bounds[static_cast<size_t>(e)]);
    ASSERT_LT(row, a.part.bounds[static_cast<size_t>(e + 1)]);
  }
  const int32_t* offset = a.tensors.offsets.as<int32_t>();
  for (const Trip::Chunk& chunk : a.part.chunks) {
    for (int64_t e = chunk.first_expert; e <= chunk.first_expert + chunk.experts; ++e) {
      ASSERT_EQ(*offset++, a.part.bounds[static_cast<size_t>(e)] - chunk.first_row);
    }
  }
}

TEST(ModelTrip, rows_are_of_their_experts_and_there_before_these_compute) {
  for_cases(15, [](const Case& c) {
    const World w(c);
    for (size_t i = 0; i < w.num_rounds_of_all(); ++i) {
      for (int64_t to = 0; to < c.split.ranks; ++to) {
        const Arrived a(w, i, to);
        expect_rows_of_their_experts(w, a, i, to);
        expect_chunks_in_time(a, c.top_k);
      }
    }
  });
}

TEST(ModelTrip, rows_of_an_expert_do_not_depend_on_chunks) {
  for_cases(16, [](const Case& c) {
    Case whole = c;
    whole.split.chunks = 1;
    const World w(c), one(whole);
    ASSERT_EQ(w.num_rounds_of_all(), one.num_rounds_of_all());
    for (size_t i = 0; i < w.num_rounds_of_all(); ++i) {
      for (int64_t to = 0; to < c.split.ranks; ++to) {
        const Arrived a(w, i, to), b(one, i, to);
        ASSERT_EQ(a.guests, b.guests);
        ASSERT_EQ(a.part.bounds, b.part.bounds);
        const std::vector<Sent> came = w.coming(i, to), came_in_one = one.coming(i, to);
        ASSERT_EQ(came_in_one, b.guests);
        for (int64_t row = 0; row < a.part.num_rows(); ++row) {
          ASSERT_EQ(came[static_cast<size_t>(a.guest_of(row))],
                    b.guests[static_cast<size_t>(b.guest_of(row))]);
        }
      }
    }
  });
}

// Both ends of every flow name the same number.
void expect_same_at_both_ends(const World& w, size_t round) {
  for (int64_t from = 0; from < w.c.split.ranks; ++from) {
    for (int64_t to = 0; to < w.c.split.ranks; ++to) {
      const Trip::Round &a = w.part(from, round), &b = w.part(to, round);
      const auto f = static_cast<size_t>(from), t = static_cast<size_t>(to);
      ASSERT_EQ(a.send[t], b.receive[f]);
      int64_t there = 0, back = 0;
      for (size_t chunk = 0; chunk < a.there.size(); ++chunk) {
        ASSERT_EQ(a.there[chunk].send[t], b.there[chunk].receive[f]);
        ASSERT_EQ(a.back[chunk].send[t], b.back[chunk].receive[f]);
        there += a.there[chunk].send[t];
        back += b.back[chunk].send[f];
      }
      ASSERT_EQ(there, a.send[t]);
      ASSERT_EQ(back, a.send[t]);
    }
  }
}

// Sums that leave `from` go to the places in which their tokens expect them.
void expect_sums_find_their_tokens(const World& w, const Arrived& a, size_t round, int64_t from) {
  const std::vector<Sent> came = w.coming(round, from);
  int64_t left = 0;
  for (int64_t chunk = 0; chunk < w.c.split.chunks; ++chunk) {
    for (int64_t to = 0; to < w.c.split.ranks; ++to) {
      const auto places = w.places(to);
      int64_t place = w.part(to, round).first;
      const auto flow = [&](int64_t n) -> const Trip::Flow& {
        return w.part(to, round).back[static_cast<size_t>(n)];
      };
      for (int64_t before = 0; before < chunk; ++before) place += flow(before).num_received();
      for (int64_t r = 0; r < from; ++r) place += flow(chunk).receive[static_cast<size_t>(r)];
      for (int64_t n = flow(chunk).receive[static_cast<size_t>(from)]; n > 0; --n) {
        const Sent& guest = came[static_cast<size_t>(a.leaving(left++))];
        ASSERT_EQ(guest.rank, to);
        ASSERT_EQ(places.at(static_cast<int32_t>(place++)),
                  std::pair(guest.token, static_cast<int32_t>(from)));
      }
    }
  }
  ASSERT_EQ(left, a.part.num_guests());
}

TEST(ModelTrip, what_senders_and_receivers_list_fits_together) {
  for_cases(17, [](const Case& c) {
    const World w(c);
    for (size_t i = 0; i < w.num_rounds_of_all(); ++i) {
      expect_same_at_both_ends(w, i);
      for (int64_t to = 0; to < c.split.ranks; ++to) {
        std::vector<Sent> asked = w.asking(i, to), came = w.coming(i, to);
        ASSERT_TRUE(std::is_sorted(asked.begin(), asked.end()));
        std::sort(came.begin(), came.end());
        ASSERT_EQ(came, asked);
        expect_sums_find_their_tokens(w, Arrived(w, i, to), i, to);
      }
    }
  });
}

void expect_equal(const TripCounts& a, const TripCounts& b) {
  const ExpertSplit &s = a.split(), &t = b.split();
  ASSERT_EQ(std::tuple(s.experts, s.ranks, s.chunks), std::tuple(t.experts, t.ranks, t.chunks));
  for (int64_t from = 0; from < s.ranks; ++from) {
    for (int64_t e = 0; e < s.experts; ++e) ASSERT_EQ(a.rows_of(from, e), b.rows_of(from, e));
    for (int64_t to = 0; to < s.ranks; ++to) {
      for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
        ASSERT_EQ(a.coming(from, chunk, to), b.coming(from, chunk, to));
        ASSERT_EQ(a.leaving(from, chunk, to), b.leaving(from, chunk, to));
      }
    }
  }
}

TEST(ModelTrip, counts_in_one_chunk_are_those_of_tokens_without_chunks) {
  for_cases(18, [](const Case& c) {
    Case whole = c;
    whole.split.chunks = 1;
    expect_equal(Ranks(c).count().in_one_chunk(), Ranks(whole).count());
    const World w(c), one(whole);
    for (size_t i = 0; i < w.num_rounds_of_all(); ++i)
      expect_equal(w.counts[i].in_one_chunk(), one.counts[i]);
  });
}

TEST(ModelTrip, one_round_is_counted_as_the_whole_trip) {
  for_cases(19, [](const Case& some) {
    Case c = some;
    c.round_rows = 1000;  // 5 ranks, 39 tokens, 5 experts of each
    const World w(c);
    ASSERT_LE(w.num_rounds_of_all(), 1u);
    if (w.num_rounds_of_all() == 1) expect_equal(w.counts[0], Ranks(c).count());
  });
}

// Two ranks of two experts each. Rank 0: {0, 1}, {1, 2}, {3, 2}; rank 1: {0, 3}.
TEST(ModelTrip, counts_of_four_tokens) {
  const Case c{{4, 2, 2}, 2, 3, {{0, 1, 1, 2, 3, 2}, {0, 3}}};
  const TripCounts counts = Ranks(c).count();
  EXPECT_EQ(counts.rows(0, 0), 3);
  EXPECT_EQ(counts.rows(0, 1), 3);
  EXPECT_EQ(counts.rows(1, 0), 1);
  EXPECT_EQ(counts.rows_of(0, 2), 2);
  EXPECT_EQ(counts.tokens(0, 0), 2);
  EXPECT_EQ(counts.tokens(0, 1), 2);
  EXPECT_EQ(counts.coming(0, 0, 0), 1);   // {0, 1}
  EXPECT_EQ(counts.leaving(0, 0, 1), 1);  // {1, 2}
  EXPECT_EQ(counts.leaving(0, 1, 0), 2);
  EXPECT_EQ(counts.travelling(), 3);
  EXPECT_EQ(num_rounds(counts, 3), 2);
  EXPECT_EQ(num_rounds(counts, 4), 1);
  EXPECT_EQ(first_rows(counts, 0), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(first_rows(counts, 1), (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(num_rounds(Ranks({{4, 2, 2}, 2, 3, {{}, {}}}).count(), 3), 0);
  EXPECT_THROW(num_rounds(counts, 0), InternalError);
  EXPECT_THROW(TripCounts({4, 2, 2}, List(23)), InternalError);
}

}  // namespace
}  // namespace fp4t::test
