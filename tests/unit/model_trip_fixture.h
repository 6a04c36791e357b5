// Ranks whose tokens chose each other's experts, and a whole trip of theirs in one process: counted, listed
// round by round, brought.
#pragma once

#include <algorithm>
#include <map>
#include <set>

#include "engine/model/trip.h"
#include "gtest/gtest.h"
#include "kernels/ops/run.h"
#include "tests/support/dispatch.h"

namespace fp4t::test {

using List = std::vector<int32_t>;

struct Case {
  ExpertSplit split;
  int64_t top_k, round_rows;
  std::vector<List> choices;  // by rank
  int64_t tokens(int64_t rank) const {
    return static_cast<int64_t>(choices[static_cast<size_t>(rank)].size()) / top_k;
  }
  const int32_t* chosen(int64_t rank, int64_t token) const {
    return choices[static_cast<size_t>(rank)].data() + token * top_k;
  }
  int64_t chunk_of(int64_t expert) const {  // of those of its rank
    const int64_t local = split.experts / split.ranks, e = expert % local;
    int64_t chunk = 0;
    while (local * (chunk + 1) / split.chunks <= e) ++chunk;
    return chunk;
  }
  // The chunks of a token's experts on a rank.
  std::set<int64_t> chunks_on(int64_t from, int64_t token, int64_t rank) const {
    std::set<int64_t> list;
    for (int64_t j = 0; j < top_k; ++j) {
      const int32_t e = chosen(from, token)[j];
      if (e / split.local() == rank) list.insert(chunk_of(e));
    }
    return list;
  }
};

// Uneven numbers of tokens, none on some ranks; a third of the cases is lopsided.
inline Case random_case(std::mt19937_64& engine) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); };
  Case c;
  c.split.ranks = 1 + below(5);
  const int64_t local = 1 + below(5);
  c.split.experts = c.split.ranks * local;
  c.split.chunks = 1 + below(local);
  c.top_k = 1 + below(std::min<int64_t>(c.split.experts, 5));
  c.round_rows = 1 + below(60);
  const bool lopsided = below(3) == 0;
  for (int64_t r = 0; r < c.split.ranks; ++r) {
    const int64_t tokens = below(4) == 0 ? 0 : below(40);
    c.choices.push_back(random_choices(engine, tokens, c.top_k, c.split.experts, lopsided));
  }
  return c;
}

// The tensors of every rank, and what all of them do together.
class Ranks {
 public:
  explicit Ranks(const Case& c) : case_(c) {
    for (int64_t r = 0; r < c.split.ranks; ++r) {
      tensors_.emplace_back(pool_, c.split, c.tokens(r), c.top_k);
      tensors_.back().choose(c.choices[static_cast<size_t>(r)]);
    }
  }
  const DispatchTensors& of(int64_t rank) const { return tensors_[static_cast<size_t>(rank)]; }

  // Of all visits.
  TripCounts count() {
    return gather([](int64_t, const DispatchTensors& t) { return t.all(0); });
  }
  // Of those of a window.
  TripCounts count(int64_t begin, const std::vector<std::vector<int64_t>>& first_row,
                   const std::vector<int64_t>& first) {
    return gather([&](int64_t rank, const DispatchTensors& t) {
      const auto r = static_cast<size_t>(rank);
      std::copy(first_row[r].begin(), first_row[r].end(), t.first_row.as<int64_t>());
      return t.window(begin, begin + case_.round_rows, first[r]);
    });
  }

 private:
  template <class Make>
  TripCounts gather(const Make& make) {
    List counts;
    for (int64_t r = 0; r < case_.split.ranks; ++r) {
      run(queue_, make(r, of(r)));
      const List mine = list_of(of(r).counts);
      counts.insert(counts.end(), mine.begin(), mine.end());
    }
    return {case_.split, std::move(counts)};
  }

  const Case& case_;
  Queue queue_ = Queue::cpu(1);
  HostPool pool_;
  std::vector<DispatchTensors> tensors_;
};

// A token that is sent, as its rank lists it.
struct Sent {
  int64_t rank;
  int32_t token;
  bool operator==(const Sent&) const = default;
  auto operator<=>(const Sent&) const = default;
};

