#include "engine/model/trip.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

int64_t chunk_begin(const TripSizes& sizes, int64_t chunk) {
  return sizes.local_experts() * chunk / sizes.chunks;
}

// Looked up instead of divided: on a GPU the device stands still for what is decided here.
class ExpertPlaces {
 public:
  struct Place {
    int32_t rank, chunk;
  };
  explicit ExpertPlaces(const TripSizes& sizes) {
    FP4T_CHECK(sizes.chunks >= 1 && sizes.chunks <= sizes.local_experts(), sizes.chunks, " chunks of ",
               sizes.local_experts(), " experts");
    places_.reserve(static_cast<size_t>(sizes.experts));
    for (int64_t r = 0; r < sizes.ranks; ++r) {
      for (int64_t c = 0; c < sizes.chunks; ++c) {
        const int64_t count = chunk_begin(sizes, c + 1) - chunk_begin(sizes, c);
        places_.insert(places_.end(), static_cast<size_t>(count),
                       {static_cast<int32_t>(r), static_cast<int32_t>(c)});
      }
    }
  }
  Place of(int32_t expert) const {
    const auto e = static_cast<size_t>(static_cast<uint32_t>(expert));
    FP4T_CHECK(e < places_.size(), "expert ", expert, " of ", places_.size());
    return places_[e];
  }

 private:
  std::vector<Place> places_;
};

int64_t sum(const std::vector<int64_t>& list) {
  return std::accumulate(list.begin(), list.end(), int64_t{0});
}

// Where the first of each (chunk, rank) stands in a list by chunk and rank, `first` before all of them.
std::vector<int64_t> places_by_chunk(const std::vector<std::vector<int64_t>>& counts, int64_t first) {
  std::vector<int64_t> places;
  for (const std::vector<int64_t>& of_chunk : counts) {
    for (const int64_t n : of_chunk) {
      places.push_back(first);
      first += n;
    }
  }
  return places;
}

}  // namespace

int64_t TripCounts::all_tokens() const { return sum(tokens); }
int64_t Trip::Flow::num_sent() const { return sum(send); }
int64_t Trip::Flow::num_received() const { return sum(receive); }
int64_t Trip::Round::num_sent() const { return sum(send); }
int64_t Trip::Round::num_guests() const { return sum(receive); }

namespace {

// Tokens or guests of one piece of work for a thread: few pieces, as each has counters of its own.
constexpr int64_t kPieceTokens = 2048;

// Calls body(piece, begin, end) for n things, on all threads.
template <class Body>
void for_pieces(ThreadPool& threads, int64_t n, const Body& body) {
  threads.run(ceil_div(n, kPieceTokens), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      body(static_cast<size_t>(i), i * kPieceTokens, std::min(n, (i + 1) * kPieceTokens));
    }
  });
}
size_t num_pieces(int64_t n) { return static_cast<size_t>(ceil_div(n, kPieceTokens)); }

}  // namespace

std::vector<Visit> list_visits(const TripSizes& sizes, const int32_t* choices, ThreadPool& threads) {
  const ExpertPlaces places(sizes);
  std::vector<std::vector<Visit>> pieces(num_pieces(sizes.tokens));
  for_pieces(threads, sizes.tokens, [&](size_t piece, int64_t begin, int64_t end) {
    std::vector<Visit>& list = pieces[piece];
    list.reserve(static_cast<size_t>((end - begin) * sizes.most_ranks()));
    for (int64_t t = begin; t < end; ++t) {
      const size_t first = list.size();
      for (int64_t j = 0; j < sizes.top_k; ++j) {
        const ExpertPlaces::Place place = places.of(choices[t * sizes.top_k + j]);
        // In order of ranks: a token has few.
        auto at = list.end();
        while (at != list.begin() + static_cast<int64_t>(first) && (at - 1)->rank > place.rank) --at;
        if (at != list.begin() + static_cast<int64_t>(first) && (at - 1)->rank == place.rank) {
          Visit& v = *(at - 1);
          ++v.rows;
          v.first_chunk = std::min(v.first_chunk, place.chunk);
          v.last_chunk = std::max(v.last_chunk, place.chunk);
        } else {
          list.insert(at, {static_cast<int32_t>(t), place.rank, 1, place.chunk, place.chunk});
        }
      }
    }
  });
  std::vector<Visit> all;
  for (const std::vector<Visit>& list : pieces) all.insert(all.end(), list.begin(), list.end());
  return all;
}

