#include "engine/model/trip.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

int64_t sum(const std::vector<int64_t>& list) {
  return std::accumulate(list.begin(), list.end(), int64_t{0});
}

}  // namespace

TripCounts::TripCounts(const ExpertSplit& split, std::vector<int32_t> counts)
    : split_(split), counts_(std::move(counts)) {
  FP4T_CHECK_EQ(static_cast<int64_t>(counts_.size()), split.ranks * split.num_counts());
}

int64_t TripCounts::rows(int64_t from, int64_t to) const {
  int64_t rows = 0;
  for (int64_t e = to * split_.local(); e < (to + 1) * split_.local(); ++e) rows += rows_of(from, e);
  return rows;
}

int64_t TripCounts::tokens(int64_t from, int64_t to) const {
  int64_t tokens = 0;
  for (int64_t c = 0; c < split_.chunks; ++c) tokens += coming(from, c, to);
  return tokens;
}

int64_t TripCounts::travelling() const {
  int64_t all = 0;
  for (int64_t from = 0; from < split_.ranks; ++from) {
    for (int64_t to = 0; to < split_.ranks; ++to) all += from == to ? 0 : tokens(from, to);
  }
  return all;
}

TripCounts TripCounts::in_one_chunk() const {
  ExpertSplit split = split_;
  split.chunks = 1;
  std::vector<int32_t> counts;
  for (int64_t from = 0; from < split.ranks; ++from) {
    for (int64_t e = 0; e < split.experts; ++e) counts.push_back(static_cast<int32_t>(rows_of(from, e)));
    for (int way = 0; way < 2; ++way) {
      for (int64_t to = 0; to < split.ranks; ++to) counts.push_back(static_cast<int32_t>(tokens(from, to)));
    }
  }
  return {split, std::move(counts)};
}

int64_t Trip::Flow::num_sent() const { return sum(send); }
int64_t Trip::Flow::num_received() const { return sum(receive); }
int64_t Trip::Round::num_sent() const { return sum(send); }
int64_t Trip::Round::num_guests() const { return sum(receive); }

int64_t num_rounds(const TripCounts& counts, int64_t round_rows) {
  FP4T_CHECK(round_rows >= 1, round_rows, " rows a round");
  const int64_t ranks = counts.split().ranks;
  int64_t rounds = 0;
  for (int64_t to = 0; to < ranks; ++to) {
    int64_t all = 0;
    for (int64_t from = 0; from < ranks; ++from) all += counts.rows(from, to);
    rounds = std::max(rounds, ceil_div(all, round_rows));
  }
  return rounds;
}

std::vector<int64_t> first_rows(const TripCounts& counts, int64_t rank) {
  std::vector<int64_t> first(static_cast<size_t>(counts.split().ranks), 0);
  for (size_t to = 0; to < first.size(); ++to) {
    for (int64_t from = 0; from < rank; ++from) first[to] += counts.rows(from, static_cast<int64_t>(to));
  }
  return first;
}

namespace {

void add_chunk(const TripCounts& counts, int64_t index, Trip::Round& round) {
  const ExpertSplit& split = counts.split();
  Trip::Chunk chunk{};
  chunk.index = index;
  chunk.first_expert = split.chunk_begin(index);
  const int64_t end = split.chunk_begin(index + 1);
  chunk.experts = end - chunk.first_expert;
  chunk.first_row = round.bounds[static_cast<size_t>(chunk.first_expert)];
  chunk.rows = round.bounds[static_cast<size_t>(end)] - chunk.first_row;
  if (!round.chunks.empty()) {
    const Trip::Chunk& before = round.chunks.back();
    chunk.first_came = before.first_came + before.came;
    chunk.first_leaving = before.first_leaving + before.leaving;
  }
  chunk.came = round.there.back().num_received();
  chunk.leaving = round.back.back().num_sent();
  round.chunks.push_back(chunk);
}

}  // namespace

Trip::Round plan_round(const TripCounts& counts, int64_t rank, int64_t first) {
  const ExpertSplit& split = counts.split();
  Trip::Round round;
  round.first = first;
  round.bounds.push_back(0);
  for (int64_t e = rank * split.local(); e < (rank + 1) * split.local(); ++e) {
    int64_t rows = round.bounds.back();
    for (int64_t from = 0; from < split.ranks; ++from) rows += counts.rows_of(from, e);
    round.bounds.push_back(narrow<int32_t>(rows));
  }
  for (int64_t other = 0; other < split.ranks; ++other) {
    round.send.push_back(counts.tokens(rank, other));
    round.receive.push_back(counts.tokens(other, rank));
  }
  for (int64_t c = 0; c < split.chunks; ++c) {
    Trip::Flow there, back;
    for (int64_t other = 0; other < split.ranks; ++other) {
      there.send.push_back(counts.coming(rank, c, other));
      there.receive.push_back(counts.coming(other, c, rank));
      back.send.push_back(counts.leaving(other, c, rank));
      back.receive.push_back(counts.leaving(rank, c, other));
    }
    round.there.push_back(std::move(there));
    round.back.push_back(std::move(back));
    add_chunk(counts, c, round);
  }
  return round;
}

}  // namespace fp4t
