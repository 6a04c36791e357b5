#include "engine/model/trip.h"

#include <algorithm>
#include <numeric>

#include "kernels/base/check.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

// Looked up instead of divided: on a GPU the device stands still for what is decided here.
class ExpertRanks {
 public:
  explicit ExpertRanks(const TripSizes& sizes) : top_k_(sizes.top_k) {
    for (int64_t e = 0; e < sizes.experts; ++e) {
      ranks_.push_back(static_cast<int32_t>(e / sizes.local_experts()));
    }
  }
  int32_t of(int32_t expert) const {
    const auto e = static_cast<size_t>(static_cast<uint32_t>(expert));
    FP4T_CHECK(e < ranks_.size(), "expert ", expert, " of ", ranks_.size());
    return ranks_[e];
  }
  // Rows that a token brings to every rank.
  void rows_by_rank(const int32_t* choices, std::vector<int64_t>& rows) const {
    std::fill(rows.begin(), rows.end(), 0);
    for (int64_t j = 0; j < top_k_; ++j) ++rows[static_cast<size_t>(of(choices[j]))];
  }

 private:
  int64_t top_k_;
  std::vector<int32_t> ranks_;
};

int64_t sum(const std::vector<int64_t>& list) {
  return std::accumulate(list.begin(), list.end(), int64_t{0});
}

}  // namespace

int64_t Trip::Round::num_sent() const { return sum(send); }
int64_t Trip::Round::num_guests() const { return sum(receive); }

std::vector<TripCounts> count_trip(const TripSizes& sizes, const int32_t* choices) {
  const ExpertRanks experts(sizes);
  std::vector<TripCounts> counts(static_cast<size_t>(sizes.ranks));
  std::vector<int64_t> rows(static_cast<size_t>(sizes.ranks));
  for (int64_t t = 0; t < sizes.tokens; ++t) {
    experts.rows_by_rank(choices + t * sizes.top_k, rows);
    for (size_t r = 0; r < rows.size(); ++r) {
      counts[r].tokens += rows[r] > 0 ? 1 : 0;
      counts[r].rows += rows[r];
    }
  }
  return counts;
}

Trip plan_trip(const TripSizes& sizes, const int32_t* choices, const std::vector<TripCounts>& counts,
               int64_t rank, int64_t round_rows) {
  const auto ranks = static_cast<size_t>(sizes.ranks);
  FP4T_CHECK_EQ(counts.size(), ranks * ranks);
  FP4T_CHECK(round_rows >= 1, round_rows, " rows a round");
  const ExpertRanks experts(sizes);
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
  Trip trip;
  trip.rounds.resize(static_cast<size_t>(rounds));
  // Tokens of every (round, rank), in order.
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(rounds) * ranks);
  std::vector<int64_t> rows(ranks);
  for (int64_t t = 0; t < sizes.tokens; ++t) {
    experts.rows_by_rank(choices + t * sizes.top_k, rows);
    for (size_t r = 0; r < ranks; ++r) {
      if (rows[r] == 0) continue;
      lists[static_cast<size_t>(next[r] / round_rows) * ranks + r].push_back(static_cast<int32_t>(t));
      next[r] += rows[r];
    }
  }
  trip.place_of.assign(static_cast<size_t>(sizes.tokens) * ranks, -1);
  trip.rank_of.assign(trip.place_of.size(), -1);
  for (size_t i = 0; i < trip.rounds.size(); ++i) {
    Trip::Round& round = trip.rounds[i];
    round.first = static_cast<int64_t>(trip.sent.size());
    round.receive.assign(ranks, 0);
    for (size_t r = 0; r < ranks; ++r) {
      const std::vector<int32_t>& list = lists[i * ranks + r];
      round.send.push_back(static_cast<int64_t>(list.size()));
      for (const int32_t t : list) {
        const size_t place = static_cast<size_t>(t) * ranks + r;
        trip.place_of[place] = static_cast<int32_t>(trip.sent.size());
        trip.rank_of[place] = static_cast<int32_t>(r);
        trip.sent.push_back(t);
      }
    }
  }
  return trip;
}

GuestRows place_guests(const TripSizes& sizes, const int32_t* choices, int64_t rank) {
  const int64_t local = sizes.local_experts(), first = rank * local, n = sizes.tokens * sizes.top_k;
  const ExpertRanks ranks(sizes);
  GuestRows g;
  g.experts.assign(choices, choices + n);
  g.offsets.assign(static_cast<size_t>(local) + 1, 0);
  for (int32_t& expert : g.experts) {
    if (ranks.of(expert) == rank) {
      ++g.offsets[static_cast<size_t>(expert - first) + 1];
    } else {
      expert = -1;
    }
  }
  std::partial_sum(g.offsets.begin(), g.offsets.end(), g.offsets.begin());
  g.row_of.assign(static_cast<size_t>(n), -1);
  g.guest_of.resize(static_cast<size_t>(g.offsets.back()));
  std::vector<int32_t> next(g.offsets.begin(), g.offsets.end() - 1);
  for (size_t i = 0; i < g.experts.size(); ++i) {
    if (g.experts[i] < 0) continue;
    const int32_t row = next[static_cast<size_t>(g.experts[i] - first)]++;
    g.row_of[i] = row;
    g.guest_of[static_cast<size_t>(row)] = static_cast<int32_t>(i) / static_cast<int32_t>(sizes.top_k);
  }
  return g;
}

}  // namespace fp4t
