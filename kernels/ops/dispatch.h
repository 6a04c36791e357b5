// Tokens on their way to experts of other ranks, and where their rows stand there (DESIGN.md section 6;
// engine/comm/README.md, "Experts over ranks").
//
// X ranks share E experts, L = E / X consecutive ones each, and cut theirs into n chunks: chunk c has the
// experts [floor(L c / n), floor(L (c + 1) / n)) of every rank. Of T tokens each chose k different experts. A
// visit is a token and a rank that has any of its experts, m = min(k, X) of a token at most. It comes there
// with the chunk of the first of these experts, and its sum leaves with that of the last.
#pragma once

#include "kernels/base/host_device.h"
#include "kernels/base/tensor.h"

namespace fp4t {

struct ExpertSplit {
  int64_t experts, ranks, chunks;  // E, X, n
  FP4T_HD int64_t local() const { return experts / ranks; }
  FP4T_HD int64_t chunk_begin(int64_t chunk) const { return local() * chunk / chunks; }
  // The inverse, of an expert by its place on its rank.
  FP4T_HD int64_t chunk_of(int64_t local_expert) const { return ((local_expert + 1) * chunks - 1) / local(); }
  FP4T_HD int64_t visits_of_token(int64_t top_k) const { return top_k < ranks ? top_k : ranks; }
  // Of DispatchTokens::counts.
  FP4T_HD int64_t num_counts() const { return experts + 2 * chunks * ranks; }
};

// The visits of this rank's tokens in their three orders.
// With `first_row`, those alone whose first row is in [begin, end): rank r counts the rows that the tokens
// bring there in their order, from first_row[r] on. What belongs to other visits stays as it is.
struct DispatchTokens {
  static constexpr const char* kName = "dispatch_tokens";
  TensorView experts;  // I32 [T, k]
  ExpertSplit split;
  TensorView first_row;  // optional I64 [X]
  int64_t begin, end;
  int64_t first;        // the place of the first of these visits in all three orders
  TensorView rank_of;   // I32 [T, m]: the token's ranks, ascending; -1 beyond
  TensorView place_of;  // I32 [T, m]: where the visit's sum returns, by chunk, rank, token; -1 beyond
  TensorView asked;     // I32 [T m]: tokens by rank, token; written from `first` on
  TensorView sent;      // I32 [T m]: tokens by the chunk with which they come, rank, token; likewise
  // I32 [E + 2 n X], of these visits: rows of each expert; tokens by the chunk with which they come and rank;
  // tokens by the chunk with which their sums leave and rank.
  TensorView counts;
  void check() const;
};

// Where the rows of G tokens stand that came to rank `rank`: sorted by its experts, then by rank and token. R
// rows.
struct PlaceGuests {
  static constexpr const char* kName = "place_guests";
  TensorView choices;    // I32 [G, k], by rank and token; at least one of every row is this rank's
  TensorView come_from;  // I32 [X]: how many of each rank
  ExpertSplit split;
  int64_t rank;
  int64_t absent;      // the row of a choice that another rank has
  TensorView experts;  // I32 [G, k], in the order in which sums leave (by chunk, rank, token); -1: of another
  TensorView row_of;   // I32 [G, k], likewise
  TensorView leaving;  // I32 [G], in that order: where the guest came, by chunk, rank, token
  TensorView guest_of;  // I32 [R]: where the guest of a row came
  TensorView
      choice_of;       // I32 [R]: index in [G, k] of the row's choice, guests in the order in which they came
  TensorView offsets;  // I32 [L + n]: rows of each expert of a chunk, from 0, chunk after chunk
  void check() const;
};

}  // namespace fp4t
