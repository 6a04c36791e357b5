#include "engine/plan/ranks.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace fp4t {

ShardRow::ShardRow(const std::vector<ParamInfo>& parameters,
                   const std::vector<std::pair<size_t, Span>>& parts, int64_t members, Cut cut)
    : members_(members) {
  FP4T_CHECK(members >= 1, members, " ranks");
  std::vector<int64_t> places;  // of one segment: where a piece may begin
  int64_t row = 0;
  for (const auto& [parameter, elements] : parts) {
    if (elements.count() == 0) continue;
    const bool same_block =
        parts_.empty() || parameters[parts_.back().parameter].layer == parameters[parameter].layer;
    if (cut == Cut::kChunks && !same_block) {
      places.push_back(row);
      add_segment(places);
      places.clear();
    }
    if (cut == Cut::kParameters) {
      places.push_back(row);
    } else {
      for_norm_chunks(parameters[parameter], [&, &held = elements](const Span& chunk) {
        if (chunk.begin < held.begin || chunk.end > held.end) return;
        places.push_back(row + chunk.begin - held.begin);
      });
    }
    parts_.push_back({parameter, elements, row});
    row += elements.count();
  }
  if (row == 0) return;
  places.push_back(row);
  add_segment(places);
}

void ShardRow::add_segment(const std::vector<int64_t>& places) {
  Segment segment;
  const int64_t begin = places.front(), length = places.back() - begin;
  for (int64_t m = 0; m <= members_; ++m) {
    const int64_t wanted = begin + part_of(length, m, members_).begin;
    segment.cuts.push_back(*std::lower_bound(places.begin(), places.end(), wanted));
    if (m > 0) largest_piece_ = std::max(largest_piece_, segment.cuts.back() - *(segment.cuts.end() - 2));
  }
  segment.first = static_cast<int64_t>(segments_.size()) % members_;
  segments_.push_back(std::move(segment));
}

Span ShardRow::piece(size_t segment, int64_t member) const {
  FP4T_CHECK(member >= 0 && member < members(), "member ", member, " of ", members());
  const Segment& s = segments_.at(segment);
  const auto turn = static_cast<size_t>((member - s.first + members_) % members_);
  return {s.cuts[turn], s.cuts[turn + 1]};
}

int64_t ShardRow::owned_elements(int64_t member) const {
  int64_t n = 0;
  for (size_t s = 0; s < segments(); ++s) n += piece(s, member).count();
  return n;
}

Span ShardRow::range(size_t first, size_t end) const {
  const auto place = [this](size_t parameter) {
    const auto part = std::partition_point(parts_.begin(), parts_.end(),
                                           [&](const Part& p) { return p.parameter < parameter; });
    return part == parts_.end() ? length() : part->at;
  };
  return {place(first), place(end)};
}

Span ShardRow::owned(size_t parameter, int64_t member) const {
  const auto part = std::partition_point(parts_.begin(), parts_.end(),
                                         [&](const Part& p) { return p.parameter < parameter; });
  if (part == parts_.end() || part->parameter != parameter) return {};
  const auto segment = std::partition_point(segments_.begin(), segments_.end(),
                                            [&](const Segment& s) { return s.end() <= part->at; });
  const Span mine = piece(static_cast<size_t>(segment - segments_.begin()), member);
  const int64_t begin = std::clamp(mine.begin, part->at, part->end());
  const int64_t end = std::clamp(mine.end, begin, part->end());
  const int64_t shift = part->elements.begin - part->at;
  return {begin + shift, end + shift};
}

ShardTable::ShardTable(const std::vector<ParamInfo>& parameters, const Axes& axes, Cut cut) : axes_(axes) {
  FP4T_CHECK(axes.data >= 1 && axes.expert >= 1, axes.data, " x ", axes.expert, " ranks");
  if (axes.ranks() == 1) return;
  std::vector<std::pair<size_t, Span>> everywhere;
  for (size_t p = 0; p < parameters.size(); ++p) {
    FP4T_CHECK_EQ(static_cast<size_t>(parameters[p].tensor_id), p);
    if (!is_spread(parameters[p])) everywhere.emplace_back(p, Span{0, parameters[p].shape.elements()});
  }
  rows_.emplace_back(parameters, everywhere, axes.ranks(), cut);
  for (int64_t x = 0; spreads_experts() && x < axes.expert; ++x) {
    std::vector<std::pair<size_t, Span>> experts;
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (is_spread(parameters[p])) experts.emplace_back(p, held(parameters[p], x));
    }
    rows_.emplace_back(parameters, experts, axes.data, cut);
  }
}

Span ShardTable::held(const ParamInfo& parameter, int64_t rank) const {
  const int64_t n = parameter.shape.elements();
  if (!is_spread(parameter)) return {0, n};
  FP4T_CHECK_EQ(parameter.shape[0] % axes_.expert, 0, parameter.name, ": experts by parallel.expert");
  return part_of(n, axes_.expert_index(rank), axes_.expert);
}

Span ShardTable::owned(const ParamInfo& parameter, int64_t rank) const {
  if (!is_sharded()) return {0, parameter.shape.elements()};
  const size_t p = parameter.tensor_id;
  if (!is_spread(parameter)) return everywhere().owned(p, rank);
  return experts(axes_.expert_index(rank)).owned(p, axes_.data_index(rank));
}

int64_t ShardTable::largest_owned() const {
  if (!is_sharded()) return 0;
  int64_t most = 0;
  for (int64_t rank = 0; rank < axes_.ranks(); ++rank) {
    int64_t n = everywhere().owned_elements(rank);
    if (spreads_experts()) n += experts(axes_.expert_index(rank)).owned_elements(axes_.data_index(rank));
    most = std::max(most, n);
  }
  return most;
}

}  // namespace fp4t
