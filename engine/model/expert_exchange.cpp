#include "engine/model/expert_exchange.h"

#include <algorithm>

#include "kernels/ops/run.h"

namespace fp4t {

namespace {

std::vector<int64_t> bytes_of(const std::vector<int64_t>& rows, int64_t row_bytes) {
  std::vector<int64_t> bytes = rows;
  for (int64_t& n : bytes) n *= row_bytes;
  return bytes;
}

int64_t row_bytes_of(const TensorView& t) { return t.dim(1) * dtype_bytes(t.dtype); }

}  // namespace

ExpertExchange::ExpertExchange(Queue& queue, Communicator& comm, const Plan& plan)
    : queue_(queue), aside_(queue, plan.axes.expert > 1) {
  const ModelDims d = dims_of(plan);
  sizes_ = {0, d.top_k, d.experts, d.expert_ranks};
  round_rows_ = d.round_rows;
  if (!d.spreads_experts()) return;
  group_ = comm.split(static_cast<int>(plan.axes.data_index(comm.rank())), comm.rank());
  FP4T_CHECK_EQ(static_cast<int64_t>(group_->size()), plan.axes.expert, "ranks of an expert group");
  FP4T_CHECK_EQ(static_cast<int64_t>(group_->rank()), plan.axes.expert_index(comm.rank()));
  if (queue.backend() == Backend::kCuda) {
    tensors_ = make_on_device(*group_, aside_.queue(), transport_of(plan));
  }
}

ExpertExchange::Begun ExpertExchange::begin(const TensorView& choices, uint32_t sample_id) {
  TripSizes sizes = sizes_;
  sizes.tokens = choices.dim(0);
  std::vector<int32_t> chosen = queue_.download(choices.data, choices.bytes()).values<int32_t>();
  const auto ranks = static_cast<size_t>(sizes.ranks);
  // The layer's one message of counts, and with it the sample id.
  struct Facts {
    TripCounts counts;
    int64_t sample_id;
  };
  std::vector<Facts> mine(ranks), all(ranks * ranks);
  const std::vector<TripCounts> counts = count_trip(sizes, chosen.data());
  const int64_t id = sizes.tokens > 0 ? int64_t{sample_id} : int64_t{UINT32_MAX};
  for (size_t r = 0; r < ranks; ++r) mine[r] = {counts[r], id};
  group_->all_gather(mine.data(), all.data(), static_cast<int64_t>(ranks * sizeof(Facts)));
  std::vector<TripCounts> matrix;
  int64_t smallest = id;
  for (const Facts& f : all) {
    matrix.push_back(f.counts);
    smallest = std::min(smallest, f.sample_id);
  }
  Begun begun;
  begun.trip = plan_trip(sizes, chosen.data(), matrix, group_->rank(), round_rows_);
  begun.choices = std::move(chosen);
  begun.sample_id = static_cast<uint32_t>(smallest);
  std::vector<Trip::Round>& rounds = begun.trip.rounds;
  if (rounds.size() == 1) {  // all that comes, comes at once
    for (size_t from = 0; from < ranks; ++from) {
      rounds[0].receive[from] = matrix[from * ranks + static_cast<size_t>(group_->rank())].tokens;
    }
    return begun;
  }
  // Which tokens a round takes depends on the rows of each, so the senders say it.
  std::vector<int64_t> said, heard(ranks * rounds.size());
  for (size_t to = 0; to < ranks; ++to) {
    for (const Trip::Round& round : rounds) said.push_back(round.send[to]);
  }
  const std::vector<int64_t> bytes(ranks, static_cast<int64_t>(rounds.size() * sizeof(int64_t)));
  group_->all_to_all(said.data(), bytes, heard.data(), bytes);
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t i = 0; i < rounds.size(); ++i) rounds[i].receive[from] = heard[from * rounds.size() + i];
  }
  return begun;
}

std::vector<int32_t> ExpertExchange::bring_choices(const Begun& begun, const Trip::Round& round) {
  const auto k = static_cast<size_t>(sizes_.top_k);
  std::vector<int32_t> sent, guests(static_cast<size_t>(round.num_guests()) * k);
  sent.reserve(static_cast<size_t>(round.num_sent()) * k);
  for (int64_t i = 0; i < round.num_sent(); ++i) {
    const auto token = static_cast<size_t>(begun.trip.sent[static_cast<size_t>(round.first + i)]);
    const auto first = begun.choices.begin() + static_cast<int64_t>(token * k);
    sent.insert(sent.end(), first, first + sizes_.top_k);
  }
  const int64_t bytes = sizes_.top_k * static_cast<int64_t>(sizeof(int32_t));
  group_->all_to_all(sent.data(), bytes_of(round.send, bytes), guests.data(), bytes_of(round.receive, bytes));
  return guests;
}

void ExpertExchange::bring(const Trip::Round& round, const TensorView& field, const TensorView& tokens,
                           const TensorView& sent, const TensorView& out) {
  const int64_t bytes = row_bytes_of(field), count = round.num_sent();
  FP4T_CHECK_EQ(row_bytes_of(sent), bytes, "bytes of a row that is sent");
  FP4T_CHECK_EQ(row_bytes_of(out), bytes, "bytes of a row that arrives");
  FP4T_CHECK(round.num_guests() <= out.dim(0), round.num_guests(), " guests, room for ", out.dim(0));
  if (count > 0) {
    const TensorView rows = {sent.data, field.dtype, {count, field.dim(1)}};
    run(queue_, PermuteRows{.x = field, .token_of = tokens.rows(round.first, count), .out = rows});
  }
  exchange(sent.data, bytes_of(round.send, bytes), out.data, bytes_of(round.receive, bytes));
}

void ExpertExchange::bring_back(const Trip::Round& round, const TensorView& guests,
                                const TensorView& returned) {
  const int64_t bytes = row_bytes_of(guests);
  FP4T_CHECK_EQ(row_bytes_of(returned), bytes, "bytes of a row that returns");
  char* out = static_cast<char*>(returned.data) + round.first * bytes;
  exchange(guests.data, bytes_of(round.receive, bytes), out, bytes_of(round.send, bytes));
}

void ExpertExchange::exchange(const void* in, const std::vector<int64_t>& send, void* out,
                              const std::vector<int64_t>& receive) {
  aside_.begin();
  (tensors_ ? *tensors_ : *group_).all_to_all(in, send, out, receive);
  aside_.end();
}

}  // namespace fp4t