std::vector<TripCounts> count_trip(const TripSizes& sizes, const std::vector<Visit>& visits) {
  const std::vector<int64_t> none(static_cast<size_t>(sizes.chunks), 0);
  std::vector<TripCounts> counts(static_cast<size_t>(sizes.ranks), TripCounts{0, none});
  for (const Visit& v : visits) {
    TripCounts& of_rank = counts[static_cast<size_t>(v.rank)];
    of_rank.rows += v.rows;
    ++of_rank.tokens[static_cast<size_t>(v.first_chunk)];
  }
  return counts;
}

namespace {

// Puts a round's visits to each rank in their three orders. `used`: ranks that each token has been given.
void arrange(const TripSizes& sizes, const std::vector<Visit>* to_rank, Trip::Round& round, Trip& trip,
             std::vector<int32_t>& used) {
  const auto ranks = static_cast<size_t>(sizes.ranks), chunks = static_cast<size_t>(sizes.chunks);
  round.first = static_cast<int64_t>(trip.tokens.size());
  const std::vector<int64_t> zeros(ranks, 0);
  round.receive = zeros;
  round.there.assign(chunks, {zeros, zeros});
  round.back.assign(chunks, {zeros, zeros});
  for (size_t r = 0; r < ranks; ++r) {
    round.send.push_back(static_cast<int64_t>(to_rank[r].size()));
    for (const Visit& v : to_rank[r]) {
      ++round.there[static_cast<size_t>(v.first_chunk)].send[r];
      ++round.back[static_cast<size_t>(v.last_chunk)].receive[r];
    }
  }
  std::vector<std::vector<int64_t>> going, returning;
  for (size_t c = 0; c < chunks; ++c) {
    going.push_back(round.there[c].send);
    returning.push_back(round.back[c].receive);
  }
  std::vector<int64_t> sent = places_by_chunk(going, round.first),
                       returned = places_by_chunk(returning, round.first);
  const auto next = [&](std::vector<int64_t>& places, int32_t chunk, size_t rank) {
    return static_cast<size_t>(places[static_cast<size_t>(chunk) * ranks + rank]++);
  };
  trip.sent.resize(trip.sent.size() + static_cast<size_t>(round.num_sent()));
  for (size_t r = 0; r < ranks; ++r) {
    for (const Visit& v : to_rank[r]) {
      trip.tokens.push_back(v.token);
      trip.sent[next(sent, v.first_chunk, r)] = v.token;
      const auto place =
          static_cast<size_t>(v.token * sizes.most_ranks() + used[static_cast<size_t>(v.token)]++);
      trip.place_of[place] = static_cast<int32_t>(next(returned, v.last_chunk, r));
      trip.rank_of[place] = static_cast<int32_t>(r);
    }
  }
}

}  // namespace

Trip plan_trip(const TripSizes& sizes, const std::vector<Visit>& visits,
               const std::vector<TripCounts>& counts, int64_t rank, int64_t round_rows) {
  const auto ranks = static_cast<size_t>(sizes.ranks);
  FP4T_CHECK_EQ(counts.size(), ranks * ranks);
  FP4T_CHECK(round_rows >= 1, round_rows, " rows a round");
  // The row of each receiver at which the next of this rank's tokens begins.
  std::vector<int64_t> next(ranks, 0);
  int64_t rounds = 0;
  for (size_t to = 0; to < ranks; ++to) {
    int64_t all = 0;
    for (size_t from = 0; from < ranks; ++from) {
      if (static_cast<int64_t>(from) == rank) next[to] = all;
      all += counts[from * ranks + to].rows;
    }
    rounds = std::max(rounds, ceil_div(all, round_rows));
  }
  // Visits of every (round, rank), in order.
  std::vector<std::vector<Visit>> lists(static_cast<size_t>(rounds) * ranks);
  for (const Visit& v : visits) {
    const auto r = static_cast<size_t>(v.rank);
    const int64_t round = rounds == 1 ? 0 : next[r] / round_rows;
    lists[static_cast<size_t>(round) * ranks + r].push_back(v);
    next[r] += v.rows;
  }
  Trip trip;
  trip.rounds.resize(static_cast<size_t>(rounds));
  trip.place_of.assign(static_cast<size_t>(sizes.tokens * sizes.most_ranks()), -1);
  trip.rank_of.assign(trip.place_of.size(), -1);
  std::vector<int32_t> used(static_cast<size_t>(sizes.tokens), 0);
  for (size_t i = 0; i < trip.rounds.size(); ++i) {
    arrange(sizes, lists.data() + i * ranks, trip.rounds[i], trip, used);
  }
  return trip;
}

