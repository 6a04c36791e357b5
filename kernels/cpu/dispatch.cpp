// Where tokens travel that other ranks' experts shall see.
#include "kernels/ops/dispatch.h"

#include <algorithm>
#include <vector>

#include "kernels/ops/run.h"

namespace fp4t::cpu {

namespace {

// A token and a rank; `slot`: which of the token's.
struct Visit {
  int32_t token, slot, rank, first_chunk, last_chunk;
};

// Puts the visits of a token into `visits`, by rank; `rows` of each.
void find_visits(const ExpertSplit& split, const int32_t* experts, int64_t top_k, int32_t token,
                 std::vector<Visit>& visits, std::vector<int64_t>& rows) {
  visits.clear();
  rows.clear();
  for (int64_t j = 0; j < top_k; ++j) {
    const int32_t e = experts[j];
    FP4T_CHECK(e >= 0 && e < split.experts, DispatchTokens::kName, ": token ", token, " chose expert ", e,
               " of ", split.experts);
    const auto rank = static_cast<int32_t>(e / split.local());
    const auto chunk = static_cast<int32_t>(split.chunk_of(e % split.local()));
    auto at = visits.begin();
    while (at != visits.end() && at->rank < rank) ++at;
    const auto index = at - visits.begin();
    if (at == visits.end() || at->rank != rank) {
      visits.insert(at, {token, 0, rank, chunk, chunk});
      rows.insert(rows.begin() + index, 1);
    } else {
      at->first_chunk = std::min(at->first_chunk, chunk);
      at->last_chunk = std::max(at->last_chunk, chunk);
      ++rows[static_cast<size_t>(index)];
    }
  }
  for (size_t i = 0; i < visits.size(); ++i) visits[i].slot = static_cast<int32_t>(i);
}

// Where the first of each kind stands, `first` before all of them.
std::vector<int32_t> places(const std::vector<int32_t>& counts, int64_t first) {
  std::vector<int32_t> places;
  auto next = static_cast<int32_t>(first);
  for (const int32_t n : counts) {
    places.push_back(next);
    next += n;
  }
  return places;
}

// Experts of a guest that are here, and the chunks between which it stays.
struct Stay {
  int64_t first_chunk, last_chunk;
};
Stay stay_of(const PlaceGuests& op, int64_t guest) {
  const ExpertSplit& s = op.split;
  const int64_t top_k = op.choices.dim(1), first = op.rank * s.local();
  const int32_t* experts = op.choices.as<int32_t>() + guest * top_k;
  Stay stay{s.chunks, -1};
  for (int64_t j = 0; j < top_k; ++j) {
    FP4T_CHECK(experts[j] >= 0 && experts[j] < s.experts, op.kName, ": guest ", guest, " chose expert ",
               experts[j], " of ", s.experts);
    const int64_t e = experts[j] - first;
    if (e < 0 || e >= s.local()) continue;
    stay.first_chunk = std::min(stay.first_chunk, s.chunk_of(e));
    stay.last_chunk = std::max(stay.last_chunk, s.chunk_of(e));
  }
  FP4T_CHECK(stay.last_chunk >= 0, op.kName, ": guest ", guest, " has no expert on rank ", op.rank);
  return stay;
}

// The rank that each guest came from.
std::vector<int64_t> origins(const PlaceGuests& op) {
  std::vector<int64_t> from;
  for (int64_t r = 0; r < op.split.ranks; ++r) {
    from.insert(from.end(), static_cast<size_t>(op.come_from.as<int32_t>()[r]), r);
  }
  FP4T_CHECK_EQ(static_cast<int64_t>(from.size()), op.choices.dim(0), "guests");
  return from;
}

void write_offsets(const PlaceGuests& op, const std::vector<int32_t>& bounds) {
  int32_t* out = op.offsets.as<int32_t>();
  for (int64_t c = 0; c < op.split.chunks; ++c) {
    const int64_t begin = op.split.chunk_begin(c), end = op.split.chunk_begin(c + 1);
    for (int64_t e = begin; e <= end; ++e) {
      *out++ = bounds[static_cast<size_t>(e)] - bounds[static_cast<size_t>(begin)];
    }
  }
}

}  // namespace

void run(Queue&, const DispatchTokens& op) {
  const ExpertSplit& s = op.split;
  const int64_t tokens = op.experts.dim(0), top_k = op.experts.dim(1), most = s.visits_of_token(top_k);
  const int32_t* experts = op.experts.as<int32_t>();
  int32_t *rank_of = op.rank_of.as<int32_t>(), *place_of = op.place_of.as<int32_t>();
  std::vector<int64_t> next_row(static_cast<size_t>(s.ranks), 0), rows;
  if (!op.first_row.empty()) std::copy_n(op.first_row.as<int64_t>(), s.ranks, next_row.begin());

  int32_t* rows_of_expert = op.counts.as<int32_t>();
  std::fill_n(rows_of_expert, s.num_counts(), 0);
  const auto kinds = static_cast<size_t>(s.chunks * s.ranks);
  std::vector<int32_t> to(static_cast<size_t>(s.ranks), 0), come(kinds, 0), leave(kinds, 0);
  const auto kind = [&](int32_t chunk, const Visit& v) {
    return static_cast<size_t>(chunk * s.ranks + v.rank);
  };

  std::vector<Visit> listed, visits;
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t* chosen = experts + t * top_k;
    find_visits(s, chosen, top_k, static_cast<int32_t>(t), visits, rows);
    std::fill_n(rank_of + t * most, most, -1);
    std::fill(place_of + t * most + visits.size(), place_of + (t + 1) * most, -1);
    for (const Visit& v : visits) {
      rank_of[t * most + v.slot] = v.rank;
      int64_t& row = next_row[static_cast<size_t>(v.rank)];
      const bool in = op.first_row.empty() || (row >= op.begin && row < op.end);
      row += rows[static_cast<size_t>(v.slot)];
      if (!in) continue;
      listed.push_back(v);
      ++to[static_cast<size_t>(v.rank)];
      ++come[kind(v.first_chunk, v)];
      ++leave[kind(v.last_chunk, v)];
      for (int64_t j = 0; j < top_k; ++j) rows_of_expert[chosen[j]] += chosen[j] / s.local() == v.rank;
    }
  }
  FP4T_CHECK(op.first + static_cast<int64_t>(listed.size()) <= tokens * most, op.kName, ": ", listed.size(),
             " visits from place ", op.first, " on, room for ", tokens * most);
  std::copy(come.begin(), come.end(), rows_of_expert + s.experts);
  std::copy(leave.begin(), leave.end(), rows_of_expert + s.experts + static_cast<int64_t>(kinds));

