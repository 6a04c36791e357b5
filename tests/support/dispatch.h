// Tokens that chose experts of several ranks, and the tensors of DispatchTokens and PlaceGuests for them. The
// tensors come from a pool with fresh(dtype, shape): HostPool here, Mirror, or a benchmark's memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/ops/dispatch.h"
#include "tests/support/tensors.h"

namespace fp4t::test {

// What no list holds: entries that an op must not touch start with it.
constexpr int32_t kUntouched = 0x5A5A5A5A;
constexpr int64_t kAbsent = 1000000;

class HostPool {
 public:
  TensorView fresh(DType dtype, const Shape& shape) {
    tensors_.emplace_back(dtype, shape);
    const TensorView v = tensors_.back().view();
    if (dtype == DType::kI32) std::fill_n(v.as<int32_t>(), v.elements(), kUntouched);
    return v;
  }

 private:
  std::list<HostTensor> tensors_;
};

inline std::vector<int32_t> list_of(const TensorView& v) {
  return {v.as<int32_t>(), v.as<int32_t>() + v.elements()};
}

// For each token k different experts, in any order. `lopsided`: seven tokens of eight chose the first k.
inline std::vector<int32_t> random_choices(std::mt19937_64& engine, int64_t tokens, int64_t top_k,
                                           int64_t experts, bool lopsided) {
  std::vector<int32_t> choices, all(static_cast<size_t>(experts));
  std::iota(all.begin(), all.end(), 0);
  std::vector<int32_t> first(all.begin(), all.begin() + top_k);
  for (int64_t t = 0; t < tokens; ++t) {
    if (lopsided && engine() % 8 != 0) {
      choices.insert(choices.end(), first.begin(), first.end());
      continue;
    }
    for (int64_t j = 0; j < top_k; ++j) {
      const auto other = static_cast<int64_t>(engine() % static_cast<uint64_t>(experts - j));
      std::swap(all[static_cast<size_t>(j)], all[static_cast<size_t>(j + other)]);
    }
    choices.insert(choices.end(), all.begin(), all.begin() + top_k);
  }
  return choices;
}

// Exchanges a choice of every token that has no expert on `rank` for one there.
inline void bring_to(int64_t rank, const ExpertSplit& split, int64_t top_k, std::mt19937_64& engine,
                     std::vector<int32_t>& choices) {
  for (auto row = choices.begin(); row != choices.end(); row += top_k) {
    if (std::any_of(row, row + top_k, [&](int32_t e) { return e / split.local() == rank; })) continue;
    const auto local = static_cast<int64_t>(engine() % static_cast<uint64_t>(split.local()));
    row[static_cast<int64_t>(engine() % static_cast<uint64_t>(top_k))] =
        static_cast<int32_t>(rank * split.local() + local);
  }
}

struct DispatchTensors {
  template <class Pool>
  DispatchTensors(Pool& pool, const ExpertSplit& expert_split, int64_t tokens, int64_t top_k)
      : split(expert_split),
        experts(pool.fresh(DType::kI32, {tokens, top_k})),
        first_row(pool.fresh(DType::kI64, {split.ranks})),
        rank_of(pool.fresh(DType::kI32, {tokens, split.visits_of_token(top_k)})),
        place_of(pool.fresh(DType::kI32, rank_of.shape)),
        asked(pool.fresh(DType::kI32, {rank_of.elements()})),
        sent(pool.fresh(DType::kI32, asked.shape)),
        counts(pool.fresh(DType::kI32, {split.num_counts()})) {}

  DispatchTokens all(int64_t first) const {
    return {experts, split, {}, 0, 0, first, rank_of, place_of, asked, sent, counts};
  }
  DispatchTokens window(int64_t begin, int64_t end, int64_t first) const {
    return {experts, split, first_row, begin, end, first, rank_of, place_of, asked, sent, counts};
  }
  void choose(const std::vector<int32_t>& choices) const {
    std::copy(choices.begin(), choices.end(), experts.as<int32_t>());
  }

  ExpertSplit split;
  TensorView experts, first_row, rank_of, place_of, asked, sent, counts;
};

// Rows that guests with these choices have on `rank`.
inline int64_t rows_on(int64_t rank, const ExpertSplit& split, const std::vector<int32_t>& choices) {
  return std::count_if(choices.begin(), choices.end(), [&](int32_t e) { return e / split.local() == rank; });
}

struct GuestTensors {
  template <class Pool>
  GuestTensors(Pool& pool, const ExpertSplit& expert_split, int64_t on_rank, int64_t guests, int64_t top_k,
               int64_t rows)
      : split(expert_split),
        rank(on_rank),
        choices(pool.fresh(DType::kI32, {guests, top_k})),
        come_from(pool.fresh(DType::kI32, {split.ranks})),
        experts(pool.fresh(DType::kI32, choices.shape)),
        row_of(pool.fresh(DType::kI32, choices.shape)),
        leaving(pool.fresh(DType::kI32, {guests})),
        guest_of(pool.fresh(DType::kI32, {rows})),
        choice_of(pool.fresh(DType::kI32, {rows})),
        offsets(pool.fresh(DType::kI32, {split.local() + split.chunks})) {}

  PlaceGuests place() const {
    return {choices, come_from, split, rank, kAbsent, experts, row_of, leaving, guest_of, choice_of, offsets};
  }
  void come(const std::vector<int32_t>& chosen, const std::vector<int32_t>& from) const {
    std::copy(chosen.begin(), chosen.end(), choices.as<int32_t>());
    std::copy(from.begin(), from.end(), come_from.as<int32_t>());
  }

  ExpertSplit split;
  int64_t rank;
  TensorView choices, come_from, experts, row_of, leaving, guest_of, choice_of, offsets;
};

// How many of `guests` come from each rank; none from some.
inline std::vector<int32_t> random_origins(std::mt19937_64& engine, int64_t guests, int64_t ranks) {
  std::vector<int64_t> cuts = {0, guests};
  for (int64_t r = 1; r < ranks; ++r) {
    cuts.push_back(static_cast<int64_t>(engine() % static_cast<uint64_t>(guests + 1)));
  }
  std::sort(cuts.begin(), cuts.end());
  std::vector<int32_t> from;
  for (size_t i = 1; i < cuts.size(); ++i) from.push_back(static_cast<int32_t>(cuts[i] - cuts[i - 1]));
  return from;
}

}  // namespace fp4t::test
