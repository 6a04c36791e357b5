// How a run is spread over ranks (DESIGN.md section 6; engine/comm/README.md): the axes, and what each rank
// holds and owns. Pure functions; all arithmetic on ranks is here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/plan/parameters.h"
#include "kernels/ops/optimizer.h"

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

// Elements of a parameter whose squares make up one term of the global norm; a chunk ends with its matrix at
// the latest, so that experts may lie anywhere.
inline constexpr int64_t kNormChunk = SumSquaresChunks::kChunk;
inline int64_t matrix_elements(const ParamInfo& p) {
  return p.role == ParamRole::kExpertWeight ? p.shape.elements() / p.shape[0] : p.shape.elements();
}
// Calls body(elements of the logical tensor) for every chunk, in order.
template <class Body>
void for_norm_chunks(const ParamInfo& p, const Body& body) {
  const int64_t matrix = matrix_elements(p);
  for (int64_t begin = 0; begin < p.shape.elements(); begin += matrix) {
    for (int64_t at = begin; at < begin + matrix; at += kNormChunk) {
      body(Span{at, std::min(at + kNormChunk, begin + matrix)});
    }
  }
}

// Members of a row in domains of consecutive ones: member m is in domain m / size, its place there m % size.
// What goes between domains goes from place to place.
struct RowDomains {
  int64_t size = 1, count = 1;
  bool nested() const { return size > 1 && count > 1; }
  int64_t domain(int64_t member) const { return member / size; }
  int64_t place(int64_t member) const { return member % size; }
  int64_t member(int64_t domain, int64_t place) const { return domain * size + place; }
};

// Parameters, or the parts of them that some ranks hold alike, one after another: a row of elements. It is
// cut into segments, each into a consecutive piece for every rank, so that what travels for one segment goes
// from all of these ranks to all.
class ShardRow {
 public:
  // Where pieces may end. Between chunks, a segment is one block's parameters, or what lies before or after
  // the blocks; between parameters, one segment is all.
  enum class Cut : uint8_t { kChunks, kParameters };

  ShardRow(const std::vector<ParamInfo>& parameters, const std::vector<std::pair<size_t, Span>>& parts,
           int64_t members, Cut cut);

  int64_t members() const { return members_; }
  size_t segments() const { return segments_.size(); }
  Span segment(size_t segment) const { return {segments_[segment].begin(), segments_[segment].end()}; }
  Span piece(size_t segment, int64_t member) const;
  int64_t largest_piece() const { return largest_piece_; }
  int64_t owned_elements(int64_t member) const;  // of all segments
  // Where parameters [first, end) stand in the row.
  Span range(size_t first, size_t end) const;
  int64_t length() const { return parts_.empty() ? 0 : parts_.back().end(); }
  // Of one of its parameters, elements of the logical tensor; empty where the row has no part of it.
  Span owned(size_t parameter, int64_t member) const;

  // Calls body(parameter's index, elements of the logical tensor) for what a range of the row consists of.
  template <class Body>
  void for_parts(const Span& range, const Body& body) const;
  // Calls body(segment, what of it lies in the range) for every segment that has something there.
  template <class Body>
  void for_segments(const Span& range, const Body& body) const;

 private:
  struct Part {
    size_t parameter;
    Span elements;
    int64_t at;  // in the row
    int64_t end() const { return at + elements.count(); }
  };
  struct Segment {
    std::vector<int64_t> cuts;  // [members + 1]
    // The first piece is this member's, the next the next's: where there are fewer chunks than members, other
    // members go without in every segment.
    int64_t first = 0;
    int64_t begin() const { return cuts.front(); }
    int64_t end() const { return cuts.back(); }
  };
  void add_segment(const std::vector<int64_t>& places);

  int64_t members_;
  std::vector<Part> parts_;
  std::vector<Segment> segments_;
  int64_t largest_piece_ = 0;
};

// Which elements of every parameter a rank holds (experts: those of its place in the expert group), and which
// of these it owns among the ranks that hold them: whose master, moments and update it keeps.
class ShardTable {
 public:
  using Cut = ShardRow::Cut;
  // One rank that owns everything.
  ShardTable() = default;
  ShardTable(const std::vector<ParamInfo>& parameters, const Axes& axes, Cut cut);

  bool is_sharded() const { return !rows_.empty(); }
  // Elements of the logical tensor.
  Span held(const ParamInfo& parameter, int64_t rank) const;
  Span owned(const ParamInfo& parameter, int64_t rank) const;
  int64_t largest_owned() const;  // of all parameters together, by any rank

  // What all ranks share; member of the row: the rank.
  const ShardRow& everywhere() const { return rows_.at(0); }
  // What the ranks of an expert index share, where experts are spread; member: the data index.
  bool spreads_experts() const { return axes_.expert > 1; }
  const ShardRow& experts(int64_t expert_index) const {
    return rows_.at(static_cast<size_t>(expert_index) + 1);
  }

 private:
  bool is_spread(const ParamInfo& parameter) const {
    return spreads_experts() && parameter.placement == Placement::kSplitByExpert;
  }

  Axes axes_;
  std::vector<ShardRow> rows_;  // of all ranks, then of each expert index
};

template <class Body>
void ShardRow::for_parts(const Span& range, const Body& body) const {
  const auto first = std::partition_point(parts_.begin(), parts_.end(),
                                          [&](const Part& p) { return p.end() <= range.begin; });
  for (auto p = first; p != parts_.end() && p->at < range.end; ++p) {
    const int64_t begin = std::max(range.begin, p->at), end = std::min(range.end, p->end());
    const int64_t shift = p->elements.begin - p->at;
    if (begin < end) body(p->parameter, Span{begin + shift, end + shift});
  }
}

template <class Body>
void ShardRow::for_segments(const Span& range, const Body& body) const {
  for (size_t s = 0; s < segments(); ++s) {
    const Span inside = {std::max(range.begin, segment(s).begin), std::min(range.end, segment(s).end)};
    if (inside.count() > 0) body(s, inside);
  }
}

}  // namespace fp4t
