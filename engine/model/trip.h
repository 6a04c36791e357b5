// Where tokens travel when experts lie on several ranks (engine/comm/README.md, "Experts over ranks"): what
// follows from the counts that DispatchTokens makes of the visits of every rank (kernels/ops/dispatch.h).
//
// A receiver takes its rows in rounds of a bounded size. Its tokens stand in one order, by rank and then by
// token; the round of a token is that of its first row.
//
// Within a round, ranks cut their experts into chunks, and tokens travel chunk by chunk: a token comes with
// the first chunk that has any of its experts, and its sum leaves with the last. Which rows an expert gets,
// and in which order, does not depend on the chunks, nor does any bit of what it makes of them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/ops/dispatch.h"

namespace fp4t {

// DispatchTokens::counts of all ranks, [X][E + 2 n X].
class TripCounts {
 public:
  TripCounts(const ExpertSplit& split, std::vector<int32_t> counts);
  const ExpertSplit& split() const { return split_; }
  int64_t rows_of(int64_t from, int64_t expert) const { return at(from, expert); }
  int64_t rows(int64_t from, int64_t to) const;
  int64_t coming(int64_t from, int64_t chunk, int64_t to) const {
    return at(from, split_.experts + chunk * split_.ranks + to);
  }
  int64_t leaving(int64_t from, int64_t chunk, int64_t to) const {
    return at(from, split_.experts + (split_.chunks + chunk) * split_.ranks + to);
  }
  int64_t tokens(int64_t from, int64_t to) const;  // of all chunks
  // That go to a rank other than their own.
  int64_t travelling() const;
  // What they are where experts are not cut into chunks.
  TripCounts in_one_chunk() const;

 private:
  int64_t at(int64_t from, int64_t i) const {
    return counts_[static_cast<size_t>(from * split_.num_counts() + i)];
  }
  ExpertSplit split_;
  std::vector<int32_t> counts_;
};

// A rank's own part of a trip.
struct Trip {
  // What goes one way with a chunk: tokens to and from every rank.
  struct Flow {
    std::vector<int64_t> send, receive;
    int64_t num_sent() const;
    int64_t num_received() const;
  };
  // A chunk of this rank's experts and of what they serve.
  struct Chunk {
    int64_t index;
    int64_t first_expert, experts;
    int64_t first_row, rows;
    int64_t first_came, came;        // guests that come with it, in the order in which they come
    int64_t first_leaving, leaving;  // that leave with it, in the order in which they leave
  };
  struct Round {
    std::vector<int64_t> send, receive;  // tokens to and from every rank, of all chunks
    std::vector<Flow> there, back;       // by chunk: rows to experts, sums from them
    std::vector<Chunk> chunks;
    std::vector<int32_t> bounds;  // [L + 1]: the guests' rows by expert
    int64_t first = 0;            // of those sent, in the lists of DispatchTokens and what returns
    int64_t num_sent() const;
    int64_t num_guests() const;
    int64_t num_rows() const { return bounds.back(); }
  };
  ExpertSplit split{};
  std::vector<Round> rounds;  // as many on every rank
};

// Rounds that receivers need for these visits, of `round_rows` rows; 0 where nobody sends anything.
int64_t num_rounds(const TripCounts& counts, int64_t round_rows);
// The row of every receiver at which this rank's tokens begin.
std::vector<int64_t> first_rows(const TripCounts& counts, int64_t rank);
// This rank's part of the round that has these visits; `first`: tokens that it has sent in those before.
Trip::Round plan_round(const TripCounts& counts, int64_t rank, int64_t first);

}  // namespace fp4t
