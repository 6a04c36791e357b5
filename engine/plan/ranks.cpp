#include "engine/plan/ranks.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace fp4t {

ShardTable::ShardTable(const std::vector<ParamInfo>& parameters, int64_t ranks, Cut cut) {
  FP4T_CHECK(ranks >= 1, ranks, " ranks");
  std::vector<int64_t> places;  // where a piece may begin
  int64_t row = 0;
  for (const ParamInfo& p : parameters) {
    FP4T_CHECK_EQ(static_cast<size_t>(p.tensor_id), offsets_.size());
    const int64_t n = p.shape.elements();
    offsets_.push_back(row);
    for (int64_t at = 0; at < n; at += cut == Cut::kChunks ? kNormChunk : n) places.push_back(row + at);
    row += n;
  }
  offsets_.push_back(row);
  places.push_back(row);
  for (int64_t r = 0; r <= ranks; ++r) {
    const int64_t wanted = part_of(row, r, ranks).begin;
    cuts_.push_back(*std::lower_bound(places.begin(), places.end(), wanted));
  }
}

Span ShardTable::row(int64_t rank) const {
  FP4T_CHECK(rank >= 0 && rank + 1 < static_cast<int64_t>(cuts_.size()), "rank ", rank);
  const auto r = static_cast<size_t>(rank);
  return {cuts_[r], cuts_[r + 1]};
}

int64_t ShardTable::largest_row() const {
  int64_t most = 0;
  for (size_t r = 0; r + 1 < cuts_.size(); ++r) most = std::max(most, cuts_[r + 1] - cuts_[r]);
  return most;
}

Span ShardTable::owned(const ParamInfo& parameter, int64_t rank) const {
  const int64_t n = parameter.shape.elements();
  if (!is_sharded()) return {0, n};
  const int64_t offset = offsets_.at(parameter.tensor_id);
  const Span mine = row(rank);
  const int64_t begin = std::clamp(mine.begin - offset, int64_t{0}, n);
  return {begin, std::clamp(mine.end - offset, begin, n)};
}

}  // namespace fp4t
