// Where tokens travel when experts lie on several ranks (engine/comm/README.md, "Experts over ranks"): pure
// functions of what the tokens chose. X ranks share E experts, L = E / X consecutive ones each; a token goes
// once to every rank that has any of its experts, and brings as many rows there as it chose of them.
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

#include "kernels/base/threads.h"

namespace fp4t {

struct TripSizes {
  int64_t tokens, top_k, experts, ranks;
  int64_t chunks = 1;  // of each rank's experts; at most L
  int64_t local_experts() const { return experts / ranks; }
  // That a token can go to.
  int64_t most_ranks() const { return top_k < ranks ? top_k : ranks; }
};

// A token and a rank that has any of its experts: how many, the chunks with which it comes there and its sum
// leaves.
struct Visit {
  int32_t token, rank, rows, first_chunk, last_chunk;
};
// Of all tokens, by token and rank; `choices` [tokens, top_k] are experts.
std::vector<Visit> list_visits(const TripSizes& sizes, const int32_t* choices, ThreadPool& threads);

// What one rank has for another.
struct TripCounts {
  int64_t rows = 0;
  std::vector<int64_t> tokens;  // by the chunk with which they come
  int64_t all_tokens() const;
};

// For each rank.
std::vector<TripCounts> count_trip(const TripSizes& sizes, const std::vector<Visit>& visits);

// A rank's own part of a trip.
struct Trip {
  // What goes one way with a chunk: tokens to and from every rank.
  struct Flow {
    std::vector<int64_t> send, receive;
    int64_t num_sent() const;
    int64_t num_received() const;
  };
  struct Round {
    std::vector<int64_t> send, receive;  // tokens to and from every rank, of all chunks
    std::vector<Flow> there, back;       // by chunk: rows to experts, sums from them
    int64_t first = 0;                   // of those sent, in `sent`, `tokens` and what returns
    int64_t num_sent() const;
    int64_t num_guests() const;
  };
  std::vector<Round> rounds;  // as many on every rank; what others say fills `receive`, and of `back` `send`
  std::vector<int32_t> tokens;  // that are sent: by round, rank, token
  std::vector<int32_t> sent;    // in the order in which they go: by round, chunk, rank, token
  // [tokens, most_ranks]: where the token's sums return, in their order by round, last chunk, rank and token;
  // from which ranks, ascending. -1 beyond the ranks that it goes to.
  std::vector<int32_t> place_of, rank_of;
};

// `counts` [from * ranks + to] of all ranks, `rank` this one, `round_rows` what a receiver takes in a round.
Trip plan_trip(const TripSizes& sizes, const std::vector<Visit>& visits,
               const std::vector<TripCounts>& counts, int64_t rank, int64_t round_rows);

// Rows of the tokens that came in a round, sorted by this rank's experts, then by rank and token.
struct GuestRows {
  // [guests, top_k] in the order in which sums leave: by last chunk, rank, token. Experts as chosen, -1 where
  // another rank has the expert; their rows, `absent` likewise.
  std::vector<int32_t> experts, row_of;
  std::vector<int32_t> leaving;    // [guests] in that order: where the guest came, by chunk, rank, token
  std::vector<int32_t> guest_of;   // of each row, where the guest came
  std::vector<int32_t> choice_of;  // of each row, index in [guests, top_k] in the order in which they came
  std::vector<int32_t> bounds;     // [L + 1]: rows of each expert
  std::vector<int32_t> offsets;    // [L + chunks]: the same of each chunk, from 0, one after another
  struct Chunk {
    int64_t first_expert = 0, experts = 0, first_row = 0, rows = 0;
    std::vector<int64_t> come, leave;  // guests from and to every rank
  };
  std::vector<Chunk> chunks;
};
// `choices` [guests, top_k] by rank and token, `sizes.tokens` guests, `come_from` of them from each rank.
GuestRows place_guests(const TripSizes& sizes, const int32_t* choices, const std::vector<int64_t>& come_from,
                       int64_t rank, int32_t absent, ThreadPool& threads);

}  // namespace fp4t