// A whole trip of all ranks: counted, then listed round by round.
struct World {
  explicit World(const Case& of) : c(of), ranks(c) {
    const TripCounts all = Ranks(c).count();
    const int64_t rounds = num_rounds(all, c.round_rows);
    std::vector<std::vector<int64_t>> first_row;
    for (int64_t r = 0; r < c.split.ranks; ++r) first_row.push_back(first_rows(all, r));
    trips.resize(static_cast<size_t>(c.split.ranks));
    std::vector<int64_t> first(trips.size(), 0);
    for (int64_t i = 0; i < rounds; ++i) {
      counts.push_back(ranks.count(i * c.round_rows, first_row, first));
      for (size_t r = 0; r < trips.size(); ++r) {
        trips[r].push_back(plan_round(counts.back(), static_cast<int64_t>(r), first[r]));
        first[r] += trips[r].back().num_sent();
      }
    }
  }
  size_t num_rounds_of_all() const { return trips[0].size(); }
  const Trip::Round& part(int64_t rank, size_t round) const {
    return trips[static_cast<size_t>(rank)][round];
  }
  int32_t asked(int64_t rank, int64_t at) const { return ranks.of(rank).asked.as<int32_t>()[at]; }
  int32_t sent(int64_t rank, int64_t at) const { return ranks.of(rank).sent.as<int32_t>()[at]; }

  // Whose choices `to` gets in a round: by rank, in the order of `asked`.
  std::vector<Sent> asking(size_t round, int64_t to) const {
    std::vector<Sent> list;
    for (int64_t r = 0; r < c.split.ranks; ++r) {
      int64_t at = part(r, round).first;
      for (int64_t other = 0; other < to; ++other) at += part(r, round).send[static_cast<size_t>(other)];
      for (int64_t n = part(r, round).send[static_cast<size_t>(to)]; n > 0; --n) {
        list.push_back({r, asked(r, at++)});
      }
    }
    return list;
  }

  // Who comes there, chunk by chunk and rank by rank, in the order of `sent`.
  std::vector<Sent> coming(size_t round, int64_t to) const {
    std::vector<Sent> list;
    for (int64_t chunk = 0; chunk < c.split.chunks; ++chunk) {
      for (int64_t r = 0; r < c.split.ranks; ++r) {
        const auto flow = [&](int64_t n) -> const Trip::Flow& {
          return part(r, round).there[static_cast<size_t>(n)];
        };
        int64_t at = part(r, round).first;
        for (int64_t before = 0; before < chunk; ++before) at += flow(before).num_sent();
        for (int64_t other = 0; other < to; ++other) at += flow(chunk).send[static_cast<size_t>(other)];
        for (int64_t n = flow(chunk).send[static_cast<size_t>(to)]; n > 0; --n)
          list.push_back({r, sent(r, at++)});
      }
    }
    return list;
  }

  // Whose sum this rank puts into each place that returns; once each.
  std::map<int32_t, std::pair<int32_t, int32_t>> places(int64_t rank) const {
    std::map<int32_t, std::pair<int32_t, int32_t>> list;  // place: token and rank
    const DispatchTensors& t = ranks.of(rank);
    const auto most = c.split.visits_of_token(c.top_k);
    for (int64_t at = 0; at < t.place_of.elements(); ++at) {
      const int32_t place = t.place_of.as<int32_t>()[at], from = t.rank_of.as<int32_t>()[at];
      EXPECT_EQ(place < 0, from < 0);
      if (place < 0) continue;
      EXPECT_TRUE(list.emplace(place, std::pair(static_cast<int32_t>(at / most), from)).second)
          << "two sums in one place";
    }
    return list;
  }

  const Case c;
  Ranks ranks;
  std::vector<TripCounts> counts;               // by round
  std::vector<std::vector<Trip::Round>> trips;  // by rank, round
};

// Places guests that came to `to` in a round.
struct Arrived {
  Arrived(const World& w, size_t round, int64_t to)
      : part(w.part(to, round)),
        guests(w.asking(round, to)),
        tensors(pool, w.c.split, to, static_cast<int64_t>(guests.size()), w.c.top_k, part.num_rows()) {
    List choices;
    for (const Sent& s : guests) {
      const int32_t* chosen = w.c.chosen(s.rank, s.token);
      choices.insert(choices.end(), chosen, chosen + w.c.top_k);
    }
    tensors.come(choices, {part.receive.begin(), part.receive.end()});
    Queue queue = Queue::cpu(1);
    run(queue, tensors.place());
  }
  int32_t guest_of(int64_t row) const { return tensors.guest_of.as<int32_t>()[row]; }
  int32_t choice_of(int64_t row) const { return tensors.choice_of.as<int32_t>()[row]; }
  int32_t leaving(int64_t at) const { return tensors.leaving.as<int32_t>()[at]; }

  const Trip::Round& part;
  std::vector<Sent> guests;  // by rank and token
  HostPool pool;
  GuestTensors tensors;
};

}  // namespace fp4t::test