  std::vector<int32_t> ask = places(to, op.first), send = places(come, op.first),
                       receive = places(leave, op.first);
  for (const Visit& v : listed) {
    op.asked.as<int32_t>()[ask[static_cast<size_t>(v.rank)]++] = v.token;
    op.sent.as<int32_t>()[send[kind(v.first_chunk, v)]++] = v.token;
    place_of[v.token * most + v.slot] = receive[kind(v.last_chunk, v)]++;
  }
}

void run(Queue&, const PlaceGuests& op) {
  const ExpertSplit& s = op.split;
  const int64_t guests = op.choices.dim(0), top_k = op.choices.dim(1), rows = op.guest_of.dim(0);
  const int64_t first = op.rank * s.local();
  const int32_t* choices = op.choices.as<int32_t>();
  const std::vector<int64_t> from = origins(op);

  std::vector<int32_t> of_expert(static_cast<size_t>(s.local()), 0);
  const auto kinds = static_cast<size_t>(s.chunks * s.ranks);
  std::vector<int32_t> come(kinds, 0), leave(kinds, 0);
  std::vector<Stay> stays;
  const auto kind = [&](int64_t chunk, int64_t g) {
    return static_cast<size_t>(chunk * s.ranks + from[static_cast<size_t>(g)]);
  };
  const auto here = [&](int32_t expert) { return expert >= first && expert < first + s.local(); };
  for (int64_t g = 0; g < guests; ++g) {
    stays.push_back(stay_of(op, g));
    ++come[kind(stays.back().first_chunk, g)];
    ++leave[kind(stays.back().last_chunk, g)];
    for (int64_t j = 0; j < top_k; ++j) {
      const int32_t e = choices[g * top_k + j];
      if (here(e)) ++of_expert[static_cast<size_t>(e - first)];
    }
  }
  std::vector<int32_t> next_row = places(of_expert, 0);
  std::vector<int32_t> bounds = next_row;
  bounds.push_back(bounds.back() + of_expert.back());
  FP4T_CHECK_EQ(int64_t{bounds.back()}, rows, "rows of the guests");
  write_offsets(op, bounds);

  std::vector<int32_t> came = places(come, 0), leaves = places(leave, 0);
  for (int64_t g = 0; g < guests; ++g) {
    const int32_t in = came[kind(stays[static_cast<size_t>(g)].first_chunk, g)]++;
    const int32_t out = leaves[kind(stays[static_cast<size_t>(g)].last_chunk, g)]++;
    op.leaving.as<int32_t>()[out] = in;
    for (int64_t j = 0; j < top_k; ++j) {
      const int32_t expert = choices[g * top_k + j];
      const int64_t at = out * top_k + j;
      op.experts.as<int32_t>()[at] = here(expert) ? expert : -1;
      op.row_of.as<int32_t>()[at] = static_cast<int32_t>(op.absent);
      if (!here(expert)) continue;
      const int32_t row = next_row[static_cast<size_t>(expert - first)]++;
      op.row_of.as<int32_t>()[at] = row;
      op.guest_of.as<int32_t>()[row] = in;
      op.choice_of.as<int32_t>()[row] = static_cast<int32_t>(in * top_k + j);
    }
  }
}

}  // namespace fp4t::cpu
