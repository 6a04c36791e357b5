// What DispatchTokens and PlaceGuests promise: their orders, written down as sorts.
#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "kernels/ops/run.h"
#include "tests/support/dispatch.h"

namespace fp4t::test {
namespace {

using List = std::vector<int32_t>;

struct Case {
  ExpertSplit split;
  int64_t top_k, tokens;
  List choices;
};
std::string text(const Case& c, int number) {
  return detail::concat("case ", number, ": E=", c.split.experts, " X=", c.split.ranks, " n=", c.split.chunks,
                        " k=", c.top_k, " T=", c.tokens);
}

int64_t draw(std::mt19937_64& engine, int64_t from, int64_t to) {
  return from + static_cast<int64_t>(engine() % static_cast<uint64_t>(to - from + 1));
}

Case random_case(std::mt19937_64& engine) {
  Case c;
  c.split.ranks = draw(engine, 1, 5);
  const int64_t local = draw(engine, 1, 6);
  c.split.experts = c.split.ranks * local;
  c.split.chunks = draw(engine, 1, local);
  c.top_k = draw(engine, 1, std::min<int64_t>(c.split.experts, 6));
  c.tokens = draw(engine, 0, 3) == 0 ? draw(engine, 0, 1) : draw(engine, 2, 60);
  c.choices = random_choices(engine, c.tokens, c.top_k, c.split.experts, draw(engine, 0, 2) == 0);
  return c;
}

// By the chunks' bounds, without ExpertSplit::chunk_of.
int64_t chunk_of(const ExpertSplit& split, int64_t expert) {
  const int64_t local = split.experts / split.ranks;
  int64_t chunk = 0;
  while (local * (chunk + 1) / split.chunks <= expert % local) ++chunk;
  return chunk;
}

struct Visit {
  int64_t token, rank, slot, rows = 0, first_row = 0;
  int64_t first_chunk = 1 << 20, last_chunk = -1;
};

// Of all tokens, by token and rank.
std::vector<Visit> visits_of(const Case& c, const std::vector<int64_t>& first_row) {
  std::vector<Visit> visits;
  std::vector<int64_t> next = first_row;
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::map<int64_t, Visit> of_rank;
    for (int64_t j = 0; j < c.top_k; ++j) {
      const int32_t e = c.choices[static_cast<size_t>(t * c.top_k + j)];
      Visit& v = of_rank[e / c.split.local()];
      ++v.rows;
      v.first_chunk = std::min(v.first_chunk, chunk_of(c.split, e));
      v.last_chunk = std::max(v.last_chunk, chunk_of(c.split, e));
    }
    int64_t slot = 0;
    for (auto& [rank, v] : of_rank) {
      v.token = t, v.rank = rank, v.slot = slot++;
      v.first_row = next[static_cast<size_t>(rank)];
      next[static_cast<size_t>(rank)] += v.rows;
      visits.push_back(v);
    }
  }
  return visits;
}

// The same sorted by key(visit), then by token.
template <class Key>
std::vector<Visit> sorted(std::vector<Visit> visits, const Key& key) {
  std::sort(visits.begin(), visits.end(), [&](const Visit& a, const Visit& b) {
    return std::tuple(key(a), a.token) < std::tuple(key(b), b.token);
  });
  return visits;
}
const auto by_rank = [](const Visit& v) { return v.rank; };
const auto by_first_chunk = [](const Visit& v) { return std::pair(v.first_chunk, v.rank); };
const auto by_last_chunk = [](const Visit& v) { return std::pair(v.last_chunk, v.rank); };

// What the lists of a DispatchTokens hold.
struct Lists {
  List rank_of, place_of, asked, sent, counts;
  explicit Lists(const DispatchTensors& t)
      : rank_of(list_of(t.rank_of)),
        place_of(list_of(t.place_of)),
        asked(list_of(t.asked)),
        sent(list_of(t.sent)),
        counts(list_of(t.counts)) {}

