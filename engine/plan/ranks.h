// How a run is spread over ranks (DESIGN.md section 6; engine/comm/README.md): the axes, and what each rank
// owns. Pure functions; all arithmetic on ranks is here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/plan/parameters.h"

namespace fp4t {

// N = data x expert; an expert group is consecutive ranks.
struct Axes {
  int64_t data = 1, expert = 1;
  int64_t ranks() const { return data * expert; }
  int64_t data_index(int64_t rank) const { return rank / expert; }
  int64_t expert_index(int64_t rank) const { return rank % expert; }
  bool operator==(const Axes&) const = default;
};

// A half-open range of elements, samples, prompts.
struct Span {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
  bool operator==(const Span&) const = default;
};

// Part `index` of n things in `parts` contiguous parts, as even as they can be.
inline Span part_of(int64_t n, int64_t index, int64_t parts) {
  return {n * index / parts, n * (index + 1) / parts};
}
// Things in the largest part.
inline int64_t largest_part(int64_t n, int64_t parts) { return (n + parts - 1) / parts; }

// Elements of a parameter whose squares make up one term of the global norm (kernels/ops/optimizer.h).
inline constexpr int64_t kNormChunk = 65536;

// Which elements of every parameter a rank owns: whose master, moments and update it keeps. The parameters,
// one after another, are one row of elements; a rank owns a consecutive piece, cut between norm chunks.
class ShardTable {
 public:
  // One rank that owns everything.
  ShardTable() = default;
  enum class Cut : uint8_t { kChunks, kParameters };  // where pieces may end
  ShardTable(const std::vector<ParamInfo>& parameters, int64_t ranks, Cut cut);

  bool is_sharded() const { return cuts_.size() > 2; }
  // Elements of one parameter, counted in it.
  Span owned(const ParamInfo& parameter, int64_t rank) const;
  // The same piece in the row of all elements.
  Span row(int64_t rank) const;
  int64_t largest_row() const;

  // Calls body(parameter's index, its elements) for the parts that a range of the row consists of.
  template <class Body>
  void for_parts(const Span& row, const Body& body) const;

 private:
  std::vector<int64_t> offsets_;  // of each parameter in the row, and the row's length
  std::vector<int64_t> cuts_;     // [ranks + 1]
};

template <class Body>
void ShardTable::for_parts(const Span& row, const Body& body) const {
  if (row.count() <= 0) return;
  const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), row.begin);
  for (auto p = static_cast<size_t>(after - offsets_.begin()) - 1; p + 1 < offsets_.size(); ++p) {
    if (offsets_[p] >= row.end) return;
    const int64_t begin = row.begin > offsets_[p] ? row.begin : offsets_[p];
    const int64_t end = row.end < offsets_[p + 1] ? row.end : offsets_[p + 1];
    if (begin < end) body(p, Span{begin - offsets_[p], end - offsets_[p]});
  }
}

}  // namespace fp4t