namespace {

// Counters of a piece of the guests: how many of its rows each expert has, of its guests each (chunk, rank)
// brings and takes; then where the next of each stands.
struct Counters {
  std::vector<int32_t> rows, come, leave;
};

// Turns the pieces' counts into the places of their firsts; returns where each kind begins, and the end.
std::vector<int32_t> place_pieces(std::vector<Counters>& pieces, std::vector<int32_t> Counters::*list,
                                  size_t kinds) {
  std::vector<int32_t> bounds = {0};
  int32_t next = 0;
  for (size_t kind = 0; kind < kinds; ++kind) {
    for (Counters& piece : pieces) next += std::exchange((piece.*list)[kind], next);
    bounds.push_back(next);
  }
  return bounds;
}

void set_chunks(const TripSizes& sizes, const std::vector<int32_t>& come, const std::vector<int32_t>& leave,
                GuestRows& g) {
  const auto counts = [&](const std::vector<int32_t>& bounds, int64_t chunk) {
    std::vector<int64_t> list;
    for (int64_t i = chunk * sizes.ranks; i < (chunk + 1) * sizes.ranks; ++i) {
      list.push_back(bounds[static_cast<size_t>(i + 1)] - bounds[static_cast<size_t>(i)]);
    }
    return list;
  };
  for (int64_t c = 0; c < sizes.chunks; ++c) {
    GuestRows::Chunk chunk;
    chunk.first_expert = chunk_begin(sizes, c);
    const int64_t end = chunk_begin(sizes, c + 1);
    chunk.experts = end - chunk.first_expert;
    chunk.first_row = g.bounds[static_cast<size_t>(chunk.first_expert)];
    chunk.rows = g.bounds[static_cast<size_t>(end)] - chunk.first_row;
    chunk.come = counts(come, c);
    chunk.leave = counts(leave, c);
    for (int64_t e = chunk.first_expert; e <= end; ++e) {
      g.offsets.push_back(g.bounds[static_cast<size_t>(e)] - static_cast<int32_t>(chunk.first_row));
    }
    g.chunks.push_back(std::move(chunk));
  }
}

// What place_guests is about, and the two passes over the guests of a piece.
class Guests {
 public:
  Guests(const TripSizes& sizes, const int32_t* choices, const std::vector<int64_t>& come_from, int64_t rank)
      : sizes_(sizes),
        choices_(choices),
        rank_(rank),
        places_(sizes),
        chunks_(static_cast<size_t>(sizes.tokens)) {
    for (const int64_t n : come_from) ends_.push_back((ends_.empty() ? 0 : ends_.back()) + n);
    FP4T_CHECK_EQ(ends_.back(), sizes.tokens, "guests");
  }