  // `listed` of `visits` are written.
  void write(const Case& c, const std::vector<Visit>& visits, const std::vector<Visit>& listed,
             int64_t first) {
    const int64_t most = std::min(c.top_k, c.split.ranks), kinds = c.split.chunks * c.split.ranks;
    const auto slot = [&](const Visit& v) { return static_cast<size_t>(v.token * most + v.slot); };
    List untouched = place_of;
    std::fill(rank_of.begin(), rank_of.end(), -1);
    std::fill(place_of.begin(), place_of.end(), -1);
    std::fill(counts.begin(), counts.end(), 0);
    for (const Visit& v : visits) {
      rank_of[slot(v)] = static_cast<int32_t>(v.rank);
      place_of[slot(v)] = untouched[slot(v)];
    }
    for (const Visit& v : listed) {
      for (int64_t j = 0; j < c.top_k; ++j) {
        const int32_t e = c.choices[static_cast<size_t>(v.token * c.top_k + j)];
        if (e / c.split.local() == v.rank) ++counts[static_cast<size_t>(e)];
      }
      ++counts[static_cast<size_t>(c.split.experts + v.first_chunk * c.split.ranks + v.rank)];
      ++counts[static_cast<size_t>(c.split.experts + kinds + v.last_chunk * c.split.ranks + v.rank)];
    }
    auto at = static_cast<size_t>(first);
    for (const Visit& v : sorted(listed, by_rank)) asked[at++] = static_cast<int32_t>(v.token);
    at = static_cast<size_t>(first);
    for (const Visit& v : sorted(listed, by_first_chunk)) sent[at++] = static_cast<int32_t>(v.token);
    at = static_cast<size_t>(first);
    for (const Visit& v : sorted(listed, by_last_chunk)) place_of[slot(v)] = static_cast<int32_t>(at++);
  }

