#include "engine/model/expert_exchange.h"

#include <algorithm>

#include "kernels/base/numeric.h"
#include "kernels/ops/run.h"

namespace fp4t {

namespace {

int64_t row_bytes_of(const TensorView& t) { return t.dim(1) * dtype_bytes(t.dtype); }

}  // namespace

ExpertExchange::ExpertExchange(Queue& queue, Communicator& comm, const Plan& plan)
    : queue_(queue), aside_(queue, plan.axes.expert > 1), plan_(plan), dims_(dims_of(plan)) {
  if (!dims_.spreads_experts()) return;
  split_ = split_of(dims_);
  group_ = comm.split(static_cast<int>(plan.axes.data_index(comm.rank())), comm.rank());
  FP4T_CHECK_EQ(static_cast<int64_t>(group_->size()), plan.axes.expert, "ranks of an expert group");
  FP4T_CHECK_EQ(static_cast<int64_t>(group_->rank()), plan.axes.expert_index(comm.rank()));
  if (queue.backend() == Backend::kCuda) {
    tensors_ = make_on_device(*group_, aside_.queue(), transport_of(plan));
  }
}

DispatchTokens ExpertExchange::listing(const LayerActs& acts, const TripScratch& t,
                                       const ExpertSplit& split) const {
  return {.experts = acts.experts,
          .split = split,
          .first_row = {},
          .begin = 0,
          .end = 0,
          .first = 0,
          .rank_of = acts.rank_of,
          .place_of = acts.place_of,
          .asked = acts.asked,
          .sent = acts.sent,
          .counts = t.counts.rows(0, split.num_counts())};
}

std::vector<int32_t> ExpertExchange::list_visits(const DispatchTokens& op) {
  run(queue_, op);
  return queue_.download(op.counts.data, op.counts.bytes()).values<int32_t>();
}

std::vector<int32_t> ExpertExchange::tell_counts(const std::vector<int32_t>& mine, uint32_t& sample_id) {
  std::vector<int32_t> said = mine;
  said.push_back(static_cast<int32_t>(sample_id));
  std::vector<int32_t> heard(said.size() * static_cast<size_t>(split_.ranks)), counts;
  group_->all_gather(said.data(), heard.data(), static_cast<int64_t>(said.size() * sizeof(int32_t)));
  for (auto from = heard.begin(); from != heard.end();) {
    const auto id = from + static_cast<int64_t>(mine.size());
    counts.insert(counts.end(), from, id);
    sample_id = std::min(sample_id, static_cast<uint32_t>(*id));
    from = id + 1;
  }
  return counts;
}

ExpertExchange::Begun ExpertExchange::begin(const LayerActs& acts, const TripScratch& t, uint32_t sample_id) {
  Begun begun;
  begun.sample_id = acts.experts.dim(0) > 0 ? sample_id : UINT32_MAX;
  DispatchTokens op = listing(acts, t, split_);
  TripCounts all(split_, tell_counts(list_visits(op), begun.sample_id));
  ExpertSplit& split = begun.trip.split;
  split = split_;
  split.chunks =
      call_chunks(plan_, dims_, static_cast<double>(all.travelling()) / static_cast<double>(split.ranks));
  if (split.chunks != split_.chunks) {
    FP4T_CHECK_EQ(split.chunks, 1, "chunks of a call");
    all = all.in_one_chunk();
    op = listing(acts, t, split);
  }
  const int64_t rounds = num_rounds(all, dims_.round_rows);
  if (rounds > 1) {
    list_rounds(op, all, rounds, t, begun.trip);
  } else if (rounds == 1) {
    if (split.chunks != split_.chunks) run(queue_, op);
    begun.trip.rounds.push_back(plan_round(all, group_->rank(), 0));
  }
  return begun;
}

void ExpertExchange::list_rounds(DispatchTokens op, const TripCounts& all, int64_t count,
                                 const TripScratch& t, Trip& trip) {
  const std::vector<int64_t> first = first_rows(all, group_->rank());
  queue_.upload(t.first_row.data, first.data(), t.first_row.bytes());
  op.first_row = t.first_row;
  for (int64_t i = 0; i < count; ++i) {
    op.begin = i * dims_.round_rows;
    op.end = op.begin + dims_.round_rows;
    uint32_t unused = 0;
    const TripCounts counts(op.split, tell_counts(list_visits(op), unused));
    trip.rounds.push_back(plan_round(counts, group_->rank(), op.first));
    op.first += trip.rounds.back().num_sent();
  }
}

void ExpertExchange::place(const Trip& trip, const Trip::Round& round, const LayerActs& acts,
                           const TripScratch& t, int64_t absent) {
  std::vector<int32_t> come_from;
  for (const int64_t n : round.receive) come_from.push_back(narrow<int32_t>(n));
  queue_.upload(t.come_from.data, come_from.data(), t.come_from.bytes());
  await(0);
  const int64_t guests = round.num_guests(), rows = round.num_rows();
  run(queue_, PlaceGuests{.choices = t.guest_experts.rows(0, guests),
                          .come_from = t.come_from,
                          .split = trip.split,
                          .rank = group_->rank(),
                          .absent = absent,
                          .experts = acts.guest_experts.rows(0, guests),
                          .row_of = acts.guest_row_of.rows(0, guests),
                          .leaving = t.leaving.rows(0, guests),
                          .guest_of = acts.guest_of.rows(0, rows),
                          .choice_of = acts.guest_choice.rows(0, rows),
                          .offsets = acts.expert_offsets.rows(0, trip.split.local() + trip.split.chunks)});
}

ExpertExchange::Rows ExpertExchange::gather(const Field& f, const TensorView& tokens, const Trip::Flow& all) {
  const int64_t bytes = row_bytes_of(f.field), count = all.num_sent(), guests = all.num_received();
  FP4T_CHECK_EQ(row_bytes_of(f.sent), bytes, "bytes of a row that is sent");
  FP4T_CHECK_EQ(row_bytes_of(f.out), bytes, "bytes of a row that arrives");
  FP4T_CHECK(guests <= f.out.dim(0), guests, " guests, room for ", f.out.dim(0));
  if (count > 0) {
    const TensorView to = {f.sent.data, f.field.dtype, {count, f.field.dim(1)}};
    run(queue_, PermuteRows{.x = f.field, .token_of = tokens, .out = to});
  }
  return {all, static_cast<char*>(f.sent.data), static_cast<char*>(f.out.data), bytes};
}

void ExpertExchange::bring(const Trip::Round& round, const std::vector<Field>& fields,
                           const TensorView& tokens, const Field& choices, const TensorView& asked) {
  const Trip::Flow all{round.send, round.receive};
  const auto of_round = [&](const TensorView& list) { return list.rows(round.first, round.num_sent()); };
  // Everything is gathered before anything is begun: beginning an exchange takes the host longer.
  std::vector<Rows> of_fields, now;
  for (const Field& f : fields) of_fields.push_back(gather(f, of_round(tokens), all));
  if (!choices.field.empty()) now.push_back(gather(choices, of_round(asked), all));
  aside_.begin();
  for (const Trip::Flow& flow : round.there) {
    for (Rows& r : of_fields) {
      now.push_back({flow, r.from, r.to, r.bytes});
      r.from += flow.num_sent() * r.bytes;
      r.to += flow.num_received() * r.bytes;
    }
    exchange(now);
    now.clear();
  }
}

void ExpertExchange::await(int64_t chunk) {
  for (; awaited_ <= static_cast<size_t>(chunk); ++awaited_) {
    calls_[awaited_]->wait();
    queue_.wait_for(marks_[awaited_]);
  }
}

void ExpertExchange::bring_back(const Trip::Round& round, int64_t chunk, const std::vector<Sums>& sums) {
  const int64_t left = round.chunks[static_cast<size_t>(chunk)].first_leaving;
  int64_t came = round.first;
  for (int64_t c = 0; c < chunk; ++c) came += round.back[static_cast<size_t>(c)].num_received();
  std::vector<Rows> rows;
  for (const Sums& s : sums) {
    const int64_t bytes = row_bytes_of(s.guests);
    FP4T_CHECK_EQ(row_bytes_of(s.returned), bytes, "bytes of a row that returns");
    rows.push_back({round.back[static_cast<size_t>(chunk)], static_cast<char*>(s.guests.data) + left * bytes,
                    static_cast<char*>(s.returned.data) + came * bytes, bytes});
  }
  aside_.begin();
  exchange(rows);
}

void ExpertExchange::finish() {
  if (calls_.empty()) return;
  for (; awaited_ < calls_.size(); ++awaited_) calls_[awaited_]->wait();
  aside_.end();
  calls_.clear();
  marks_.clear();
  awaited_ = 0;
}

void ExpertExchange::exchange(const std::vector<Rows>& rows) {
  std::vector<Part> send, receive;
  for (const Rows& r : rows) {
    const auto list = [&](char* next, const std::vector<int64_t>& counts, std::vector<Part>& parts) {
      for (size_t rank = 0; rank < counts.size(); ++rank) {
        parts.push_back({static_cast<int>(rank), next, counts[rank] * r.bytes});
        next += parts.back().bytes;
      }
    };
    list(r.from, r.flow.send, send);
    list(r.to, r.flow.receive, receive);
  }
  calls_.push_back((tensors_ ? *tensors_ : *group_).begin_exchange(send, receive));
  marks_.push_back(aside_.mark());
}

}  // namespace fp4t
