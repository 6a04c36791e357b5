// Where tokens travel when experts lie on several ranks (engine/comm/README.md, "Experts over ranks"): pure
// functions of what the tokens chose. X ranks share E experts, L = E / X consecutive ones each; a token goes
// once to every rank that has any of its experts, and brings as many rows there as it chose of them.
//
// A receiver takes its rows in rounds of a bounded size. Its tokens stand in one order, by rank and then by
// token; the round of a token is that of its first row.
#pragma once

#include <cstdint>
#include <vector>

namespace fp4t {

// What one rank has for another.
struct TripCounts {
  int64_t tokens = 0, rows = 0;
};

struct TripSizes {
  int64_t tokens, top_k, experts, ranks;
  int64_t local_experts() const { return experts / ranks; }
};

// For each rank; `choices` [tokens, top_k] are experts.
std::vector<TripCounts> count_trip(const TripSizes& sizes, const int32_t* choices);

// A rank's own part of a trip.
struct Trip {
  struct Round {
    std::vector<int64_t> send, receive;  // tokens to and from every rank
    int64_t first = 0;                   // of those sent, in the order of `sent`
    int64_t num_sent() const;
    int64_t num_guests() const;
  };
  std::vector<Round> rounds;  // as many on every rank; `receive` is filled by what the others say
  std::vector<int32_t> sent;  // tokens in the order in which they go: by round, by rank, by token
  std::vector<int32_t>
      place_of;                  // [tokens, ranks] in `sent`, -1 where a rank has none of the token's experts
  std::vector<int32_t> rank_of;  // [tokens, ranks]: the rank, or -1
};

// `counts` [from * ranks + to] of all ranks, `rank` this one, `round_rows` what a receiver takes in a round.
Trip plan_trip(const TripSizes& sizes, const int32_t* choices, const std::vector<TripCounts>& counts,
               int64_t rank, int64_t round_rows);

// Rows of the tokens that came, sorted by this rank's experts, then by the order in which they came.
struct GuestRows {
  std::vector<int32_t> experts;   // [guests, top_k]: as chosen, -1 where another rank has the expert
  std::vector<int32_t> row_of;    // [guests, top_k], -1 likewise
  std::vector<int32_t> offsets;   // [L + 1]
  std::vector<int32_t> guest_of;  // of each row
};
// `sizes.tokens`: the guests.
GuestRows place_guests(const TripSizes& sizes, const int32_t* choices, int64_t rank);

}  // namespace fp4t