  void expect_equal(const Lists& got) const {
    EXPECT_EQ(rank_of, got.rank_of);
    EXPECT_EQ(place_of, got.place_of);
    EXPECT_EQ(asked, got.asked);
    EXPECT_EQ(sent, got.sent);
    EXPECT_EQ(counts, got.counts);
  }
};

TEST(Dispatch, chunk_of_is_the_inverse_of_the_chunks_bounds) {
  for (int64_t local = 1; local <= 40; ++local) {
    for (int64_t chunks = 1; chunks <= local; ++chunks) {
      const ExpertSplit split{3 * local, 3, chunks};
      for (int64_t e = 0; e < local; ++e) ASSERT_EQ(split.chunk_of(e), chunk_of(split, e));
    }
  }
}

// body(engine, case, its tensors with the choices in them).
template <class Body>
void for_random_cases(uint64_t seed, const Body& body) {
  std::mt19937_64 engine(seed);
  for (int number = 0; number < 400 && !testing::Test::HasFailure(); ++number) {
    const Case c = random_case(engine);
    SCOPED_TRACE(text(c, number));
    HostPool pool;
    const DispatchTensors t(pool, c.split, c.tokens, c.top_k);
    t.choose(c.choices);
    body(engine, c, t);
  }
}

TEST(Dispatch, visits_stand_in_their_three_orders) {
  Queue queue = Queue::cpu(2);
  for_random_cases(21, [&](std::mt19937_64& engine, const Case& c, const DispatchTensors& t) {
    const std::vector<Visit> visits =
        visits_of(c, std::vector<int64_t>(static_cast<size_t>(c.split.ranks), 0));
    // The lists have room for m visits of every token; `first` takes what these leave.
    const int64_t first = draw(engine, 0, t.asked.elements() - static_cast<int64_t>(visits.size()));
    Lists want(t);
    want.write(c, visits, visits, first);
    run(queue, t.all(first));
    want.expect_equal(Lists(t));
  });
}

TEST(Dispatch, rounds_list_every_visit_once_and_leave_the_others) {
  Queue queue = Queue::cpu(2);
  int several = 0;
  for_random_cases(22, [&](std::mt19937_64& engine, const Case& c, const DispatchTensors& t) {
    std::vector<int64_t> first_row;
    for (int64_t r = 0; r < c.split.ranks; ++r) first_row.push_back(draw(engine, 0, 1) * draw(engine, 0, 50));
    std::copy(first_row.begin(), first_row.end(), t.first_row.as<int64_t>());
    const std::vector<Visit> visits = visits_of(c, first_row);
    const int64_t round_rows = draw(engine, 1, 40);
    size_t listed = 0;
    int rounds = 0;
    Lists want(t);
    for (int64_t begin = 0; begin <= 50 + c.tokens * c.top_k; begin += round_rows) {
      std::vector<Visit> of_round;
      std::copy_if(visits.begin(), visits.end(), std::back_inserter(of_round),
                   [&](const Visit& v) { return v.first_row >= begin && v.first_row < begin + round_rows; });
      want.write(c, visits, of_round, static_cast<int64_t>(listed));
      run(queue, t.window(begin, begin + round_rows, static_cast<int64_t>(listed)));
      want.expect_equal(Lists(t));
      listed += of_round.size();
      rounds += of_round.empty() ? 0 : 1;
    }
    EXPECT_EQ(listed, visits.size());
    several += rounds > 1 ? 1 : 0;
  });
  EXPECT_GT(several, 100);
}

TEST(Dispatch, without_chunks_tokens_are_sent_as_asked_and_a_window_of_all_rows_lists_all) {
  Queue queue = Queue::cpu(1);
  std::mt19937_64 engine(23);
  const ExpertSplit split{12, 3, 1};
  const int64_t tokens = 50, top_k = 4;
  HostPool pool;
  const DispatchTensors t(pool, split, tokens, top_k), w(pool, split, tokens, top_k);
  t.choose(random_choices(engine, tokens, top_k, split.experts, false));
  w.choose(list_of(t.experts));
  std::fill_n(w.first_row.as<int64_t>(), 3, int64_t{7});
  run(queue, t.all(0));
  run(queue, w.window(7, 7 + tokens * top_k, 0));
  EXPECT_EQ(list_of(t.asked), list_of(t.sent));
  Lists(t).expect_equal(Lists(w));
}

// Guests ---------------------------------------------------------------------------------------------------

struct Guests {
  ExpertSplit split;
  int64_t rank, top_k, count;
  List choices, come_from;
  int64_t rows() const { return rows_on(rank, split, choices); }
};

Guests random_guests(std::mt19937_64& engine) {
  Case c = random_case(engine);
  Guests g{c.split, draw(engine, 0, c.split.ranks - 1), c.top_k, c.tokens, std::move(c.choices), {}};
  bring_to(g.rank, g.split, g.top_k, engine, g.choices);
  g.come_from = random_origins(engine, g.count, g.split.ranks);
  return g;
}

// A guest and its visit to this rank: `token` counts guests, `rank` is where it comes from.
std::vector<Visit> stays_of(const Guests& g) {
  std::vector<Visit> stays;
  for (int64_t r = 0; r < g.split.ranks; ++r) {
    for (int64_t n = g.come_from[static_cast<size_t>(r)]; n > 0; --n) {
      Visit v{static_cast<int64_t>(stays.size()), r, 0};
      for (int64_t j = 0; j < g.top_k; ++j) {
        const int32_t e = g.choices[static_cast<size_t>(v.token * g.top_k + j)];
        if (e / g.split.local() != g.rank) continue;
        v.first_chunk = std::min(v.first_chunk, chunk_of(g.split, e));
        v.last_chunk = std::max(v.last_chunk, chunk_of(g.split, e));
      }
      stays.push_back(v);
    }
  }
  return stays;
}

struct Placed {
  List experts, row_of, leaving, guest_of, choice_of, offsets;
  bool operator==(const Placed&) const = default;
};
Placed placed(const GuestTensors& t) {
  return {list_of(t.experts),  list_of(t.row_of),    list_of(t.leaving),
          list_of(t.guest_of), list_of(t.choice_of), list_of(t.offsets)};
}

// Where each guest comes or leaves, by one of the two orders.
template <class Key>
List places_by(const std::vector<Visit>& stays, const Key& key) {
  List places(stays.size());
  int32_t at = 0;
  for (const Visit& v : sorted(stays, key)) places[static_cast<size_t>(v.token)] = at++;
  return places;
}

Placed expected(const Guests& g) {
  const std::vector<Visit> stays = stays_of(g);
  const List came = places_by(stays, by_first_chunk), leaves = places_by(stays, by_last_chunk);
  Placed p;
  p.leaving.resize(came.size());
  p.experts.assign(g.choices.size(), -1);
  p.row_of.assign(g.choices.size(), static_cast<int32_t>(kAbsent));
  std::vector<std::tuple<int32_t, size_t, size_t>> rows;  // expert, guest, which of its choices
  for (size_t i = 0; i < g.choices.size(); ++i) {
    const size_t guest = i / static_cast<size_t>(g.top_k), j = i % static_cast<size_t>(g.top_k);
    p.leaving[static_cast<size_t>(leaves[guest])] = came[guest];
    if (g.choices[i] / g.split.local() == g.rank) rows.emplace_back(g.choices[i], guest, j);
  }
  std::sort(rows.begin(), rows.end());
  for (const auto& [expert, guest, j] : rows) {
    const auto at = static_cast<size_t>(leaves[guest] * g.top_k) + j;
    p.experts[at] = expert;
    p.row_of[at] = static_cast<int32_t>(p.guest_of.size());
    p.guest_of.push_back(came[guest]);
    p.choice_of.push_back(static_cast<int32_t>(came[guest] * g.top_k + static_cast<int64_t>(j)));
  }
  for (int64_t chunk = 0; chunk < g.split.chunks; ++chunk) {
    p.offsets.push_back(0);
    for (int64_t e = 0; e < g.split.local(); ++e) {
      if (chunk_of(g.split, e) != chunk) continue;
      p.offsets.push_back(p.offsets.back() + static_cast<int32_t>(std::count(
                                                 g.choices.begin(), g.choices.end(),
                                                 static_cast<int32_t>(g.rank * g.split.local() + e))));
    }
  }
  return p;
}

Placed place(Queue& queue, const Guests& g, int64_t more_rows = 0) {
  HostPool pool;
  const GuestTensors t(pool, g.split, g.rank, g.count, g.top_k, g.rows() + more_rows);
  t.come(g.choices, g.come_from);
  run(queue, t.place());
  return placed(t);
}

TEST(Dispatch, guests_stand_in_their_orders_and_rows_by_expert) {
  Queue queue = Queue::cpu(2);
  std::mt19937_64 engine(24);
  for (int number = 0; number < 500; ++number) {
    const Guests g = random_guests(engine);
    SCOPED_TRACE(text({g.split, g.top_k, g.count, {}}, number));
    const Placed want = expected(g), got = place(queue, g);
    ASSERT_EQ(want.experts, got.experts);
    ASSERT_EQ(want.row_of, got.row_of);
    ASSERT_EQ(want.leaving, got.leaving);
    ASSERT_EQ(want.guest_of, got.guest_of);
    ASSERT_EQ(want.choice_of, got.choice_of);
    ASSERT_EQ(want.offsets, got.offsets);
  }
}

TEST(Dispatch, guests_stand_by_expert_and_then_as_they_came) {
  Queue queue = Queue::cpu(1);
  //               rank 1 of 2 has experts 3, 4, 5
  const Guests g{{6, 2, 1}, 1, 2, 4, {5, 0, 1, 3, 4, 3, 2, 5}, {1, 3}};
  const Placed got = place(queue, g);
  constexpr int32_t kNone = kAbsent;
  EXPECT_EQ(got.experts, (List{5, -1, -1, 3, 4, 3, -1, 5}));
  EXPECT_EQ(got.offsets, (List{0, 2, 3, 5}));
  EXPECT_EQ(got.guest_of, (List{1, 2, 2, 0, 3}));
  EXPECT_EQ(got.choice_of, (List{3, 5, 4, 0, 7}));
  EXPECT_EQ(got.row_of, (List{3, kNone, kNone, 0, 2, 1, kNone, 4}));
  EXPECT_EQ(got.leaving, (List{0, 1, 2, 3}));
}

// In chunks {3} and {4, 5}: guests 1 and 2 come with the first, and 1 leaves with it.
TEST(Dispatch, guests_come_with_their_first_chunk_and_leave_with_their_last) {
  Queue queue = Queue::cpu(1);
  const Guests g{{6, 2, 2}, 1, 2, 4, {5, 0, 1, 3, 4, 3, 2, 5}, {1, 3}};
  const Placed got = place(queue, g);
  constexpr int32_t kNone = kAbsent;
  EXPECT_EQ(got.leaving, (List{0, 2, 1, 3}));
  EXPECT_EQ(got.experts, (List{-1, 3, 5, -1, 4, 3, -1, 5}));
  EXPECT_EQ(got.offsets, (List{0, 2, 0, 1, 3}));
  EXPECT_EQ(got.guest_of, (List{0, 1, 1, 2, 3}));
  EXPECT_EQ(got.choice_of, (List{1, 3, 2, 4, 7}));
  EXPECT_EQ(got.row_of, (List{kNone, 0, 3, kNone, 2, 1, kNone, 4}));
}

// Who stands in a row, by its number among the guests as they were asked for, and with which choice.
List choices_of_rows(const Guests& g, const Placed& p) {
  const List came = places_by(stays_of(g), by_first_chunk);
  List guest_at(came.size()), rows;
  for (size_t guest = 0; guest < came.size(); ++guest) {
    guest_at[static_cast<size_t>(came[guest])] = static_cast<int32_t>(guest);
  }
  for (size_t row = 0; row < p.guest_of.size(); ++row) {
    EXPECT_EQ(p.choice_of[row] / g.top_k, p.guest_of[row]);
    const int64_t guest = guest_at[static_cast<size_t>(p.guest_of[row])];
    rows.push_back(static_cast<int32_t>(guest * g.top_k + p.choice_of[row] % g.top_k));
  }
  return rows;
}

TEST(Dispatch, rows_of_an_expert_do_not_depend_on_chunks) {
  Queue queue = Queue::cpu(1);
  std::mt19937_64 engine(25);
  for (int number = 0; number < 100; ++number) {
    Guests g = random_guests(engine);
    g.split.chunks = 1;
    const List whole = choices_of_rows(g, place(queue, g));
    for (g.split.chunks = 2; g.split.chunks <= g.split.local(); ++g.split.chunks) {
      ASSERT_EQ(choices_of_rows(g, place(queue, g)), whole) << number << ", chunks " << g.split.chunks;
    }
  }
}

// Refusals -------------------------------------------------------------------------------------------------

TEST(Dispatch, splits_that_are_none_are_refused) {
  HostPool pool;
  const DispatchTensors good(pool, {6, 2, 3}, 5, 2);
  const GuestTensors guests(pool, {6, 2, 3}, 1, 5, 2, 4);
  good.all(0).check();
  guests.place().check();
  for (const ExpertSplit split : {ExpertSplit{6, 2, 4}, {6, 2, 0}, {6, 4, 1}, {6, 0, 1}, {1, 2, 1}}) {
    SCOPED_TRACE(detail::concat("E=", split.experts, " X=", split.ranks, " n=", split.chunks));
    DispatchTokens d = good.all(0);
    d.split = split;
    EXPECT_THROW(d.check(), InternalError);
    PlaceGuests p = guests.place();
    p.split = split;
    EXPECT_THROW(p.check(), InternalError);
  }
}

TEST(Dispatch, tensors_of_other_shapes_are_refused) {
  HostPool pool;
  const TensorView wrong = pool.fresh(DType::kI32, {99}), pairs = pool.fresh(DType::kI32, {4, 2});
  const DispatchTensors t(pool, {6, 2, 3}, 5, 2);
  for (const auto field :
       {&DispatchTokens::experts, &DispatchTokens::rank_of, &DispatchTokens::place_of, &DispatchTokens::asked,
        &DispatchTokens::sent, &DispatchTokens::counts, &DispatchTokens::first_row}) {
    for (const TensorView& other : {wrong, pairs}) {
      DispatchTokens op = t.window(0, 5, 0);
      op.*field = other;
      EXPECT_THROW(op.check(), InternalError);
    }
  }
  const GuestTensors g(pool, {6, 2, 3}, 1, 5, 2, 4);
  for (const auto field :
       {&PlaceGuests::choices, &PlaceGuests::come_from, &PlaceGuests::experts, &PlaceGuests::row_of,
        &PlaceGuests::leaving, &PlaceGuests::guest_of, &PlaceGuests::choice_of, &PlaceGuests::offsets}) {
    for (const TensorView& other : {wrong, pairs}) {
      PlaceGuests op = g.place();
      op.*field = other;
      EXPECT_THROW(op.check(), InternalError);
    }
  }
}

TEST(Dispatch, lists_that_share_memory_are_refused) {
  HostPool pool;
  const DispatchTensors t(pool, {6, 2, 3}, 5, 2);
  DispatchTokens d = t.all(0);
  d.sent = d.asked;
  EXPECT_THROW(d.check(), InternalError);
  d = t.all(0);
  d.place_of = d.experts;
  EXPECT_THROW(d.check(), InternalError);
  const GuestTensors g(pool, {6, 2, 3}, 1, 5, 2, 4);
  PlaceGuests p = g.place();
  p.experts = p.choices;
  EXPECT_THROW(p.check(), InternalError);
  p = g.place();
  p.row_of = p.experts;
  EXPECT_THROW(p.check(), InternalError);

  d = t.window(3, 2, 0);
  EXPECT_THROW(d.check(), InternalError);
  d = t.window(2, 4, 0);
  d.check();
  d.first_row.data = d.counts.data;
  EXPECT_THROW(d.check(), InternalError);
  p = g.place();
  p.choice_of = p.guest_of;
  EXPECT_THROW(p.check(), InternalError);
  p = g.place();
  p.leaving.data = p.choices.data;
  EXPECT_THROW(p.check(), InternalError);
}

TEST(Dispatch, numbers_out_of_range_are_refused) {
  HostPool pool;
  const DispatchTensors t(pool, {6, 2, 3}, 5, 2);
  EXPECT_THROW(t.all(-1).check(), InternalError);
  EXPECT_THROW(t.all(int64_t{1} << 31).check(), InternalError);
  const DispatchTensors more(pool, {6, 2, 3}, 5, 7);  // of six experts
  EXPECT_THROW(more.all(0).check(), InternalError);
  for (const int64_t rank : {-1, 2}) {
    EXPECT_THROW(GuestTensors(pool, {6, 2, 3}, rank, 5, 2, 4).place().check(), InternalError);
  }
}

TEST(Dispatch, an_expert_out_of_range_is_refused) {
  Queue queue = Queue::cpu(1);
  for (const int32_t expert : {-1, 6}) {
    HostPool pool;
    const DispatchTensors t(pool, {6, 2, 3}, 2, 2);
    t.choose({0, 1, 2, expert});
    EXPECT_THROW(run(queue, t.all(0)), InternalError);
    EXPECT_THROW(place(queue, {{6, 2, 3}, 1, 2, 2, {3, 4, 5, expert}, {1, 1}}), InternalError);
  }
}

TEST(Dispatch, guests_that_do_not_fit_are_refused) {
  Queue queue = Queue::cpu(1);
  const Guests good{{6, 2, 3}, 1, 2, 2, {3, 4, 5, 0}, {1, 1}};
  place(queue, good);
  Guests g = good;
  g.choices = {3, 4, 2, 0};  // the second has no expert on rank 1
  EXPECT_THROW(place(queue, g), InternalError);
  for (const List& from : {List{1, 0}, List{2, 1}}) {
    g = good;
    g.come_from = from;
    EXPECT_THROW(place(queue, g), InternalError);
  }
  EXPECT_THROW(place(queue, good, 1), InternalError);
  EXPECT_THROW(place(queue, good, -1), InternalError);
}

}  // namespace
}  // namespace fp4t::test