  void count(int64_t begin, int64_t end, Counters& n) {
    n.rows.assign(static_cast<size_t>(sizes_.local_experts()), 0);
    n.come.assign(static_cast<size_t>(sizes_.chunks * sizes_.ranks), 0);
    n.leave = n.come;
    const int64_t first = rank_ * sizes_.local_experts();
    for_guests(begin, end, [&](int64_t g, size_t from) {
      int32_t first_chunk = static_cast<int32_t>(sizes_.chunks), last_chunk = -1;
      for (int64_t j = 0; j < sizes_.top_k; ++j) {
        const int32_t expert = choices_[g * sizes_.top_k + j];
        const ExpertPlaces::Place place = places_.of(expert);
        if (place.rank != rank_) continue;
        ++n.rows[static_cast<size_t>(expert - first)];
        first_chunk = std::min(first_chunk, place.chunk);
        last_chunk = std::max(last_chunk, place.chunk);
      }
      FP4T_CHECK(last_chunk >= 0, "a token from rank ", from, " without an expert on rank ", rank_);
      chunks_[static_cast<size_t>(g)] = {first_chunk, last_chunk};
      ++n.come[kind(first_chunk, from)];
      ++n.leave[kind(last_chunk, from)];
    });
  }

  void place(int64_t begin, int64_t end, int32_t absent, Counters& next, GuestRows& out) const {
    const int64_t first = rank_ * sizes_.local_experts(), k = sizes_.top_k;
    for_guests(begin, end, [&](int64_t g, size_t from) {
      const Chunks c = chunks_[static_cast<size_t>(g)];
      const int32_t came = next.come[kind(c.first, from)]++, leaves = next.leave[kind(c.last, from)]++;
      out.leaving[static_cast<size_t>(leaves)] = came;
      for (int64_t j = 0; j < k; ++j) {
        const int32_t expert = choices_[g * k + j];
        const auto at = static_cast<size_t>(leaves * k + j);
        const int64_t e = expert - first;
        const bool here = e >= 0 && e < sizes_.local_experts();
        out.experts[at] = here ? expert : -1;
        out.row_of[at] = here ? next.rows[static_cast<size_t>(e)]++ : absent;
        if (!here) continue;
        const auto row = static_cast<size_t>(out.row_of[at]);
        out.guest_of[row] = came;
        out.choice_of[row] = static_cast<int32_t>(came * k + j);
      }
    });
  }

 private:
  struct Chunks {
    int32_t first, last;
  };
  size_t kind(int32_t chunk, size_t from) const {
    return static_cast<size_t>(chunk) * static_cast<size_t>(sizes_.ranks) + from;
  }
  template <class Body>
  void for_guests(int64_t begin, int64_t end, const Body& body) const {
    auto from = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    for (int64_t g = begin; g < end; ++g) {
      while (g >= ends_[from]) ++from;
      body(g, from);
    }
  }

  const TripSizes& sizes_;
  const int32_t* choices_;
  int64_t rank_;
  ExpertPlaces places_;
  std::vector<Chunks> chunks_;
  std::vector<int64_t> ends_;  // of each rank's guests
};

}  // namespace

GuestRows place_guests(const TripSizes& sizes, const int32_t* choices, const std::vector<int64_t>& come_from,
                       int64_t rank, int32_t absent, ThreadPool& threads) {
  Guests guests(sizes, choices, come_from, rank);
  // One piece at least, so that every list has its bounds.
  std::vector<Counters> pieces(std::max<size_t>(num_pieces(sizes.tokens), 1));
  if (sizes.tokens == 0) guests.count(0, 0, pieces[0]);
  for_pieces(threads, sizes.tokens,
             [&](size_t piece, int64_t begin, int64_t end) { guests.count(begin, end, pieces[piece]); });
  const auto kinds = static_cast<size_t>(sizes.chunks * sizes.ranks);
  GuestRows g;
  g.bounds = place_pieces(pieces, &Counters::rows, static_cast<size_t>(sizes.local_experts()));
  const std::vector<int32_t> come = place_pieces(pieces, &Counters::come, kinds),
                             leave = place_pieces(pieces, &Counters::leave, kinds);
  g.experts.resize(static_cast<size_t>(sizes.tokens * sizes.top_k));
  g.row_of.resize(g.experts.size());
  g.leaving.resize(static_cast<size_t>(sizes.tokens));
  g.guest_of.resize(static_cast<size_t>(g.bounds.back()));
  g.choice_of.resize(g.guest_of.size());
  for_pieces(threads, sizes.tokens, [&](size_t piece, int64_t begin, int64_t end) {
    guests.place(begin, end, absent, pieces[piece], g);
  });
  set_chunks(sizes, come, leave, g);
  return g;
}

}  // namespace fp4t
