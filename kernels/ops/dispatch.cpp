#include "kernels/ops/dispatch.h"

#include <limits>

#include "kernels/ops/expect.h"

namespace fp4t {

namespace {

void expect_split(const char* op, const ExpertSplit& s) {
  FP4T_CHECK(s.ranks >= 1 && s.experts >= s.ranks && s.experts % s.ranks == 0, op, ": ", s.experts,
             " experts on ", s.ranks, " ranks");
  FP4T_CHECK(s.chunks >= 1 && s.chunks <= s.local(), op, ": ", s.chunks, " chunks of ", s.local(),
             " experts");
}

// Rows and places are 32-bit indices.
void expect_indices(const char* op, int64_t count) {
  FP4T_CHECK(count <= std::numeric_limits<int32_t>::max(), op, ": ", count,
             " entries do not fit 32-bit indices");
}

}  // namespace

void DispatchTokens::check() const {
  expect_split(kName, split);
  expect_rank(kName, "experts", experts, 2);
  const int64_t tokens = experts.dim(0), top_k = experts.dim(1), most = split.visits_of_token(top_k);
  FP4T_CHECK(top_k >= 1 && top_k <= split.experts, kName, ": ", top_k, " of ", split.experts, " experts");
  expect_indices(kName, tokens * top_k + first);
  expect_tensor(kName, "experts", experts, DType::kI32, {tokens, top_k});
  if (!first_row.empty()) expect_tensor(kName, "first_row", first_row, DType::kI64, {split.ranks});
  FP4T_CHECK(first >= 0, kName, ".first ", first);
  FP4T_CHECK(first_row.empty() || begin <= end, kName, ": rows from ", begin, " to ", end);
  for (const TensorView& list : {rank_of, place_of}) {
    expect_tensor(kName, "places", list, DType::kI32, {tokens, most});
    expect_disjoint(kName, "places", list, "experts", experts);
  }
  for (const TensorView& list : {asked, sent}) {
    expect_tensor(kName, "a list of tokens", list, DType::kI32, {tokens * most});
    expect_disjoint(kName, "a list of tokens", list, "experts", experts);
  }
  expect_disjoint(kName, "rank_of", rank_of, "place_of", place_of);
  expect_disjoint(kName, "asked", asked, "sent", sent);
  expect_tensor(kName, "counts", counts, DType::kI32, {split.num_counts()});
  for (const TensorView& input : {experts, first_row})
    expect_disjoint(kName, "counts", counts, "an input", input);
}

void PlaceGuests::check() const {
  expect_split(kName, split);
  FP4T_CHECK(rank >= 0 && rank < split.ranks, kName, ".rank ", rank, " of ", split.ranks);
  expect_rank(kName, "choices", choices, 2);
  expect_rank(kName, "guest_of", guest_of, 1);
  const int64_t guests = choices.dim(0), top_k = choices.dim(1), rows = guest_of.dim(0);
  expect_indices(kName, guests * top_k);
  expect_indices(kName, absent);
  expect_tensor(kName, "choices", choices, DType::kI32, {guests, top_k});
  expect_tensor(kName, "come_from", come_from, DType::kI32, {split.ranks});
  expect_tensor(kName, "leaving", leaving, DType::kI32, {guests});
  expect_tensor(kName, "guest_of", guest_of, DType::kI32, {rows});
  expect_tensor(kName, "choice_of", choice_of, DType::kI32, {rows});
  expect_tensor(kName, "offsets", offsets, DType::kI32, {split.local() + split.chunks});
  for (const TensorView& list : {experts, row_of}) {
    expect_tensor(kName, "choices in order", list, DType::kI32, {guests, top_k});
    expect_disjoint(kName, "choices in order", list, "choices", choices);
  }
  expect_disjoint(kName, "experts", experts, "row_of", row_of);
  expect_disjoint(kName, "guest_of", guest_of, "choice_of", choice_of);
  for (const TensorView& list : {leaving, guest_of, choice_of, offsets}) {
    expect_disjoint(kName, "a list", list, "choices", choices);
  }
}

}  // namespace fp4t
